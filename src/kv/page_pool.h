// One tier: an arena cut into pages of each cache kind, handed out in runs.
//
// A reservation promises pages; pages are taken under a reservation, so taking never fails. The
// arena is divided among the kinds in proportion to the bytes that a token needs of each, since
// every sequence takes them in that proportion. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "src/device/device.h"
#include "src/kv/cache_layout.h"

namespace sluice {

// Pages [first, first + count) of one kind.
struct PageRun {
  int32_t first = 0;
  int32_t count = 0;
};

class PagePool;

// A promise of pages of every kind; move-only, gives the rest back when it ends.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept { *this = std::move(other); }
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation() { Reset(); }
  void Reset();
  bool empty() const { return pool_ == nullptr; }
  // Pages of `kind` that are promised and not yet taken.
  int64_t left(size_t kind) const { return left_.at(kind); }

 private:
  friend class PagePool;
  PagePool* pool_ = nullptr;
  std::vector<int64_t> left_;
};

class PagePool {
 public:
  // `arena` holds the pages; `name` ("hbm", "dram") is for messages and metrics.
  // INVALID_ARGUMENT if not even one page of each kind and layer fits.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(std::string name,
                                                          const CacheLayout& layout, Buffer arena);
  ~PagePool();

  // Whether a sequence of `tokens` tokens fits into the empty pool.
  bool CouldEverFit(int64_t tokens) const;
  // Promises pages for `tokens` tokens; an empty reservation if there is no room now.
  Reservation TryReserve(int64_t tokens);

  // Takes `count` pages of `kind`, in as few runs as can be: first those that follow page `after`
  // (-2: none), so that a layer's pages stay together. They go back by Give.
  // REQUIRES: reservation.left(kind) >= count.
  std::vector<PageRun> Take(Reservation& reservation, size_t kind, int64_t count, int32_t after);
  // Gives pages back; their promise ends with them.
  void Give(size_t kind, const std::vector<PageRun>& runs);

  const std::string& name() const { return name_; }
  const CacheLayout& layout() const { return layout_; }
  // First byte of kind's pages; page p lies at base(kind) + p * page_bytes.
  uint8_t* base(size_t kind) const { return base_[kind]; }
  uint8_t* PageAddress(size_t kind, int32_t page) const {
    return base_[kind] + page * layout_.kinds[kind].page_bytes();
  }
  // Tokens of a single sequence that the whole pool holds.
  int64_t capacity_tokens() const;

  struct Usage {
    int64_t capacity_bytes = 0;
    int64_t reserved_bytes = 0;  // taken pages included
    int64_t used_bytes = 0;      // taken pages
  };
  Usage UsageOf(size_t kind) const;
  // Pages that nobody owns, for whoever watches over them.
  std::vector<PageRun> FreeRuns(size_t kind) const;

 private:
  friend class Reservation;
  struct KindState {
    int64_t pages = 0;
    int64_t promised = 0;  // taken or promised
    int64_t taken = 0;
    std::set<std::pair<int32_t, int32_t>> free_runs;  // (first, count), disjoint, never adjacent
    std::vector<bool> owned;                          // per page: no page has two owners
  };
  PagePool(std::string name, const CacheLayout& layout, Buffer arena);

  const std::string name_;
  const CacheLayout layout_;
  const Buffer arena_;
  std::vector<uint8_t*> base_;
  mutable absl::Mutex mutex_;
  std::vector<KindState> kinds_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
