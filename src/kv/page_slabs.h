// Which kind of cache has which part of an arena that kinds share. The arena is cut into slabs,
// each of whole pages of every kind, so that page p of a kind lies at p times its size whoever had
// the slab before; a slab goes to the kind that takes a page of it, and goes back with the last
// one.
//
// A kind takes another slab only where those that it has are full. So it never has more slabs than
// its promised pages fill, or than it had when the others were promised theirs: where for each kind
// the larger of both is counted and the sum fits, every promise is kept, however pages come and go.
// Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "src/kv/cache_layout.h"
#include "src/kv/page_runs.h"

namespace sluice {

class PageSlabs {
 public:
  // Bytes of a slab: the least common multiple of the kinds' pages. Latent and index pages of
  // DeepSeek-V3.2, 32 tokens: 692,736, that is 33 and 164 pages.
  static int64_t SlabBytes(const CacheLayout& layout);
  PageSlabs(const CacheLayout& layout, int64_t arena_bytes);

  int64_t count() const { return static_cast<int64_t>(used_.size()); }
  int64_t PagesIn(size_t kind, int64_t slabs) const { return slabs * pages_[kind]; }
  int64_t SlabsFor(size_t kind, int64_t pages) const {
    return (pages + pages_[kind] - 1) / pages_[kind];
  }
  int64_t held(size_t kind) const { return held_[kind]; }
  // Slabs that a kind may come to have, with so many pages promised.
  int64_t Needed(size_t kind, int64_t promised) const {
    return std::max(held_[kind], SlabsFor(kind, promised));
  }

  // Gives a kind slabs with room for `lacking` pages: adds those pages to `free`. REQUIRES: so many
  // are left.
  void Claim(size_t kind, int64_t lacking, PageRuns* free);
  void Take(size_t kind, PageRun pages);
  // Slabs that are empty now go back, and their pages leave `free`, where they are already.
  void Give(size_t kind, PageRun pages, PageRuns* free);
  // Pages of a kind in slabs that nobody has.
  std::vector<PageRun> Unclaimed(size_t kind) const;

 private:
  PageRun PagesOf(size_t kind, PageRun slabs) const {
    const auto per_slab = static_cast<int32_t>(pages_[kind]);
    return {slabs.first * per_slab, slabs.count * per_slab};
  }

  std::array<int64_t, TokensByKind::kMaxKinds> pages_{};  // of a slab
  std::array<int64_t, TokensByKind::kMaxKinds> held_{};   // slabs
  std::vector<int32_t> used_;                             // by slab: pages that are taken
  PageRuns free_;                                         // slabs that nobody has
};

}  // namespace sluice
