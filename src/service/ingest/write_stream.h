// One stream of KvIngest.Write: its chunks go one after the other into a WriteTarget, which is the
// node's transfers (transfer_writes.h) or rank 0's (claimed_writes.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/service/ingest/write_parser.h"

namespace grpc {
class ByteBuffer;
class CallbackServerContext;
class ServerContextBase;
template <class Request>
class ServerReadReactor;
}  // namespace grpc

namespace sluice {

// The errors are those of KvIngest.Write. One thread at a time.
class WriteTarget : public ChunkSink {
 public:
  // All bytes of the chunk have come. Returns the number of blocks that are new.
  virtual absl::StatusOr<uint64_t> Finish() = 0;
  // Returns what the last chunk's transfer misses.
  virtual uint64_t BlocksMissing() = 0;
  // The stream has ended: a chunk that has begun does not come. Nothing follows.
  virtual void Ended(const absl::Status& status) = 0;
};

// Returns the reactor of a call, which deletes itself.
grpc::ServerReadReactor<grpc::ByteBuffer>* NewWriteStream(grpc::CallbackServerContext* context,
                                                          grpc::ByteBuffer* response,
                                                          std::unique_ptr<WriteTarget> target);

// Notes for the access log which transfer a call is about, and the payload bytes that it landed.
void NoteTransfer(const grpc::ServerContextBase& context, const std::string& id,
                  uint64_t bytes = 0);

}  // namespace sluice
