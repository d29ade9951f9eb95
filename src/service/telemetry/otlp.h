// Makes OTLP messages of spans.
#pragma once

#include <string>
#include <vector>

#include "absl/types/span.h"
#include "src/service/telemetry/span.h"

namespace opentelemetry::proto::collector::trace::v1 {
class ExportTraceServiceRequest;
}

namespace sluice {

// The process that sends.
struct SpanResource {
  std::string service_name;
  std::string service_version;
};

// Fills `request` with the spans, and with the resource: its name and version, this host's name and
// this process's id.
void MakeExportRequest(const SpanResource& resource, absl::Span<const Span> spans,
                       opentelemetry::proto::collector::trace::v1::ExportTraceServiceRequest* out);

}  // namespace sluice
