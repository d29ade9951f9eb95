// PagePool is one memory tier: an arena that is cut into pages of each cache kind.
//
// A reservation promises pages, and pages are taken under a reservation. Firm promises are never
// more than the arena, so a sequence with a firm promise gets all of its pages once the sequences
// with soft promises are out of the way. Soft promises go beyond, up to `overcommit` arenas; taking
// under one may find no page. Either the arena is divided among the kinds in the proportion in
// which sequences take them, and each kind runs out by itself; or the kinds share it
// (TierShape::shared), and each has what the others leave. Thread-safe.
//
// Pages may be idle: they hold caches that nobody uses now and that somebody may want again
// (PrefixCache). They are promised and taken as others are, but whoever has them drops them as soon
// as a promise lacks their room. So all figures of what is free count idle pages as free.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
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
  kFirm,  // the pages are there when they are wanted
  kSoft,  // the pages may have to be waited for
};

// A promise of pages of each kind. It is move-only and ends with the object. One thread at a time.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept { *this = std::move(other); }
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation() { Reset(); }
  // Ends the promise. REQUIRES: every page that was taken was given back.
  void Reset();
  bool empty() const { return pool_ == nullptr; }
  bool firm() const { return firm_; }
  // Returns the pages of `kind` that are promised and not taken.
  int64_t left(size_t kind) const { return left_.at(kind); }

 private:
  friend class PagePool;
  PagePool* pool_ = nullptr;
  bool firm_ = true;
  std::vector<int64_t> total_, left_;  // by kind
};

class PagePool {
 public:
  // Cuts `arena` into pages. `name` ("hbm", "dram") is for messages and metrics; `overcommit` >= 1.
  // Returns INVALID_ARGUMENT if not even one page of each kind and layer fits. REQUIRES: the
  // proportion has something of each kind; an arena that kinds share is not overcommitted.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(std::string name, const TierShape& shape,
                                                          Buffer arena, double overcommit = 1.0);
  // Makes a pool for sequences that take the same tokens of every kind.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(std::string name,
                                                          const CacheLayout& layout, Buffer arena,
                                                          double overcommit = 1.0) {
    return Create(std::move(name), TierShape{layout}, std::move(arena), overcommit);
  }
  ~PagePool();

  using PagesByKind = std::array<int64_t, TokensByKind::kMaxKinds>;

  // Returns whether a sequence of `tokens` fits into the empty pool.
  bool CouldEverFit(const TokensByKind& tokens) const;
  // Promises pages for `tokens`. Returns an empty reservation if there is no room now.
  Reservation TryReserve(const TokensByKind& tokens, Promise promise = Promise::kFirm);
  // Grows a firm promise to pages for `tokens`, if it has fewer. Returns false, and changes
  // nothing, if there is no room now.
  bool Extend(Reservation& reservation, const TokensByKind& tokens);
  // Shrinks a promise to pages for `tokens`, if it has more. REQUIRES: no more are taken under it.
  void Shrink(Reservation& reservation, const TokensByKind& tokens);
  // Turns a soft promise into a firm one. Returns false if there is no room for that now.
  bool MakeFirm(Reservation& reservation);

  // A request for `count` pages of `kind`, to be appended to `pages`.
  struct Extent {
    size_t kind = 0;
    int64_t count = 0;
    std::vector<int32_t>* pages = nullptr;
  };
  // Takes all extents, each in as few runs as possible: first the pages that follow those already
  // in `pages`, so that a layer's pages stay together. Returns false, and changes nothing, if too
  // few are free, which happens only in an overcommitted pool. Allocates nothing unless `pages` has
  // to grow. REQUIRES: reservation.left() covers them.
  bool TryTake(Reservation& reservation, absl::Span<const Extent> extents);
  // Gives pages back. They stay promised to the reservation.
  void Give(Reservation& reservation, size_t kind, absl::Span<const int32_t> pages);

  // Says whose arena this is, where ranks have sequences of their own and rank 0 has a pool of each
  // rank's arena. Set it before the pool is used.
  void SetRank(int rank) { rank_ = rank; }
  int rank() const { return rank_; }

  // ---- For a rank other than 0, whose pages have rank 0's numbers ----

  // Leaves the choice of pages to rank 0's pool of the same shape, which also decides what fits:
  // from now on any promise is made, any page may be taken, by several owners too, and what is
  // taken next is what ChoosePages has said. REQUIRES: nothing is promised.
  void FollowRankZero();
  bool follows() const { return follows_; }
  // Says which pages the next sequence that takes some has, [layer][kind] in the order of blocks,
  // from its first block on.
  void ChoosePages(std::vector<std::vector<int32_t>> pages);
  // Promises so many pages of each kind. REQUIRES: follows().
  Reservation PromisePages(const PagesByKind& pages);

  // ---- For the owner of idle pages ----

  // Drops idle pages, so many of each kind or more, and returns whether it dropped any.
  using Reclaimer = std::function<bool(const PagesByKind& pages)>;
  // Sets the function that is called, without the pool's lock, when a promise lacks room that idle
  // pages have. Null: there are no idle pages.
  void SetReclaimer(Reclaimer reclaimer);
  // Makes taken pages idle, or ends that. REQUIRES: their promise is firm.
  void SetIdle(size_t kind, absl::Span<const int32_t> pages, bool idle);
  // Moves pages that were taken under one promise to another, with their share of it. REQUIRES:
  // both are firm, and `from` has taken as many.
  void MoveTaken(Reservation& from, Reservation& to, size_t kind, int64_t count);
  // Gives pages back and the promise with them.
  void GiveUp(Reservation& reservation, size_t kind, absl::Span<const int32_t> pages);

  const std::string& name() const { return name_; }
  const CacheLayout& layout() const { return layout_; }
  // Returns the first byte of a kind's pages. Page p lies at base(kind) + p * page_bytes.
  uint8_t* base(size_t kind) const { return base_[kind]; }
  // Returns the bytes of a kind's pages; where kinds share the arena, those of any of them.
  uint64_t kind_bytes(size_t kind) const { return kind_bytes_[kind]; }
  uint8_t* PageAddress(size_t kind, int32_t page) const {
    return base_[kind] + page * layout_.kinds[kind].page_bytes();
  }
  // Returns the tokens of each kind that the whole pool holds, of one sequence or of many. For
  // kinds that it does not have, any number fits. Where kinds share the arena, each figure assumes
  // that nothing of the others is held.
  TokensByKind Capacity() const;
  int64_t capacity_tokens() const { return Capacity().least(); }
  // Returns how many sequences of `tokens` the empty pool holds at once, one of them with `more` on
  // top; any number if they take nothing.
  int64_t SequencesThatFit(const TokensByKind& tokens, const TokensByKind& more = 0) const;
  bool overcommitted() const { return overcommit_ > 1; }
  bool shared() const { return shared_; }

  // The tokens of one more sequence for which there is room now; any number of kinds that the pool
  // does not have. Where kinds share the arena, each figure assumes no more of the others, so there
  // may be room for each of them and not for all together.
  struct Headroom {
    TokensByKind firm_tokens;  // with a firm promise
    TokensByKind soft_tokens;  // with a soft one
    TokensByKind free_tokens;  // in pages that no sequence has
  };
  Headroom HeadroomNow() const;

  struct Usage {
    int64_t capacity_bytes = 0;  // where kinds share the arena: less what the others are promised
    int64_t reserved_bytes = 0;  // including taken pages; at most overcommit x the capacity
    int64_t used_bytes = 0;      // taken pages; at most the capacity
    int64_t idle_bytes = 0;      // idle pages, which the two above do not count
  };
  Usage UsageOf(size_t kind) const;
  // Returns the sum over pools, which have the same kinds.
  static Usage UsageOf(absl::Span<const PagePool* const> pools, size_t kind);
  // Returns the pages that no sequence owns, for tests and checkers that watch them. Where kinds
  // share the arena, a free stretch is listed for each of them.
  std::vector<PageRun> FreeRuns(size_t kind) const;
  // Returns the memory of these pages, of all kinds. Where kinds share the arena, a free stretch is
  // there once for each of them.
  std::vector<absl::Span<uint8_t>> FreeMemory() const;

 private:
  friend class Reservation;
  struct KindState {
    int64_t pages = 0;
    int64_t limit = 0;     // on promised pages: pages x overcommit
    int64_t promised = 0;  // firm or soft, taken or not
    int64_t firm = 0;      // the firm ones among them: at most `pages`
    int64_t taken = 0;
    int64_t idle = 0;         // taken, firm pages that a promise may have
    PageRuns free;            // where the arena is shared: in the slabs that this kind has
    std::vector<bool> owned;  // by page: no page has two owners
  };
  PagePool(std::string name, const TierShape& shape, const std::vector<int64_t>& pages,
           Buffer arena, double overcommit);
  PagesByKind PagesFor(const TokensByKind& tokens) const;
  // Returns whether an empty pool holds that many pages.
  bool Holds(const PagesByKind& pages) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether that many more pages may be promised now, or once no page is idle.
  bool MayPromise(const PagesByKind& more, bool firm, bool without_idle = false) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether a promise of `more` pages is to be tried again, because idle pages were dropped
  // for it. Unlocks the pool meanwhile. REQUIRES: MayPromise(more, firm) is false.
  bool Reclaim(const PagesByKind& more, bool firm) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the pages that a kind has or may come to have, given what the others are promised.
  int64_t PagesLeftFor(size_t kind) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the tokens of one sequence that `pages` pages of a kind hold.
  int64_t TokensIn(size_t kind, int64_t pages) const {
    return pages / layout_.layers * layout_.kinds[kind].block_tokens;
  }
  // Makes a promise that MayPromise allows.
  Reservation MakePromise(const PagesByKind& pages, bool firm)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeRuns(const Extent& extent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeChosen(absl::Span<const Extent> extents) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveRun(size_t kind, PageRun run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string name_;
  const CacheLayout layout_;
  const Buffer arena_;
  const double overcommit_;
  const bool shared_;
  std::vector<uint8_t*> base_;
  std::vector<uint64_t> kind_bytes_;
  int rank_ = 0;
  bool follows_ = false;
  mutable absl::Mutex mutex_;
  std::optional<PageSlabs> slabs_ ABSL_GUARDED_BY(mutex_);  // only if kinds share the arena
  std::vector<KindState> kinds_ ABSL_GUARDED_BY(mutex_);
  Reclaimer reclaimer_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::vector<int32_t>> chosen_ ABSL_GUARDED_BY(mutex_);  // [layer][kind]
};

}  // namespace sluice
