// Who turns requests into tokens: a decode node's engine, or a prefill node, whose answer is one
// token and where the caches are. Callable from any thread.
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
  // Checks what can be checked at once and queues the request. A returned error means that the sink
  // will never be called; after an id the sink gets exactly one Finish.
  virtual absl::StatusOr<SequenceId> Submit(Request request) = 0;
  // The sequence, if it is alive, ends with `why`.
  virtual void Cancel(SequenceId id, absl::Status why) = 0;
  // The same by its caller's name for it. `done(found)` may run on another thread.
  virtual void CancelRequest(const std::string& request_id, absl::Status why,
                             std::function<void(bool)> done) = 0;
  // A reader has taken tokens: a sequence that waited for that can go on.
  virtual void Wake() = 0;
};

}  // namespace sluice
