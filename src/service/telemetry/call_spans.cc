#include "src/service/telemetry/call_spans.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "src/base/rng.h"
#include "src/service/telemetry/span_exporter.h"

namespace sluice {
namespace {

constexpr size_t kTraceIdBytes = 16, kSpanIdBytes = 8;

struct TracedMethod {
  std::string_view method;  // "*" stands for any service
  std::string_view name;
  bool begins;  // whether a call without a traceparent may begin a trace
};
constexpr TracedMethod kMethods[] = {
    {"*/Generate", "generate", true},
    {"/sluice.v1.Prefill/Run", "prefill", true},
    {"/sluice.v1.KvIngest/Write", "transfer.write", false},
    {"/sluice.v1.KvSource/Read", "pull.read", false},
};

const TracedMethod* Find(std::string_view method) {
  for (const TracedMethod& traced : kMethods) {
    const bool any = traced.method.starts_with('*');
    if (any ? method.ends_with(traced.method.substr(1)) : method == traced.method) return &traced;
  }
  return nullptr;
}

std::string RandomId(size_t bytes) {
  std::string id(bytes, '\0');
  do {  // an id of zeros is none
    RandomBytes(id.data(), bytes);
  } while (id.find_first_not_of('\0') == std::string::npos);
  return id;
}

// Returns whether a trace that begins here is kept: whether the number that its id ends with is
// below `ratio` of the largest one. Nodes that draw with the same ratio agree on a trace.
bool Drawn(const std::string& trace_id, double ratio) {
  uint64_t number = 0;
  for (size_t i = kTraceIdBytes - sizeof(number); i < kTraceIdBytes; ++i) {
    number = number << 8 | static_cast<uint8_t>(trace_id[i]);
  }
  return static_cast<double>(number >> 11) * 0x1p-53 < ratio;
}

// The names are those of vLLM's spans, where it has one.
void AddAttributes(const CallFields& call, Span* span) {
  auto& out = span->attributes;
  const auto text = [&](const char* key, const std::string& value) {
    if (!value.empty()) out.emplace_back(key, value);
  };
  const auto number = [&](const char* key, uint64_t value) {
    out.emplace_back(key, static_cast<int64_t>(value));
  };
  const auto seconds = [&](const char* key, absl::Duration value) {
    out.emplace_back(key, absl::ToDoubleSeconds(value));
  };
  text("rpc.system", "grpc");
  text("rpc.method", call.method.substr(call.method.empty() ? 0 : 1));
  text("gen_ai.request.id", call.request_id);
  text("sluice.x_request_id", call.trace.request_id);
  text("sluice.transfer_id", call.transfer_id);
  text("sluice.reason", call.reason);
  if (call.bytes > 0) number("sluice.bytes", call.bytes);
  if (call.prompt_tokens == 0) return;
  number("gen_ai.usage.prompt_tokens", call.prompt_tokens);
  number("gen_ai.usage.completion_tokens", call.output_tokens);
  number("sluice.cached_tokens", call.cached_tokens);
  if (call.max_tokens.has_value()) number("gen_ai.request.max_tokens", *call.max_tokens);
  if (call.temperature.has_value()) {
    out.emplace_back("gen_ai.request.temperature", *call.temperature);
  }
  if (call.top_p.has_value()) out.emplace_back("gen_ai.request.top_p", *call.top_p);
  seconds("gen_ai.latency.time_in_queue", call.queued);
  if (call.output_tokens > 0) seconds("gen_ai.latency.time_to_first_token", call.first_token);
  seconds("gen_ai.latency.e2e", call.total);
}

}  // namespace

std::string_view SpanName(std::string_view method) {
  const TracedMethod* const traced = Find(method);
  return traced == nullptr ? std::string_view() : traced->name;
}

std::optional<SpanPlace> PlaceOf(const CallFields& call, double ratio) {
  const TracedMethod* const traced = Find(call.method);
  if (traced == nullptr) return std::nullopt;
  if (!call.trace.traceparent.empty()) {
    if (!call.trace.sampled()) return std::nullopt;
    return SpanPlace{absl::HexStringToBytes(std::string(call.trace.trace_id())),
                     absl::HexStringToBytes(std::string(call.trace.parent_id())),
                     call.trace.tracestate};
  }
  if (!traced->begins || ratio <= 0) return std::nullopt;
  SpanPlace place{RandomId(kTraceIdBytes), "", ""};
  if (!Drawn(place.trace_id, ratio)) return std::nullopt;
  return place;
}

std::vector<Span> SpansOf(const CallFields& call, const SpanPlace& place) {
  Span own;
  own.trace_id = place.trace_id;
  own.span_id = RandomId(kSpanIdBytes);
  own.parent_id = place.parent_id;
  own.tracestate = place.tracestate;
  own.name = SpanName(call.method);
  own.server = true;
  own.begin = call.begin;
  own.end = call.begin + call.total;
  own.failed = call.status != "OK";
  if (own.failed)
    own.error = absl::StrCat(call.status, call.reason.empty() ? "" : " ", call.reason);
  AddAttributes(call, &own);
  std::vector<Span> spans = {std::move(own)};
  for (const CallStage& stage : call.stages) {
    Span part;
    part.trace_id = place.trace_id;
    part.span_id = RandomId(kSpanIdBytes);
    part.parent_id = spans.front().span_id;
    part.tracestate = place.tracestate;
    part.name = stage.name;
    part.begin = call.begin + stage.begin;
    part.end = call.begin + stage.end;
    spans.push_back(std::move(part));
  }
  return spans;
}

void CallTracer::Ended(const CallFields& call) const {
  const std::optional<SpanPlace> place = PlaceOf(call, ratio_);
  if (place.has_value()) exporter_->Add(SpansOf(call, *place));
}

}  // namespace sluice
