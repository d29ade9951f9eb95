#include "src/kv/sequence_cache.h"

#include <algorithm>

#include "src/base/status_macros.h"

namespace sluice {

SequenceCache::SequenceCache(PagePool* pool, Reservation reservation, SharedPrefix prefix)
    : pool_(pool),
      reservation_(std::move(reservation)),
      prefix_(std::move(prefix)),
      kinds_(pool->layout().kinds.size()),
      pages_(static_cast<size_t>(pool->layout().layers) * kinds_) {
  SLUICE_CHECK(!reservation_.empty());
  if (!prefix_.empty()) pages_ = std::move(prefix_.pages_);
  ReservePages();
  extents_.reserve(pages_.size());
}

SequenceCache::~SequenceCache() { GivePages(0); }

HomePages SequenceCache::Describe() const {
  HomePages home;
  home.shared_tokens = prefix_.tokens();
  for (size_t kind = 0; kind < kinds_; ++kind) home.left[kind] = reservation_.left(kind);
  home.pages = pages_;
  return home;
}

std::unique_ptr<SequenceCache> SequenceCache::OfRankZero(PagePool* pool, HomePages home) {
  const CacheLayout& layout = pool->layout();
  const size_t kinds = layout.kinds.size();
  SLUICE_CHECK(home.pages.size() == static_cast<size_t>(layout.layers) * kinds);
  std::vector<std::vector<int32_t>> shared;
  PagePool::PagesByKind promised = home.left;
  TokensByKind tokens;
  for (size_t i = 0; i < home.pages.size(); ++i) {
    const std::vector<int32_t>& pages = home.pages[i];
    const CacheKind& kind = layout.kinds[i % kinds];
    const auto blocks = home.shared_tokens / kind.block_tokens;
    SLUICE_CHECK(blocks <= std::ssize(pages));
    shared.emplace_back(pages.begin(), pages.begin() + blocks);
    promised[i % kinds] += std::ssize(pages) - blocks;
    tokens[i % kinds] = std::ssize(pages) * kind.block_tokens;
  }
  SharedPrefix prefix;
  if (home.shared_tokens > 0) {
    prefix = SharedPrefix::OfOtherRank(home.shared_tokens, std::move(shared));
  }
  pool->ChoosePages(std::move(home.pages));
  auto cache =
      std::make_unique<SequenceCache>(pool, pool->PromisePages(promised), std::move(prefix));
  cache->EnsureTokens(tokens);
  return cache;
}

void SequenceCache::ReservePages() {
  for (size_t i = 0; i < pages_.size(); ++i) {
    pages_[i].reserve(pages_[i].size() +
                      static_cast<size_t>(reservation_.left(i % kinds_) / pool_->layout().layers));
  }
}

void SequenceCache::GivePages(const TokensByKind& kept) {
  for (size_t i = 0; i < pages_.size(); ++i) {
    const size_t kind = i % kinds_;
    const auto blocks = static_cast<size_t>(
        std::max(pool_->layout().kinds[kind].BlocksFor(kept[kind]), SharedBlocks(kind)));
    if (pages_[i].size() <= blocks) continue;
    pool_->Give(reservation_, kind, absl::MakeConstSpan(pages_[i]).subspan(blocks));
    pages_[i].resize(blocks);
  }
}

Reservation SequenceCache::Dissolve(std::unique_ptr<SequenceCache> cache, SharedPrefix* prefix) {
  cache->GivePages(0);
  *prefix = std::move(cache->prefix_);
  prefix->pages_ = std::move(cache->pages_);  // only those of the prefix are left
  cache->pages_.clear();
  return std::move(cache->reservation_);
}

TokensByKind SequenceCache::Unshared(const TokensByKind& tokens) const {
  TokensByKind own;
  for (size_t kind = 0; kind < kinds_; ++kind) {
    own[kind] = std::max<int64_t>(tokens[kind] - prefix_.tokens(), 0);
  }
  return own;
}

TokensByKind SequenceCache::Lacks(const TokensByKind& tokens) const {
  const CacheLayout& layout = pool_->layout();
  TokensByKind lacks;
  for (size_t kind = 0; kind < kinds_; ++kind) {
    const int64_t promised = reservation_.left(kind) / layout.layers;
    lacks[kind] = std::max<int64_t>(
        tokens[kind] - this->tokens(kind) - promised * layout.kinds[kind].block_tokens, 0);
  }
  return lacks;
}

bool SequenceCache::Extend(const TokensByKind& tokens) {
  if (!pool_->Extend(reservation_, Unshared(tokens))) return false;
  ReservePages();
  return true;
}

void SequenceCache::ShrinkTo(const TokensByKind& tokens) {
  GivePages(tokens);
  pool_->Shrink(reservation_, Unshared(tokens));
}

int64_t SequenceCache::tokens() const {
  int64_t least = tokens(0);
  for (size_t kind = 1; kind < kinds_; ++kind) least = std::min(least, tokens(kind));
  return least;
}

SequenceCache::Growth SequenceCache::EnsureTokens(const TokensByKind& tokens) {
  const CacheLayout& layout = pool_->layout();
  extents_.clear();
  for (size_t kind = 0; kind < kinds_; ++kind) {
    const auto have = static_cast<int64_t>(pages_[kind].size());
    const int64_t need = layout.kinds[kind].BlocksFor(tokens[kind]) - have;
    if (need <= 0) continue;
    // The first extent is exactly what is asked for (the handed-over context). Later ones are
    // large, so that a layer's pages stay together, unless other sequences may be short of pages.
    const bool first = have == SharedBlocks(kind);
    const int64_t at_least = first || pool_->overcommitted() ? 0 : kGrowthBlocks;
    const int64_t most = reservation_.left(kind) / layout.layers;
    SLUICE_CHECK(need <= most, "a sequence grows inside its reservation");
    const int64_t take = std::clamp(at_least, need, most);
    for (int layer = 0; layer < layout.layers; ++layer) {
      extents_.push_back({kind, take, &pages_[static_cast<size_t>(layer) * kinds_ + kind]});
    }
  }
  if (extents_.empty()) return Growth::kNone;
  return pool_->TryTake(reservation_, extents_) ? Growth::kAdded : Growth::kNoRoom;
}

uint8_t* SequenceCache::BlockAddress(int layer, size_t kind, int head, int64_t block) const {
  return pool_->PageAddress(kind, Pages(layer, kind)[static_cast<size_t>(block)]) +
         head * pool_->layout().kinds[kind].block_bytes();
}

void SequenceCache::ForEachPiece(const HomeRange& range,
                                 absl::FunctionRef<void(const HomePiece&)> visit,
                                 const HeadPlaces* places) const {
  const CacheKind& kind = pool_->layout().kinds[range.kind];
  SLUICE_CHECK(range.token_begin % kind.block_tokens == 0 && range.token_end <= tokens(range.kind));
  for (int64_t block = range.token_begin / kind.block_tokens;
       block < kind.BlocksFor(range.token_end); ++block) {
    const int64_t tokens =
        std::min<int64_t>(kind.block_tokens, range.token_end - block * kind.block_tokens);
    for (int head = range.head_begin; head < range.head_end; ++head) {
      const int own =
          places == nullptr ? head : places->places[range.kind][static_cast<size_t>(head)].head;
      uint8_t* home = BlockAddress(range.layer, range.kind, own, block);
      if (tokens == kind.block_tokens) {  // a whole block: its parts follow one another
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
