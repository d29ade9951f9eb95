// The JSON by which a prefill leg says where its caches are and a decode leg finds them. The
// gateway passes it on byte for byte. Errors are INVALID_ARGUMENT.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "src/request/request.h"

namespace sluice {

// The JSON as a request has it. `field` names it in errors.
struct HandoffJson {
  std::string field;
  bool given = false;
  const std::string& text;
};

// A decode leg's. Absent, {}, or with nothing to be pulled ("do_remote_prefill": false): the node
// has to compute the prompt itself.
absl::Status ReadDecodeLeg(const HandoffJson& json, Request* request);

// A prefill leg's: it must ask that the caches be held ("do_remote_decode": true).
absl::Status CheckAsksToHold(const HandoffJson& json);

}  // namespace sluice
