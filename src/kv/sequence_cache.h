// The pages that one sequence owns in one pool: for each layer and kind, page numbers in order of
// blocks. Not thread-safe: it has one owner at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "src/kv/page_pool.h"

namespace sluice {

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

 private:
  PagePool* pool_;
  Reservation reservation_;
  size_t kinds_;
  int64_t tokens_ = 0;
  std::vector<std::vector<int32_t>> pages_;
};

}  // namespace sluice
