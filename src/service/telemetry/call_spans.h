// Makes the spans of a call from its record when the call is over, so that nothing is spent on them
// while it runs. A call has one span of its own, and one below it for each stage that it reached:
// transfer or pull, queue, warm_up, first_token, decode.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/request/request_trace.h"
#include "src/service/telemetry/span.h"
#include "src/service/wire/call_record.h"

namespace sluice {

class SpanExporter;

// Where a call's span stands in a trace.
struct SpanPlace {
  std::string trace_id;   // 16 bytes
  std::string parent_id;  // 8 bytes; empty for the first span of a trace
  std::string tracestate;
};

// Returns the name of a method's span, or nothing for methods that have none.
std::string_view SpanName(std::string_view method);

// Returns the place of a call's span, or nothing if the call is not traced. A call with a
// traceparent is traced if its caller traces it (the flag `sampled`). One without begins a trace
// with probability `ratio`, if its method may: those by which a request enters a node do.
std::optional<SpanPlace> PlaceOf(const CallFields& call, double ratio);

// Returns the spans of a call; its own is the first.
std::vector<Span> SpansOf(const CallFields& call, const SpanPlace& place);

// Gives the spans of calls that are over to an exporter, which outlives it. Thread-safe.
class CallTracer {
 public:
  CallTracer(SpanExporter* exporter, double ratio) : exporter_(exporter), ratio_(ratio) {}
  void Ended(const CallFields& call) const;

 private:
  SpanExporter* const exporter_;
  const double ratio_;
};

}  // namespace sluice
