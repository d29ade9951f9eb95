#include "tests/sim/pool_watch.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace sluice::sim {
namespace {

constexpr uint8_t kPattern = 0xA5;

}  // namespace

PoolWatch::PoolWatch(PagePool* pool, size_t kind, double overcommit)
    : pool_(pool),
      kind_(kind),
      overcommit_(overcommit),
      pattern_(static_cast<size_t>(pool->layout().kinds[kind].page_bytes()), kPattern),
      free_(static_cast<size_t>(pool->UsageOf(kind).capacity_bytes) / pattern_.size(), false) {}

std::optional<std::string> PoolWatch::Check() {
  const PagePool::Usage usage = pool_->UsageOf(kind_);
  if (usage.used_bytes > usage.capacity_bytes || usage.used_bytes > usage.reserved_bytes ||
      static_cast<double>(usage.reserved_bytes) >
          overcommit_ * static_cast<double>(usage.capacity_bytes)) {
    return absl::StrCat(pool_->name(), ": used ", usage.used_bytes, ", reserved ",
                        usage.reserved_bytes, " of ", usage.capacity_bytes);
  }
  std::vector<bool> now_free(free_.size(), false);
  size_t free_pages = 0;
  for (const PageRun& run : pool_->FreeRuns(kind_)) {
    for (int32_t page = run.first; page < run.first + run.count; ++page) {
      const auto p = static_cast<size_t>(page);
      if (now_free.at(p)) return absl::StrCat(pool_->name(), ": page ", page, " is free twice");
      now_free[p] = true;
      ++free_pages;
      uint8_t* bytes = pool_->PageAddress(kind_, page);
      if (!free_[p]) {
        std::memcpy(bytes, pattern_.data(), pattern_.size());
      } else if (std::memcmp(bytes, pattern_.data(), pattern_.size()) != 0) {
        return absl::StrCat(pool_->name(), ": page ", page, " was written while nobody owned it");
      }
    }
  }
  free_.swap(now_free);
  const auto used_pages =
      static_cast<size_t>(usage.used_bytes + usage.idle_bytes) / pattern_.size();
  // Other kinds may hold pages that this one could also have.
  if (pool_->shared() ? free_pages + used_pages > free_.size()
                      : free_pages + used_pages != free_.size()) {
    return absl::StrCat(pool_->name(), ": ", free_pages, " pages are free and ", used_pages,
                        " used, of ", free_.size());
  }
  return std::nullopt;
}

std::optional<std::string> PoolWatch::CheckEmpty() {
  if (auto wrong = Check(); wrong.has_value()) return wrong;
  const PagePool::Usage usage = pool_->UsageOf(kind_);
  if (usage.used_bytes == 0 && usage.reserved_bytes == 0) return std::nullopt;
  return absl::StrCat(pool_->name(), ": ", usage.used_bytes, " bytes are used and ",
                      usage.reserved_bytes, " reserved although nothing is alive");
}

uint8_t* PoolWatch::FreeByte() {
  const std::vector<PageRun> runs = pool_->FreeRuns(kind_);
  return runs.empty() ? nullptr : pool_->PageAddress(kind_, runs.front().first);
}

}  // namespace sluice::sim
