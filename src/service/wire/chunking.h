// Cuts a layer's caches into chunks for the wire (proto/sluice/v1/ingest.proto has the format).
// Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "sluice/v1/ingest.pb.h"
#include "src/kv/cache_layout.h"
#include "src/kv/transfer_table.h"

namespace sluice {

// One chunk: its range of heads and tokens, and where its payload lies in the layer's bytes, which
// is [offset, offset + bytes).
struct ChunkPlan {
  uint32_t head_begin = 0, head_end = 0;
  uint32_t token_begin = 0, token_end = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// Returns the chunk's header, without transfer and checksum.
v1::ChunkHeader HeaderOf(int layer, const std::string& kind, const ChunkPlan& chunk);

// Heads [begin, end) of a cache kind.
struct HeadRange {
  uint32_t begin = 0, end = 0;
};

// Returns chunks of at most `max_chunk_bytes` that cover tokens [token_begin, token_end) of every
// head, in the order of the payload. A chunk has whole pages if one page fits, and otherwise some
// heads of one block. FAILED_PRECONDITION if not even the block of one head fits. REQUIRES:
// token_begin is the first token of a block.
absl::StatusOr<std::vector<ChunkPlan>> PlanChunks(const CacheKind& kind, int token_begin,
                                                  int token_end, uint64_t max_chunk_bytes);

// Returns the same for the tokens from `from` on, without those before, which the receiver has.
// Offsets still count from token_begin. The block of `from` is not cut. Returns no chunk if `from`
// is not below token_end.
absl::StatusOr<std::vector<ChunkPlan>> PlanChunksFrom(const CacheKind& kind, int token_begin,
                                                      int token_end, int64_t from,
                                                      uint64_t max_chunk_bytes);

// Returns the same for some heads alone. Their bytes are not in one piece: CopyChunk finds them,
// and not the offsets.
absl::StatusOr<std::vector<ChunkPlan>> PlanChunksOfHeads(const CacheKind& kind, int token_begin,
                                                         int token_end, int64_t from,
                                                         uint64_t max_chunk_bytes, HeadRange heads);

// Returns whether the chunk, of this layer and cache kind, has any block of one of the ranges.
bool Overlaps(uint32_t layer, const std::string& kind, const ChunkPlan& chunk,
              const std::vector<MissingRange>& ranges);

// Returns bytes [offset, offset + bytes) of the concatenated `pieces`: where they lie, or a copy.
std::vector<absl::Span<const uint8_t>> PiecesOfRange(
    absl::Span<const absl::Span<const uint8_t>> pieces, uint64_t offset, uint64_t bytes);
std::string CopyRange(absl::Span<const absl::Span<const uint8_t>> pieces, uint64_t offset,
                      uint64_t bytes);

// Returns the payload of a chunk out of `pieces`, which concatenated are a layer's bytes of all
// heads of the kind from `token_begin` on, the first token of a block.
std::string CopyChunk(const CacheKind& kind, int token_begin, const ChunkPlan& chunk,
                      absl::Span<const absl::Span<const uint8_t>> pieces);

}  // namespace sluice
