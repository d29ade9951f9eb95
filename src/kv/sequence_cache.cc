#include "src/kv/sequence_cache.h"

#include <algorithm>

#include "src/base/status_macros.h"

namespace sluice {

SequenceCache::SequenceCache(PagePool* pool, Reservation reservation)
    : pool_(pool),
      reservation_(std::move(reservation)),
      kinds_(pool->layout().kinds.size()),
      pages_(static_cast<size_t>(pool->layout().layers) * kinds_) {
  SLUICE_CHECK(!reservation_.empty());
}

SequenceCache::~SequenceCache() {
  std::vector<PageRun> runs;
  for (size_t i = 0; i < pages_.size(); ++i) {
    runs.clear();
    for (const int32_t page : pages_[i]) {
      if (!runs.empty() && runs.back().first + runs.back().count == page) {
        ++runs.back().count;
      } else {
        runs.push_back({page, 1});
      }
    }
    if (!runs.empty()) pool_->Give(i % kinds_, runs);
  }
}

bool SequenceCache::EnsureTokens(int64_t tokens) {
  if (tokens <= tokens_) return false;
  const CacheLayout& layout = pool_->layout();
  int64_t room = INT64_MAX;
  for (size_t kind = 0; kind < kinds_; ++kind) {
    const int64_t have = static_cast<int64_t>(pages_[kind].size());
    const int64_t need = layout.kinds[kind].BlocksFor(tokens) - have;
    const int64_t most = reservation_.left(kind) / layout.layers;
    SLUICE_CHECK(need <= most, "a sequence grows inside its reservation");
    // The first extent is what is asked for (the handed-over context); later ones are large, so
    // that a layer's pages stay together.
    const int64_t take =
        have == 0 ? need : std::clamp(kGrowthBlocks, std::max<int64_t>(need, 0), most);
    if (take > 0) {
      for (int layer = 0; layer < layout.layers; ++layer) {
        std::vector<int32_t>& pages = pages_[static_cast<size_t>(layer) * kinds_ + kind];
        const int32_t last = pages.empty() ? -2 : pages.back();
        for (const PageRun& run : pool_->Take(reservation_, kind, take, last)) {
          for (int32_t i = 0; i < run.count; ++i) pages.push_back(run.first + i);
        }
      }
    }
    room =
        std::min(room, static_cast<int64_t>(pages_[kind].size()) * layout.kinds[kind].block_tokens);
  }
  tokens_ = room;
  return true;
}

uint8_t* SequenceCache::BlockAddress(int layer, size_t kind, int head, int64_t block) const {
  return pool_->PageAddress(kind, Pages(layer, kind)[static_cast<size_t>(block)]) +
         head * pool_->layout().kinds[kind].block_bytes();
}

void SequenceCache::ForEachPiece(const HomeRange& range,
                                 absl::FunctionRef<void(const HomePiece&)> visit) const {
  const CacheKind& kind = pool_->layout().kinds[range.kind];
  SLUICE_CHECK(range.token_begin % kind.block_tokens == 0 && range.token_end <= tokens_);
  const int64_t part_bytes_per_token = kind.bytes_per_token / kind.parts;
  for (int64_t block = range.token_begin / kind.block_tokens;
       block < kind.BlocksFor(range.token_end); ++block) {
    const int64_t tokens =
        std::min<int64_t>(kind.block_tokens, range.token_end - block * kind.block_tokens);
    for (int head = range.head_begin; head < range.head_end; ++head) {
      uint8_t* home = BlockAddress(range.layer, range.kind, head, block);
      if (tokens == kind.block_tokens) {  // its parts follow one another
        visit({block, head, home, static_cast<uint64_t>(kind.block_bytes())});
        continue;
      }
      for (int part = 0; part < kind.parts; ++part) {
        visit({block, head, home + part * kind.block_tokens * part_bytes_per_token,
               static_cast<uint64_t>(tokens * part_bytes_per_token)});
      }
    }
  }
}

}  // namespace sluice
