// A span of a trace (OpenTelemetry), free of protobuf types.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/time.h"

namespace sluice {

struct Span {
  using Value = std::variant<std::string, int64_t, double>;

  std::string trace_id;   // 16 bytes
  std::string span_id;    // 8 bytes
  std::string parent_id;  // 8 bytes; empty for the first span of a trace
  std::string tracestate;
  std::string name;
  bool server = false;  // a call that this node served; else a part of one
  absl::Time begin, end;
  std::vector<std::pair<std::string, Value>> attributes;
  bool failed = false;
  std::string error;  // with `failed`
};

}  // namespace sluice
