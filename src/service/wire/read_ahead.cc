#include "src/service/wire/read_ahead.h"

#include <utility>

namespace sluice {

void ReadAhead::ReadDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    if (!ok) {
      closed_ = true;
      if (taking_) return;  // the thread that takes also ends the stream
    } else if (taking_) {
      waiting_.Swap(&message_);
      has_waiting_ = true;
      return;
    } else {
      taking_ = true;
      current_.Swap(&message_);
    }
  }
  if (!ok) return Ended(absl::OkStatus());
  Read(&message_);
  while (TakeCurrent()) continue;
}

bool ReadAhead::TakeCurrent() {
  const absl::Status status = Take(&current_);
  current_.Clear();
  if (!status.ok()) {
    // taking_ stays set, so that messages that are still read are dropped.
    Ended(status);
    return false;
  }
  bool more, closed;
  {
    absl::MutexLock lock(&mutex_);
    more = std::exchange(has_waiting_, false);
    if (more) current_.Swap(&waiting_);
    taking_ = more;
    closed = closed_;
  }
  if (more) {
    Read(&message_);
  } else if (closed) {
    Ended(absl::OkStatus());
  }
  return more;
}

}  // namespace sluice
