// PageSlabs records which kind of cache has which part of an arena that kinds share. The arena is
// cut into slabs, each of whole pages of every kind, so that page p of a kind lies at p times its
// size whoever had the slab before. A slab goes to the kind that takes a page of it, and goes back
// with the last page that was taken.
//
// A kind takes another slab only when those that it has are full. So it never has more slabs than
// its promised pages fill, or than it had when the others were promised theirs. If the larger of
// both is counted for each kind and the sum fits, every promise is kept, however pages come and go.
// Pages that are idle (PagePool::SetIdle) hold their slab as others do, but the slabs that only
// they hold are known, because dropping them frees these. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "src/kv/cache_layout.h"
#include "src/kv/page_runs.h"

namespace sluice {

class PageSlabs {
 public:
  // Returns the bytes of a slab: the least common multiple of the kinds' pages. For the latent and
  // index pages of DeepSeek-V3.2 with 32 tokens it is 692,736, that is 33 and 164 pages.
  static int64_t SlabBytes(const CacheLayout& layout);
  PageSlabs(const CacheLayout& layout, int64_t arena_bytes);

  int64_t count() const { return static_cast<int64_t>(used_.size()); }
  int64_t PagesIn(size_t kind, int64_t slabs) const { return slabs * pages_[kind]; }
  int64_t SlabsFor(size_t kind, int64_t pages) const {
    return (pages + pages_[kind] - 1) / pages_[kind];
  }
  int64_t held(size_t kind) const { return held_[kind]; }
  // Returns the slabs of a kind that have a page which is taken and not idle.
  int64_t busy(size_t kind) const { return busy_[kind]; }
  // Returns the slabs that a kind may come to have when `promised` pages of it are promised.
  int64_t Needed(size_t kind, int64_t promised) const {
    return std::max(held_[kind], SlabsFor(kind, promised));
  }
  // Returns what Needed would return if no idle page were there.
  int64_t NeededWithoutIdle(size_t kind, int64_t promised) const {
    return std::max(busy_[kind], SlabsFor(kind, promised));
  }

  // Gives a kind slabs with room for `lacking` pages and adds their pages to `free`. REQUIRES: that
  // many slabs are left.
  void Claim(size_t kind, int64_t lacking, PageRuns* free);
  // Notes that these pages of a kind are taken. REQUIRES: the kind has their slabs.
  void Take(size_t kind, PageRun pages);
  // Notes that these pages, which are in `free` already, were given back. Slabs that are empty now
  // go back, and their pages leave `free`.
  // REQUIRES: they are not idle.
  void Give(size_t kind, PageRun pages, PageRuns* free);
  // Notes that these pages, which are taken, are idle now, or that they are no more.
  void SetIdle(size_t kind, PageRun pages, bool idle);
  // Returns the pages of a kind in slabs that no kind has.
  std::vector<PageRun> Unclaimed(size_t kind) const;

 private:
  PageRun PagesOf(size_t kind, PageRun slabs) const {
    const auto per_slab = static_cast<int32_t>(pages_[kind]);
    return {slabs.first * per_slab, slabs.count * per_slab};
  }

  std::array<int64_t, TokensByKind::kMaxKinds> pages_{};  // in a slab, by kind
  std::array<int64_t, TokensByKind::kMaxKinds> held_{};   // slabs, by kind
  std::array<int64_t, TokensByKind::kMaxKinds> busy_{};   // slabs, by kind
  std::vector<int32_t> used_;                             // pages that are taken, by slab
  std::vector<int32_t> idle_;                             // those of them that are idle, by slab
  PageRuns free_;                                         // slabs that no kind has
};

}  // namespace sluice
