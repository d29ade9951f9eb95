// Reads one serialised WriteRequest (proto/sluice/v1/ingest.proto) without collecting it first: the
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

// Where a chunk goes.
class ChunkSink {
 public:
  virtual ~ChunkSink() = default;
  // Called once, before any byte of the payload. An error ends the parse.
  virtual absl::Status Begin(const ChunkHeader& header, uint64_t payload_bytes) = 0;
  // The next bytes; in all as many as were announced.
  virtual void Append(absl::Span<const uint8_t> bytes) = 0;
};

// `message` holds exactly `message_bytes` bytes. Unknown fields are skipped. After OK the sink had
// one Begin and its whole payload. INVALID_ARGUMENT naming the field: not a WriteRequest,
// truncated, a header or a payload that is missing, doubled or in the wrong order; and what Begin
// returns.
absl::Status ParseWriteRequest(google::protobuf::io::ZeroCopyInputStream* message,
                               uint64_t message_bytes, ChunkSink& sink);

// Transfer id, kind and six numbers need far less.
inline constexpr uint32_t kMaxChunkHeaderBytes = 4096;

}  // namespace sluice
