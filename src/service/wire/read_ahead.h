// A stream of messages read one ahead of who takes them. While one is taken, on the thread that
// brought it, the transport receives the next, and one more may wait: then nothing is read, so that
// the transport's flow control holds the sender to the speed at which messages are taken. For
// reactors of either side of a call.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace sluice {

class ReadAhead {
 protected:
  ReadAhead() = default;
  virtual ~ReadAhead() = default;

  // Begins to read. Once.
  void ReadOn() { Read(&message_); }
  // The reaction to gRPC's end of a read; false: the sender has closed its side, or the call is
  // over.
  void ReadDone(bool ok);

  // gRPC's StartRead.
  virtual void Read(grpc::ByteBuffer* message) = 0;
  // Messages one after the other, in order. An error is the last.
  virtual absl::Status Take(grpc::ByteBuffer* message) = 0;
  // Nothing will be taken any more: what Take returned, or OK where there is nothing left. Once;
  // after an error a read may still be under way.
  virtual void Ended(const absl::Status& status) = 0;

 private:
  // Takes current_; false: there is no next one now, or it has ended.
  bool TakeCurrent();

  grpc::ByteBuffer message_;  // the read under way
  grpc::ByteBuffer current_;  // of whoever takes
  absl::Mutex mutex_;
  grpc::ByteBuffer waiting_ ABSL_GUARDED_BY(mutex_);  // no read is under way while it is there
  bool has_waiting_ ABSL_GUARDED_BY(mutex_) = false;
  bool taking_ ABSL_GUARDED_BY(mutex_) = false;  // somebody takes, or it has ended with an error
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;  // no read will succeed any more
};

}  // namespace sluice
