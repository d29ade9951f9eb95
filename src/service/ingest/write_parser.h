// Reads one serialised WriteRequest (proto/sluice/v1/ingest.proto) without gathering it first. The
// payload goes from the transport's slices to its target in one copy.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "src/kv/transfer_table.h"

namespace google::protobuf::io {
class ZeroCopyInputStream;
}

namespace sluice {

// The target of a chunk.
class ChunkSink {
 public:
  virtual ~ChunkSink() = default;
  // Called once, before any byte of the payload. An error ends the parse.
  virtual absl::Status Begin(const ChunkHeader& header, uint64_t payload_bytes) = 0;
  // Takes the next bytes. Together they are as many as were announced.
  virtual void Append(absl::Span<const uint8_t> bytes) = 0;
};

// Parses `message`, which has exactly `message_bytes` bytes. Unknown fields are skipped. After OK
// the sink had one Begin and its whole payload. INVALID_ARGUMENT names the field: the message is no
// WriteRequest or truncated, or a header or payload is missing, doubled or in the wrong order. An
// error of Begin is returned as it is.
absl::Status ParseWriteRequest(google::protobuf::io::ZeroCopyInputStream* message,
                               uint64_t message_bytes, ChunkSink& sink);

// A transfer id, a kind and six numbers need far less.
inline constexpr uint32_t kMaxChunkHeaderBytes = 4096;

}  // namespace sluice
