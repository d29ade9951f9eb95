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

// Reads a decode leg's JSON: where a prompt is held, or by which transfer it was pushed to this
// node, or why the prefill node handed nothing over. If it is absent, {}, or has nothing to pull
// ("do_remote_prefill": false), the node must compute the prompt itself.
absl::Status ReadDecodeLeg(const HandoffJson& json, Request* request);

// Checks a prefill leg's JSON. It asks that the caches be held ("do_remote_decode": true) or says
// nothing. The gateway says nothing to connectors that it does not know, and passes the answer on
// all the same.
absl::Status CheckAsksToHold(const HandoffJson& json);

}  // namespace sluice
