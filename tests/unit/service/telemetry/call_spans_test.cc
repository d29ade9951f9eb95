// Tests what a call becomes in a trace: its stages, the place of its span, and who decides whether
// it has one.
#include "src/service/telemetry/call_spans.h"

#include <catch2/catch.hpp>
#include <map>
#include <set>

#include "absl/strings/escaping.h"
#include "opentelemetry/proto/collector/trace/v1/trace_service.pb.h"
#include "src/request/token_sink.h"
#include "src/service/telemetry/otlp.h"
#include "src/service/wire/call_stages.h"

namespace sluice {
namespace {

constexpr char kTrace[] = "0af7651916cd43dd8448eb211c80319c";
constexpr char kParent[] = "b7ad6b7169203331";
const absl::Time kBegin = absl::FromUnixSeconds(1'000'000'000);

std::string Traceparent(const std::string& flags) {
  return std::string("00-") + kTrace + "-" + kParent + "-" + flags;
}

CallFields Call(const std::string& method, const std::string& traceparent = "") {
  CallFields call;
  call.method = method;
  call.trace.traceparent = traceparent;
  call.status = "OK";
  call.begin = kBegin;
  call.total = absl::Seconds(10);
  return call;
}

// A sequence that waited 2 s for its transfer, 1 s for a slot and 1 s for its HBM, had its first
// token after 5 s and its last after 9.
FinishInfo Life() {
  FinishInfo end;
  end.reason = FinishInfo::Reason::kLength;
  end.transfer_id = "5f";
  end.prompt_tokens = 33;
  end.completion_tokens = 24;
  end.queued = absl::Seconds(1);
  end.first_token = absl::Seconds(5);
  end.total = absl::Seconds(9);
  end.stages = {absl::Seconds(2), absl::Seconds(3), absl::Seconds(4)};
  return end;
}

// Returns name:begin-end in seconds.
std::vector<std::string> Told(const std::vector<CallStage>& stages) {
  std::vector<std::string> out;
  for (const CallStage& stage : stages) {
    out.push_back(std::string(stage.name) + ":" +
                  std::to_string(absl::ToInt64Seconds(stage.begin)) + "-" +
                  std::to_string(absl::ToInt64Seconds(stage.end)));
  }
  return out;
}

using Stages = std::vector<std::string>;

TEST_CASE("a sequence's stages follow each other, from its arrival in the call to its end") {
  CHECK(Told(StagesOf(Life(), absl::Seconds(1), false)) ==
        Stages{"transfer:1-3", "queue:3-4", "warm_up:4-5", "first_token:5-6", "decode:6-10"});
  CHECK(Told(StagesOf(Life(), absl::ZeroDuration(), true)).front() == "pull:0-2");
}

TEST_CASE("a stage that a sequence did not reach is not told, and its last one ends with it") {
  FinishInfo end = Life();
  end.completion_tokens = 0;
  CHECK(Told(StagesOf(end, {}, false)) ==
        Stages{"transfer:0-2", "queue:2-3", "warm_up:3-4", "first_token:4-9"});
  end.stages = {absl::Seconds(2), absl::InfiniteDuration(), absl::InfiniteDuration()};
  CHECK(Told(StagesOf(end, {}, false)) == Stages{"transfer:0-2", "queue:2-9"});
  end.stages = {};
  end.transfer_id = "";
  CHECK(Told(StagesOf(end, {}, false)) == Stages{"transfer:0-9"});
}

TEST_CASE("a prompt that was not handed over has no transfer, a handed-over token no first_token") {
  FinishInfo end = Life();
  end.transfer_id = "";
  end.stages.ready = absl::ZeroDuration();
  CHECK(Told(StagesOf(end, {}, false)).front() == "queue:0-3");
  end = Life();
  end.first_token = end.stages.ready;  // it went to the caller before anything was computed
  CHECK(Told(StagesOf(end, {}, false)) ==
        Stages{"transfer:0-2", "queue:2-3", "warm_up:3-4", "decode:4-9"});
  end.stages.admitted = end.stages.stepped;  // HBM needed no time
  CHECK(Told(StagesOf(end, {}, false)) == Stages{"transfer:0-2", "queue:2-4", "decode:4-9"});
}

TEST_CASE("the caller decides about a trace of his, whatever the ratio") {
  const std::string generate = "/sluice.v1.Decode/Generate";
  for (const double ratio : {0.0, 1.0}) {
    const auto place = PlaceOf(Call(generate, Traceparent("01")), ratio);
    REQUIRE(place.has_value());
    CHECK(absl::BytesToHexString(place->trace_id) == kTrace);
    CHECK(absl::BytesToHexString(place->parent_id) == kParent);
    CHECK(PlaceOf(Call(generate, Traceparent("0f")), ratio).has_value());
    CHECK_FALSE(PlaceOf(Call(generate, Traceparent("00")), ratio).has_value());
    CHECK_FALSE(PlaceOf(Call(generate, Traceparent("fe")), ratio).has_value());
  }
}

TEST_CASE("a request without a trace begins one, as often as the ratio says") {
  const CallFields call = Call("/vllm.grpc.engine.VllmEngine/Generate");
  CHECK_FALSE(PlaceOf(call, 0).has_value());
  std::set<std::string> traces;
  int kept = 0;
  for (int i = 0; i < 2000; ++i) {
    const auto always = PlaceOf(call, 1);
    REQUIRE(always.has_value());
    CHECK(always->trace_id.size() == 16);
    CHECK(always->parent_id.empty());
    traces.insert(always->trace_id);
    kept += PlaceOf(call, 0.25).has_value() ? 1 : 0;
  }
  CHECK(traces.size() == 2000);
  CHECK(kept > 380);  // six deviations of 19 around 500
  CHECK(kept < 620);
}

TEST_CASE("calls by which no request enters begin no trace, and others are in none") {
  for (const char* method : {"/sluice.v1.KvIngest/Write", "/sluice.v1.KvSource/Read"}) {
    CHECK_FALSE(PlaceOf(Call(method), 1).has_value());
    CHECK(PlaceOf(Call(method, Traceparent("01")), 0).has_value());
  }
  for (const char* method : {"/sluice.v1.Admin/GetModel", "/grpc.health.v1.Health/Check", ""}) {
    CHECK(SpanName(method).empty());
    CHECK_FALSE(PlaceOf(Call(method, Traceparent("01")), 1).has_value());
  }
}

TEST_CASE("a call's span is the caller's child, and its stages are its own children") {
  CallFields call = Call("/sluice.v1.Decode/Generate", Traceparent("01"));
  call.trace.tracestate = "a=1";
  call.trace.request_id = "chatcmpl-7";
  call.request_id = "r1";
  call.prompt_tokens = 33;
  call.output_tokens = 24;
  call.max_tokens = 24;
  call.queued = absl::Milliseconds(1500);
  call.stages = StagesOf(Life(), absl::Seconds(1), false);
  const std::vector<Span> spans = SpansOf(call, *PlaceOf(call, 0));
  REQUIRE(spans.size() == 6);
  const Span& own = spans.front();
  CHECK(own.name == "generate");
  CHECK(own.server);
  CHECK_FALSE(own.failed);
  CHECK(absl::BytesToHexString(own.parent_id) == kParent);
  CHECK(own.begin == kBegin);
  CHECK(own.end == kBegin + absl::Seconds(10));
  std::map<std::string, Span::Value> attributes(own.attributes.begin(), own.attributes.end());
  CHECK(attributes.at("gen_ai.request.id") == Span::Value("r1"));
  CHECK(attributes.at("sluice.x_request_id") == Span::Value("chatcmpl-7"));
  CHECK(attributes.at("gen_ai.usage.prompt_tokens") == Span::Value(int64_t{33}));
  CHECK(attributes.at("gen_ai.usage.completion_tokens") == Span::Value(int64_t{24}));
  CHECK(attributes.at("gen_ai.request.max_tokens") == Span::Value(int64_t{24}));
  CHECK(attributes.at("gen_ai.latency.time_in_queue") == Span::Value(1.5));
  CHECK(attributes.at("gen_ai.latency.e2e") == Span::Value(10.0));
  std::set<std::string> ids;
  for (const Span& span : spans) {
    CHECK(absl::BytesToHexString(span.trace_id) == kTrace);
    CHECK(span.tracestate == "a=1");
    CHECK(span.span_id.size() == 8);
    CHECK(ids.insert(span.span_id).second);
    if (&span != &own) CHECK(span.parent_id == own.span_id);
    CHECK(own.begin <= span.begin);
    CHECK(span.begin <= span.end);
    CHECK(span.end <= own.end);
  }
  CHECK(spans[2].name == "queue");
  CHECK(spans[2].begin == kBegin + absl::Seconds(3));
}

TEST_CASE("a call that failed says so, with its reason") {
  CallFields call = Call("/sluice.v1.Decode/Generate", Traceparent("01"));
  call.status = "NOT_FOUND";
  call.reason = "TRANSFER_NOT_FOUND";
  const std::vector<Span> spans = SpansOf(call, *PlaceOf(call, 0));
  REQUIRE(spans.size() == 1);
  CHECK(spans[0].failed);
  CHECK(spans[0].error == "NOT_FOUND TRANSFER_NOT_FOUND");
}

TEST_CASE("spans become messages of OTLP") {
  namespace otlp = opentelemetry::proto;
  CallFields call = Call("/sluice.v1.Decode/Generate", Traceparent("01"));
  call.stages = {{"queue", absl::Seconds(1), absl::Seconds(2)}};
  call.status = "ABORTED";
  otlp::collector::trace::v1::ExportTraceServiceRequest request;
  MakeExportRequest({"sluice-server", "1.2.3"}, SpansOf(call, *PlaceOf(call, 0)), &request);
  REQUIRE(request.resource_spans_size() == 1);
  std::map<std::string, std::string> resource;
  for (const auto& entry : request.resource_spans(0).resource().attributes()) {
    resource[entry.key()] = entry.value().string_value();
  }
  CHECK(resource.at("service.name") == "sluice-server");
  CHECK(resource.at("service.version") == "1.2.3");
  CHECK(resource.contains("process.pid"));
  const auto& spans = request.resource_spans(0).scope_spans(0).spans();
  REQUIRE(spans.size() == 2);
  CHECK(spans[0].kind() == otlp::trace::v1::Span::SPAN_KIND_SERVER);
  CHECK(spans[0].status().code() == otlp::trace::v1::Status::STATUS_CODE_ERROR);
  CHECK(spans[0].status().message() == "ABORTED");
  CHECK(spans[1].kind() == otlp::trace::v1::Span::SPAN_KIND_INTERNAL);
  CHECK(spans[1].status().code() == otlp::trace::v1::Status::STATUS_CODE_UNSET);
  CHECK(spans[1].parent_span_id() == spans[0].span_id());
  CHECK(spans[1].start_time_unix_nano() == 1'000'000'001'000'000'000u);
  CHECK(spans[1].end_time_unix_nano() == 1'000'000'002'000'000'000u);
}

}  // namespace
}  // namespace sluice
