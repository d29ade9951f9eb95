// The names that a request has outside of this node: the id that a router gave it, and its place in
// a distributed trace (W3C Trace Context, level 1). Both go on as they came, so the spans that
// nodes make of a request (src/service/telemetry/) have the caller's span above them.
#pragma once

#include <string>
#include <string_view>

namespace sluice {

struct RequestTrace {
  // Metadata x-request-id: 1 to kMaxExternalIdBytes printable ASCII characters without blanks.
  // Empty if none came. It is not unique: a retry has the same, and so have the legs of one
  // request.
  std::string request_id;
  std::string traceparent;  // empty if none came
  std::string tracestate;   // only with a traceparent

  // Returns 32 lower-case hex digits, or nothing.
  std::string_view trace_id() const;
  // Returns 16 lower-case hex digits, or nothing.
  std::string_view parent_id() const;
  // Returns whether the caller keeps spans of the trace.
  bool sampled() const;
};
inline constexpr size_t kMaxExternalIdBytes = 128;
// The standard says "Vendors SHOULD propagate at least 512 characters". A longer tracestate is
// dropped whole.
inline constexpr size_t kMaxTracestateBytes = 512;

bool IsExternalId(std::string_view id);
// Returns whether `header` is version-traceid-parentid-flags in lower-case hex, with neither id all
// zeros and a version other than ff. Version 00 has nothing behind the flags; a later one may,
// behind a dash.
bool IsTraceparent(std::string_view header);
// Returns whether `header` is at most 32 members key=value with commas between them, each key once.
bool IsTracestate(std::string_view header);

}  // namespace sluice
