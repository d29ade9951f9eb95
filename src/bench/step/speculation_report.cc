#include "src/bench/step/speculation_report.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace sluice::bench {
namespace {

double StepSeconds(const SpeculationSide& side) {
  return side.seconds / static_cast<double>(side.steps);
}

double RatioOf(const SpeculationResult& result) {
  return result.drafted.rate() / result.plain.rate();
}

Figure SideFigure(const SpeculationOptions& options, const std::string& drafts,
                  const SpeculationSide& side) {
  Figure f;
  f.name = absl::StrFormat("speculation, batch %d, context %d, %s", options.run.batch,
                           options.run.context, drafts);
  f.unit = "1/s";
  f.median = side.tokens_per_second.median;
  f.low = side.tokens_per_second.low;
  f.high = side.tokens_per_second.high;
  f.samples = side.tokens_per_second.samples;
  f.more = {{"tokens_per_second", side.rate()},
            {"tokens_per_second_per_sequence", side.rate() / options.run.batch},
            {"step_seconds", StepSeconds(side)},
            {"tokens_per_step", side.tokens_per_step}};
  return f;
}

}  // namespace

std::string DraftsInWords(const SpeculationOptions& options) {
  return absl::StrFormat("%d drafts by stated probability %g, not by a model%s",
                         options.draft_tokens, options.probability,
                         options.draft_layer ? ", beside a next-token layer that runs" : "");
}

std::string SpeculationHeader(const SpeculationOptions& options) {
  return absl::StrFormat("\n%s\n%6s %8s %12s %12s %7s %10s %10s %9s %9s %9s\n",
                         DraftsInWords(options), "batch", "context", "tokens/s", "with drafts",
                         "ratio", "ms a step", "drafted", "of a step", "P gives", "accepted");
}

std::string SpeculationLine(const SpeculationOptions& options, const SpeculationResult& result) {
  return absl::StrFormat("%6d %8d %12.1f %12.1f %7.2f %10.2f %10.2f %9.2f %9.2f %8.1f%%\n",
                         options.run.batch, options.run.context, result.plain.rate(),
                         result.drafted.rate(), RatioOf(result), StepSeconds(result.plain) * 1e3,
                         StepSeconds(result.drafted) * 1e3, result.drafted.tokens_per_step,
                         ExpectedTokensPerStep(options.draft_tokens, options.probability),
                         100 * result.acceptance);
}

std::vector<Figure> SpeculationFigures(const SpeculationOptions& options,
                                       const SpeculationResult& result) {
  Figure drafted = SideFigure(options, DraftsInWords(options), result.drafted);
  drafted.more.insert(drafted.more.end(),
                      {{"ratio", RatioOf(result)},
                       {"stated_acceptance", options.probability},
                       {"acceptance", result.acceptance},
                       {"judged_drafts", static_cast<double>(result.judged)},
                       {"expected_tokens_per_step",
                        ExpectedTokensPerStep(options.draft_tokens, options.probability)}});
  return {SideFigure(options, "without drafts", result.plain), std::move(drafted)};
}

}  // namespace sluice::bench
