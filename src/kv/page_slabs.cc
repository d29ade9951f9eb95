#include "src/kv/page_slabs.h"

#include <algorithm>
#include <numeric>

#include "src/base/status_macros.h"

namespace sluice {

int64_t PageSlabs::SlabBytes(const CacheLayout& layout) {
  int64_t bytes = 1;
  for (const CacheKind& kind : layout.kinds) bytes = std::lcm(bytes, kind.page_bytes());
  return bytes;
}

PageSlabs::PageSlabs(const CacheLayout& layout, int64_t arena_bytes)
    : used_(static_cast<size_t>(arena_bytes / SlabBytes(layout))), idle_(used_.size()) {
  for (size_t kind = 0; kind < layout.kinds.size(); ++kind) {
    pages_[kind] = SlabBytes(layout) / layout.kinds[kind].page_bytes();
  }
  if (!used_.empty()) free_.Add({0, static_cast<int32_t>(used_.size())});
}

void PageSlabs::Claim(size_t kind, int64_t lacking, PageRuns* free) {
  for (int64_t left = SlabsFor(kind, lacking); left > 0;) {
    const PageRun slabs = free_.Take(left, -1);
    free->Add(PagesOf(kind, slabs));
    held_[kind] += slabs.count;
    left -= slabs.count;
  }
}

void PageSlabs::Take(size_t kind, PageRun pages) {
  for (int32_t page = pages.first; page < pages.first + pages.count; ++page) {
    const auto slab = static_cast<size_t>(page / pages_[kind]);
    if (used_[slab]++ == idle_[slab]) ++busy_[kind];
  }
}

void PageSlabs::SetIdle(size_t kind, PageRun pages, bool idle) {
  for (int32_t page = pages.first; page < pages.first + pages.count; ++page) {
    const auto slab = static_cast<size_t>(page / pages_[kind]);
    if (idle) {
      if (++idle_[slab] == used_[slab]) --busy_[kind];
    } else if (idle_[slab]-- == used_[slab]) {
      ++busy_[kind];
    }
  }
}

void PageSlabs::Give(size_t kind, PageRun pages, PageRuns* free) {
  for (int32_t page = pages.first; page < pages.first + pages.count; ++page) {
    const auto slab = static_cast<int32_t>(page / pages_[kind]);
    const int32_t used = --used_[static_cast<size_t>(slab)];
    if (used == idle_[static_cast<size_t>(slab)]) --busy_[kind];
    if (used > 0) continue;
    free->Cut(PagesOf(kind, {slab, 1}));
    free_.Add({slab, 1});
    --held_[kind];
  }
}

std::vector<PageRun> PageSlabs::Unclaimed(size_t kind) const {
  std::vector<PageRun> runs;
  for (const auto& [first, count] : free_.runs()) runs.push_back(PagesOf(kind, {first, count}));
  return runs;
}

}  // namespace sluice
