#include "src/server/tracing.h"

#include <grpcpp/security/credentials.h>

#include <utility>

#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/server/model_setup.h"
#include "src/service/access/credentials.h"
#include "src/service/wire/host_port.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<SpanExporter>> NewSpanExporter(const Config& config,
                                                              const TlsFiles& tls,
                                                              const std::string& program,
                                                              const Metrics* metrics) {
  if (config.otlp_endpoint().empty()) return nullptr;
  SLUICE_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(config.otlp_endpoint()));
  if (address.port == 0) {
    return absl::InvalidArgumentError("otlp_endpoint: port 0 cannot be called");
  }
  SpanExporter::Options options;
  options.endpoint = address.ToString();
  if (config.otlp_tls() == "off") {
    options.credentials = grpc::InsecureChannelCredentials();
  } else if (tls.enabled()) {
    options.credentials = NewChannelCredentials(tls);
  } else {
    options.credentials = grpc::SslCredentials({});
  }
  options.resource = {program, Version()};
  options.metrics = metrics;
  Log(LogLevel::kInfo, "calls are traced",
      {{"otlp_endpoint", options.endpoint},
       {"otlp_tls", config.otlp_tls()},
       {"otlp_sample_ratio", config.otlp_sample_ratio()}});
  return std::make_unique<SpanExporter>(std::move(options));
}

}  // namespace sluice
