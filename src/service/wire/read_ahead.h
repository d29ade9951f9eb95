// Reads a stream of messages one ahead of the thread that takes them. While one message is taken,
// on the thread that brought it, the transport receives the next, and one more may wait. Then
// nothing is read, so that the transport's flow control holds the sender to the speed at which
// messages are taken. Serves the reactors of both sides of a call.
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

  // Begins to read. Call it once.
  void ReadOn() { Read(&message_); }
  // Reacts to the end of gRPC's read. `ok` is false when the sender has closed its side or the call
  // is over.
  void ReadDone(bool ok);

  // Calls gRPC's StartRead.
  virtual void Read(grpc::ByteBuffer* message) = 0;
  // Takes the next message; calls come one after the other, in order. An error ends the stream.
  virtual absl::Status Take(grpc::ByteBuffer* message) = 0;
  // Called once, when nothing will be taken any more: with the error that Take returned, or with OK
  // after the last message. After an error a read may still be under way.
  virtual void Ended(const absl::Status& status) = 0;

 private:
  // Takes current_. Returns false if there is no next message now or the stream has ended.
  bool TakeCurrent();

  grpc::ByteBuffer message_;  // the read under way
  grpc::ByteBuffer current_;  // used by the thread that takes
  absl::Mutex mutex_;
  grpc::ByteBuffer waiting_ ABSL_GUARDED_BY(mutex_);  // while it is there, no read is under way
  bool has_waiting_ ABSL_GUARDED_BY(mutex_) = false;
  bool taking_ ABSL_GUARDED_BY(mutex_) = false;  // a thread takes, or an error ended the stream
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;  // no read will succeed any more
};

}  // namespace sluice
