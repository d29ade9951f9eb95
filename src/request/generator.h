// Turns requests into tokens. A decode node's engine is one; so is a prefill node, whose answer is
// one token and the place of the caches. Callable from any thread.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/strong_id.h"
#include "src/request/request.h"

namespace sluice {

class Generator {
 public:
  virtual ~Generator() = default;
  // Checks what can be checked at once, and queues the request. After an error the sink will never
  // be called. After an id the sink gets exactly one Finish.
  virtual absl::StatusOr<SequenceId> Submit(Request request) = 0;
  // Ends the sequence with `why` if it is alive.
  virtual void Cancel(SequenceId id, absl::Status why) = 0;
  // Ends the sequence that has the caller's name for it. `done(found)` may run on another thread.
  virtual void CancelRequest(const std::string& request_id, absl::Status why,
                             std::function<void(bool)> done) = 0;
  // Says that a reader has taken tokens, so that a sequence that waited for that can go on.
  virtual void Wake() = 0;
};

}  // namespace sluice
