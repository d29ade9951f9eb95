// One tier: an arena cut into pages of each cache kind.
//
// A reservation promises pages; pages are taken under a reservation. What is promised firmly is
// never more than the arena, so a sequence with a firm promise gets every page of it once those
// with a soft promise are out of the way. Soft promises go beyond, up to `overcommit` arenas; there
// taking may find no page. The arena is divided among the kinds in the proportion in which
// sequences take them, and a kind runs out by itself; or the kinds share it (TierShape::shared),
// and each has what the others leave. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "src/device/device.h"
#include "src/kv/cache_layout.h"
#include "src/kv/page_runs.h"
#include "src/kv/page_slabs.h"

namespace sluice {

class PagePool;

enum class Promise {
  kFirm,  // the pages are there
  kSoft,  // they may have to be waited for
};

// A promise of pages of each kind; move-only, ends with the object. One thread at a time.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept { *this = std::move(other); }
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation() { Reset(); }
  // REQUIRES: every page that was taken was given back.
  void Reset();
  bool empty() const { return pool_ == nullptr; }
  bool firm() const { return firm_; }
  // Pages of `kind` that are promised and not taken.
  int64_t left(size_t kind) const { return left_.at(kind); }

 private:
  friend class PagePool;
  PagePool* pool_ = nullptr;
  bool firm_ = true;
  std::vector<int64_t> total_, left_;  // by kind
};

class PagePool {
 public:
  // `arena` holds the pages; `name` ("hbm", "dram") is for messages and metrics; `overcommit` >= 1.
  // INVALID_ARGUMENT if not even one page of each kind and layer fits. REQUIRES: the proportion has
  // something of each kind; an arena that kinds share is not overcommitted.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(std::string name, const TierShape& shape,
                                                          Buffer arena, double overcommit = 1.0);
  // Sequences take the same tokens of every kind.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(std::string name,
                                                          const CacheLayout& layout, Buffer arena,
                                                          double overcommit = 1.0) {
    return Create(std::move(name), TierShape{layout}, std::move(arena), overcommit);
  }
  ~PagePool();

  // Whether a sequence of `tokens` fits into the empty pool.
  bool CouldEverFit(const TokensByKind& tokens) const;
  // Promises pages for `tokens`; an empty reservation if there is no room now.
  Reservation TryReserve(const TokensByKind& tokens, Promise promise = Promise::kFirm);
  // Makes a firm promise one of pages for `tokens` at least; false if there is no room now, and
  // nothing has changed.
  bool Extend(Reservation& reservation, const TokensByKind& tokens);
  // Makes a promise one of pages for `tokens` at most. REQUIRES: no more are taken under it.
  void Shrink(Reservation& reservation, const TokensByKind& tokens);
  // Turns a soft promise into a firm one; false if there is no room for it now.
  bool MakeFirm(Reservation& reservation);

  // `count` pages of `kind`, to be appended to `pages`.
  struct Extent {
    size_t kind = 0;
    int64_t count = 0;
    std::vector<int32_t>* pages = nullptr;
  };
  // Takes all of them, each in as few runs as can be: first the pages that follow those already in
  // `pages`, so that a layer's pages stay together. False, and nothing has changed, where too few
  // are free, which happens in an overcommitted pool alone. Allocates nothing but what `pages`
  // lack. REQUIRES: reservation.left() covers them.
  bool TryTake(Reservation& reservation, absl::Span<const Extent> extents);
  // Gives pages back; they are promised to the reservation as before.
  void Give(Reservation& reservation, size_t kind, absl::Span<const int32_t> pages);

  const std::string& name() const { return name_; }
  const CacheLayout& layout() const { return layout_; }
  // First byte of kind's pages; page p lies at base(kind) + p * page_bytes.
  uint8_t* base(size_t kind) const { return base_[kind]; }
  uint8_t* PageAddress(size_t kind, int32_t page) const {
    return base_[kind] + page * layout_.kinds[kind].page_bytes();
  }
  // Tokens of each kind that the whole pool holds of a single sequence (of kinds that it does not
  // have, any number), and of all of them. Where kinds share the arena: with nothing of the others.
  TokensByKind Capacity() const;
  int64_t capacity_tokens() const { return Capacity().least(); }
  // Sequences of `tokens` that the empty pool holds at once, one of them with `more` on top; any
  // number where they take nothing.
  int64_t SequencesThatFit(const TokensByKind& tokens, const TokensByKind& more = 0) const;
  bool overcommitted() const { return overcommit_ > 1; }
  bool shared() const { return shared_; }

  // Tokens of one more sequence for which there is room now; of kinds that the pool does not have,
  // any number. Where kinds share the arena: with no more of the others, so that it may have room
  // for each of them and not for all.
  struct Headroom {
    TokensByKind firm_tokens;  // with a firm promise
    TokensByKind soft_tokens;  // with a soft one
    TokensByKind free_tokens;  // in pages that nobody has
  };
  Headroom HeadroomNow() const;

  struct Usage {
    int64_t capacity_bytes = 0;  // where kinds share the arena: less what the others were promised
    int64_t reserved_bytes = 0;  // taken pages included; at most overcommit x the capacity
    int64_t used_bytes = 0;      // taken pages; at most the capacity
  };
  Usage UsageOf(size_t kind) const;
  // Pages that nobody owns, for whoever watches over them. Where kinds share the arena a stretch
  // that is free is free for each of them.
  std::vector<PageRun> FreeRuns(size_t kind) const;
  // Their memory, of all kinds; where they share the arena a stretch is there for each of them.
  std::vector<absl::Span<uint8_t>> FreeMemory() const;

 private:
  friend class Reservation;
  struct KindState {
    int64_t pages = 0;
    int64_t limit = 0;     // of promises: pages x overcommit
    int64_t promised = 0;  // firm or soft, taken or not
    int64_t firm = 0;      // of them firm: at most pages
    int64_t taken = 0;
    PageRuns free;            // of the slabs that it has, where the arena is shared
    std::vector<bool> owned;  // per page: no page has two owners
  };
  using PagesByKind = std::array<int64_t, TokensByKind::kMaxKinds>;
  PagePool(std::string name, const TierShape& shape, const std::vector<int64_t>& pages,
           Buffer arena, double overcommit);
  PagesByKind PagesFor(const TokensByKind& tokens) const;
  // Whether an empty pool holds so many.
  bool Holds(const PagesByKind& pages) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether so many more may be promised now.
  bool MayPromise(const PagesByKind& more, bool firm) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Pages of a kind that it has or may come to have, with what the others are promised.
  int64_t PagesLeftFor(size_t kind) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tokens of one sequence that `pages` of a kind hold.
  int64_t TokensIn(size_t kind, int64_t pages) const {
    return pages / layout_.layers * layout_.kinds[kind].block_tokens;
  }
  void TakeRuns(const Extent& extent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveRun(size_t kind, PageRun run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string name_;
  const CacheLayout layout_;
  const Buffer arena_;
  const double overcommit_;
  const bool shared_;
  std::vector<uint8_t*> base_;
  mutable absl::Mutex mutex_;
  std::optional<PageSlabs> slabs_ ABSL_GUARDED_BY(mutex_);  // where kinds share the arena
  std::vector<KindState> kinds_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
