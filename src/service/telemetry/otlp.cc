#include "src/service/telemetry/otlp.h"

#include <unistd.h>

#include <array>

#include "opentelemetry/proto/collector/trace/v1/trace_service.pb.h"

namespace sluice {
namespace {

namespace otlp = opentelemetry::proto;

constexpr uint32_t kSampledFlag = 1;

void Add(const std::string& key, const Span::Value& value,
         google::protobuf::RepeatedPtrField<otlp::common::v1::KeyValue>* out) {
  otlp::common::v1::KeyValue* const entry = out->Add();
  entry->set_key(key);
  otlp::common::v1::AnyValue* const any = entry->mutable_value();
  if (const auto* text = std::get_if<std::string>(&value)) {
    any->set_string_value(*text);
  } else if (const auto* whole = std::get_if<int64_t>(&value)) {
    any->set_int_value(*whole);
  } else {
    any->set_double_value(std::get<double>(value));
  }
}

std::string HostName() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? std::string(name.data()) : "";
}

void Convert(const Span& span, otlp::trace::v1::Span* out) {
  out->set_trace_id(span.trace_id);
  out->set_span_id(span.span_id);
  out->set_parent_span_id(span.parent_id);
  out->set_trace_state(span.tracestate);
  out->set_flags(kSampledFlag);
  out->set_name(span.name);
  out->set_kind(span.server ? otlp::trace::v1::Span::SPAN_KIND_SERVER
                            : otlp::trace::v1::Span::SPAN_KIND_INTERNAL);
  out->set_start_time_unix_nano(static_cast<uint64_t>(absl::ToUnixNanos(span.begin)));
  out->set_end_time_unix_nano(static_cast<uint64_t>(absl::ToUnixNanos(span.end)));
  for (const auto& [key, value] : span.attributes) Add(key, value, out->mutable_attributes());
  if (!span.failed) return;
  out->mutable_status()->set_code(otlp::trace::v1::Status::STATUS_CODE_ERROR);
  out->mutable_status()->set_message(span.error);
}

}  // namespace

void MakeExportRequest(const SpanResource& resource, absl::Span<const Span> spans,
                       otlp::collector::trace::v1::ExportTraceServiceRequest* out) {
  otlp::trace::v1::ResourceSpans* const all = out->add_resource_spans();
  auto* const attributes = all->mutable_resource()->mutable_attributes();
  Add("service.name", resource.service_name, attributes);
  Add("service.version", resource.service_version, attributes);
  Add("host.name", HostName(), attributes);
  Add("process.pid", static_cast<int64_t>(getpid()), attributes);
  otlp::trace::v1::ScopeSpans* const scope = all->add_scope_spans();
  scope->mutable_scope()->set_name("sluice");
  scope->mutable_scope()->set_version(resource.service_version);
  for (const Span& span : spans) Convert(span, scope->add_spans());
}

}  // namespace sluice
