// The exporter of spans, as the settings want it.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/metrics/metrics.h"
#include "src/service/access/tls_files.h"
#include "src/service/telemetry/span_exporter.h"

namespace sluice {

// Returns null if otlp_endpoint is empty. `metrics` outlives the exporter. The error names the
// setting.
absl::StatusOr<std::unique_ptr<SpanExporter>> NewSpanExporter(const Config& config,
                                                              const TlsFiles& tls,
                                                              const std::string& program,
                                                              const Metrics* metrics);

}  // namespace sluice
