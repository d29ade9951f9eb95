// The pages that one sequence owns in one pool: for each layer and kind, page numbers in order of
// blocks. Not thread-safe: it has one owner at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "src/kv/page_pool.h"

namespace sluice {

// Part of one layer and kind of a cache.
struct HomeRange {
  int layer = 0;
  size_t kind = 0;
  int head_begin = 0, head_end = 0;
  int64_t token_begin = 0, token_end = 0;
};

// A stretch of memory inside one block of one head.
struct HomePiece {
  int64_t block = 0;
  int head = 0;
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
};

class SequenceCache {
 public:
  // Owns nothing yet; `reservation` came from `pool`.
  SequenceCache(PagePool* pool, Reservation reservation);
  SequenceCache(const SequenceCache&) = delete;
  SequenceCache& operator=(const SequenceCache&) = delete;
  ~SequenceCache();  // gives every page back: nothing may read or write them any more

  // Makes room for positions [0, tokens). Extents grow by kGrowthBlocks at least, where the
  // reservation allows. Returns whether any page was added.
  bool EnsureTokens(int64_t tokens);
  static constexpr int64_t kGrowthBlocks = 16;

  PagePool* pool() const { return pool_; }
  int64_t tokens() const { return tokens_; }  // for which there is room
  // [blocks] page numbers of one layer and kind.
  const std::vector<int32_t>& Pages(int layer, size_t kind) const {
    return pages_[static_cast<size_t>(layer) * kinds_ + kind];
  }
  uint8_t* BlockAddress(int layer, size_t kind, int head, int64_t block) const;
  // Where the bytes of a chunk's payload lie, in its order (design: "a chunk on the wire"): for
  // each block, for each head, the parts of the block. Short where the tokens end inside a block.
  // REQUIRES: range.token_begin is a block's first token, and there is room for the range.
  void ForEachPiece(const HomeRange& range, absl::FunctionRef<void(const HomePiece&)> visit) const;

 private:
  PagePool* pool_;
  Reservation reservation_;
  size_t kinds_;
  int64_t tokens_ = 0;
  std::vector<std::vector<int32_t>> pages_;
};

}  // namespace sluice
