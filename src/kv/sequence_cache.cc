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
  for (size_t i = 0; i < pages_.size(); ++i) {
    pages_[i].reserve(static_cast<size_t>(reservation_.left(i % kinds_) / pool->layout().layers));
  }
  extents_.reserve(pages_.size());
}

SequenceCache::~SequenceCache() { GivePages(); }

void SequenceCache::GivePages() {
  for (size_t i = 0; i < pages_.size(); ++i) {
    if (!pages_[i].empty()) pool_->Give(reservation_, i % kinds_, pages_[i]);
    pages_[i].clear();
  }
}

Reservation SequenceCache::Dissolve(std::unique_ptr<SequenceCache> cache) {
  cache->GivePages();
  return std::move(cache->reservation_);
}

bool SequenceCache::Covers(int64_t tokens) const {
  for (size_t kind = 0; kind < kinds_; ++kind) {
    const int64_t taken = static_cast<int64_t>(pages_[kind].size()) * pool_->layout().layers;
    if (taken + reservation_.left(kind) < pool_->layout().PagesFor(kind, tokens)) return false;
  }
  return true;
}

int64_t SequenceCache::Lacks(int64_t tokens) const {
  int64_t lacks = 0;
  for (size_t kind = 0; kind < kinds_; ++kind) {
    const CacheLayout& layout = pool_->layout();
    const int64_t blocks =
        static_cast<int64_t>(pages_[kind].size()) + reservation_.left(kind) / layout.layers;
    lacks = std::max(lacks, tokens - blocks * layout.kinds[kind].block_tokens);
  }
  return lacks;
}

bool SequenceCache::Extend(int64_t tokens) {
  if (!pool_->Extend(reservation_, tokens)) return false;
  for (size_t i = 0; i < pages_.size(); ++i) {
    pages_[i].reserve(pages_[i].size() +
                      static_cast<size_t>(reservation_.left(i % kinds_) / pool_->layout().layers));
  }
  return true;
}

SequenceCache::Growth SequenceCache::EnsureTokens(int64_t tokens) {
  if (tokens <= tokens_) return Growth::kNone;
  // The first extent is what is asked for (the handed-over context); later ones are large, so that
  // a layer's pages stay together, unless others may be short of them.
  const int64_t at_least = tokens_ == 0 || pool_->overcommitted() ? 0 : kGrowthBlocks;
  return TakeBlocks(tokens, at_least) ? Growth::kAdded : Growth::kNoRoom;
}

bool SequenceCache::TakeBlocks(int64_t tokens, int64_t at_least) {
  const CacheLayout& layout = pool_->layout();
  extents_.clear();
  for (size_t kind = 0; kind < kinds_; ++kind) {
    const int64_t have = static_cast<int64_t>(pages_[kind].size());
    const int64_t need = std::max<int64_t>(layout.kinds[kind].BlocksFor(tokens) - have, 0);
    const int64_t most = reservation_.left(kind) / layout.layers;
    SLUICE_CHECK(need <= most, "a sequence grows inside its reservation");
    const int64_t take = std::clamp(at_least, need, most);
    for (int layer = 0; layer < layout.layers && take > 0; ++layer) {
      extents_.push_back({kind, take, &pages_[static_cast<size_t>(layer) * kinds_ + kind]});
    }
  }
  if (!pool_->TryTake(reservation_, extents_)) return false;
  tokens_ = INT64_MAX;
  for (size_t kind = 0; kind < kinds_; ++kind) {
    const auto blocks = static_cast<int64_t>(pages_[kind].size());
    tokens_ = std::min(tokens_, blocks * layout.kinds[kind].block_tokens);
  }
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
      for (const int64_t bytes : kind.part_bytes) {
        visit({block, head, home, static_cast<uint64_t>(tokens * bytes)});
        home += kind.block_tokens * bytes;
      }
    }
  }
}

}  // namespace sluice
