// Cuts a layer's caches into chunks for the wire (design: "a chunk on the wire"). Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/kv/cache_layout.h"
#include "src/kv/transfer_table.h"

namespace sluice {

// One chunk's place and where its payload lies in the layer's: [offset, offset + bytes).
struct ChunkPlan {
  uint32_t head_begin = 0, head_end = 0;
  uint32_t token_begin = 0, token_end = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// Chunks of at most `max_chunk_bytes` that cover tokens [token_begin, token_end) of every head, in
// order of the payload: whole pages while one fits, else the heads of one block apart.
// FAILED_PRECONDITION if not even one head's block fits. REQUIRES: token_begin is a block's first.
absl::StatusOr<std::vector<ChunkPlan>> PlanChunks(const CacheKind& kind, int token_begin,
                                                  int token_end, uint64_t max_chunk_bytes);

// Whether the chunk, of that layer and kind, holds anything of one of the ranges.
bool Overlaps(uint32_t layer, const std::string& kind, const ChunkPlan& chunk,
              const std::vector<MissingRange>& ranges);

// Bytes [offset, offset + bytes) of the concatenated `pieces`.
std::string CopyRange(absl::Span<const absl::Span<const uint8_t>> pieces, uint64_t offset,
                      uint64_t bytes);

}  // namespace sluice
