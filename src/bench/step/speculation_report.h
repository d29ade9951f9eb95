// The two runs of the bench of speculation as lines of a table and as figures of a report.
#pragma once

#include <string>
#include <vector>

#include "src/bench/report/report.h"
#include "src/bench/step/speculation_run.h"

namespace sluice::bench {

// Says what drafts, for every place that shows a figure: "3 drafts by stated probability 0.7, not
// by a model".
std::string DraftsInWords(const SpeculationOptions& options);

// Returns the two lines above the table's rows.
std::string SpeculationHeader(const SpeculationOptions& options);
std::string SpeculationLine(const SpeculationOptions& options, const SpeculationResult& result);

// Returns two figures in tokens/s: without drafts, and with them.
std::vector<Figure> SpeculationFigures(const SpeculationOptions& options,
                                       const SpeculationResult& result);

}  // namespace sluice::bench
