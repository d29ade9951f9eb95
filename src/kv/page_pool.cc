#include "src/kv/page_pool.h"

#include <algorithm>
#include <limits>

#include "src/base/bisect.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Alignment of each kind's first page. It keeps blocks on cache lines whatever the kinds.
constexpr int64_t kKindAlignment = 4096;

// Returns the pages of each kind in an arena of `bytes`, in the proportion in which sequences take
// them.
std::vector<int64_t> DividePages(const TierShape& shape, int64_t bytes) {
  const std::vector<CacheKind>& kinds = shape.layout.kinds;
  if (shape.shared) {  // each kind as if it had all of the arena
    const PageSlabs slabs(shape.layout, std::max<int64_t>(bytes - kKindAlignment, 0));
    std::vector<int64_t> pages;
    for (size_t kind = 0; kind < kinds.size(); ++kind) {
      pages.push_back(slabs.PagesIn(kind, slabs.count()));
    }
    return pages;
  }
  const auto weight = [&](size_t kind) {
    return static_cast<double>(kinds[kind].bytes_per_token * kinds[kind].heads) *
           static_cast<double>(shape.proportion[kind]);
  };
  double all = 0;
  for (size_t kind = 0; kind < kinds.size(); ++kind) all += weight(kind);
  const int64_t lost = kKindAlignment * static_cast<int64_t>(kinds.size());
  const auto usable = static_cast<double>(std::max<int64_t>(bytes - lost, 0));
  std::vector<int64_t> pages;
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    pages.push_back(static_cast<int64_t>(usable * (weight(kind) / all)) / kinds[kind].page_bytes());
  }
  return pages;
}

}  // namespace

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    Reset();
    pool_ = std::exchange(other.pool_, nullptr);
    firm_ = other.firm_;
    total_ = std::move(other.total_);
    left_ = std::move(other.left_);
  }
  return *this;
}

void Reservation::Reset() {
  if (pool_ == nullptr) return;
  SLUICE_CHECK(left_ == total_, "pages go back before their promise ends");
  absl::MutexLock lock(&pool_->mutex_);
  for (size_t kind = 0; kind < total_.size(); ++kind) {
    PagePool::KindState& state = pool_->kinds_[kind];
    state.promised -= total_[kind];
    if (firm_) state.firm -= total_[kind];
    SLUICE_CHECK(state.promised >= state.taken && state.firm >= 0);
  }
  pool_ = nullptr;
}

absl::StatusOr<std::unique_ptr<PagePool>> PagePool::Create(std::string name, const TierShape& shape,
                                                           Buffer arena, double overcommit) {
  SLUICE_CHECK(overcommit >= 1 && (overcommit == 1 || !shape.shared));
  const CacheLayout& layout = shape.layout;
  SLUICE_CHECK(!layout.kinds.empty() && layout.kinds.size() <= TokensByKind::kMaxKinds);
  for (size_t kind = 0; kind < layout.kinds.size(); ++kind) {
    SLUICE_CHECK(shape.proportion[kind] > 0, "a kind has a part of the arena");
  }
  const std::vector<int64_t> pages = DividePages(shape, static_cast<int64_t>(arena.bytes()));
  for (size_t kind = 0; kind < pages.size(); ++kind) {
    // A sequence needs a page of every layer.
    if (pages[kind] < layout.layers) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, "_bytes: ", arena.bytes(), " bytes are too few; one block of '",
          layout.kinds[kind].name, "' in each of the model's ", layout.layers, " layers takes ",
          layout.BytesFor(1) + kKindAlignment * static_cast<int64_t>(layout.kinds.size())));
    }
    if (pages[kind] > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, "_bytes: ", arena.bytes(), " bytes are more pages than 2^31"));
    }
  }
  return std::unique_ptr<PagePool>(
      new PagePool(std::move(name), shape, pages, std::move(arena), overcommit));
}

PagePool::PagePool(std::string name, const TierShape& shape, const std::vector<int64_t>& pages,
                   Buffer arena, double overcommit)
    : name_(std::move(name)),
      layout_(shape.layout),
      arena_(std::move(arena)),
      overcommit_(overcommit),
      shared_(shape.shared) {
  auto* next = arena_.as<uint8_t>();
  const auto align = [&next] {
    const auto past = reinterpret_cast<uintptr_t>(next) % kKindAlignment;
    next += past == 0 ? 0 : kKindAlignment - past;
  };
  align();
  if (shared_) slabs_.emplace(layout_, pages[0] * layout_.kinds[0].page_bytes());
  for (size_t kind = 0; kind < pages.size(); ++kind) {
    if (!shared_) align();
    base_.push_back(next);
    kind_bytes_.push_back(static_cast<uint64_t>(pages[kind] * layout_.kinds[kind].page_bytes()));
    if (!shared_) next += pages[kind] * layout_.kinds[kind].page_bytes();
    KindState state;
    state.pages = pages[kind];
    state.limit = static_cast<int64_t>(static_cast<double>(pages[kind]) * overcommit_);
    if (!shared_) state.free.Add({0, static_cast<int32_t>(pages[kind])});
    state.owned.resize(static_cast<size_t>(pages[kind]));
    kinds_.push_back(std::move(state));
  }
}

PagePool::~PagePool() {
  absl::MutexLock lock(&mutex_);
  for (const KindState& kind : kinds_) {
    SLUICE_CHECK(kind.taken == 0 && kind.promised == 0 && kind.firm == 0, name_,
                 ": pages outlive their pool");
  }
}

PagePool::PagesByKind PagePool::PagesFor(const TokensByKind& tokens) const {
  PagesByKind pages{};
  for (size_t kind = 0; kind < layout_.kinds.size(); ++kind) {
    pages[kind] = layout_.PagesFor(kind, tokens[kind]);
  }
  return pages;
}

bool PagePool::Holds(const PagesByKind& pages) const {
  int64_t slabs = 0;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    if (pages[kind] > kinds_[kind].pages) return false;
    if (slabs_.has_value()) slabs += slabs_->SlabsFor(kind, pages[kind]);
  }
  return !slabs_.has_value() || slabs <= slabs_->count();
}

bool PagePool::MayPromise(const PagesByKind& more, bool firm, bool without_idle) const {
  if (follows_) return true;
  int64_t slabs = 0;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const KindState& state = kinds_[kind];
    const int64_t idle = without_idle ? state.idle : 0;
    if (more[kind] > state.limit - state.promised + idle) return false;
    if (more[kind] > state.pages - (firm ? state.firm - idle : 0)) return false;
    if (!slabs_.has_value()) continue;
    const int64_t promised = state.promised - idle + more[kind];
    slabs +=
        without_idle ? slabs_->NeededWithoutIdle(kind, promised) : slabs_->Needed(kind, promised);
  }
  return !slabs_.has_value() || slabs <= slabs_->count();
}

bool PagePool::Reclaim(const PagesByKind& more, bool firm) {
  // Nothing is dropped for a promise that cannot be made even so.
  if (reclaimer_ == nullptr || !MayPromise(more, firm, /*without_idle=*/true)) return false;
  PagesByKind lacking{};
  int64_t sum = 0;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const KindState& state = kinds_[kind];
    const int64_t left = state.limit - state.promised;
    lacking[kind] = std::max<int64_t>(more[kind] - left, 0);
    sum += lacking[kind];
  }
  if (sum == 0) lacking = more;  // slabs are lacking, and which pages free one is not known
  const Reclaimer reclaimer = reclaimer_;
  mutex_.Unlock();
  const bool dropped = reclaimer(lacking);
  mutex_.Lock();
  return dropped;
}

void PagePool::SetReclaimer(Reclaimer reclaimer) {
  SLUICE_CHECK(!overcommitted());
  absl::MutexLock lock(&mutex_);
  reclaimer_ = std::move(reclaimer);
}

int64_t PagePool::PagesLeftFor(size_t kind) const {
  if (!slabs_.has_value()) return kinds_[kind].pages;
  int64_t slabs = slabs_->count();
  for (size_t other = 0; other < kinds_.size(); ++other) {
    if (other == kind) continue;
    slabs -= slabs_->NeededWithoutIdle(other, kinds_[other].promised - kinds_[other].idle);
  }
  return slabs_->PagesIn(kind, slabs);
}

bool PagePool::CouldEverFit(const TokensByKind& tokens) const {
  absl::MutexLock lock(&mutex_);
  return Holds(PagesFor(tokens));
}

Reservation PagePool::TryReserve(const TokensByKind& tokens, Promise promise) {
  const bool firm = promise == Promise::kFirm;
  const PagesByKind pages = PagesFor(tokens);
  absl::MutexLock lock(&mutex_);
  while (!MayPromise(pages, firm)) {
    if (!Reclaim(pages, firm)) return Reservation();
  }
  return MakePromise(pages, firm);
}

Reservation PagePool::MakePromise(const PagesByKind& pages, bool firm) {
  Reservation reservation;
  reservation.pool_ = this;
  reservation.firm_ = firm;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    reservation.total_.push_back(pages[kind]);
    kinds_[kind].promised += pages[kind];
    if (firm) kinds_[kind].firm += pages[kind];
  }
  reservation.left_ = reservation.total_;
  return reservation;
}

bool PagePool::Extend(Reservation& reservation, const TokensByKind& tokens) {
  SLUICE_CHECK(reservation.pool_ == this && reservation.firm_);
  PagesByKind more = PagesFor(tokens);
  absl::MutexLock lock(&mutex_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    more[kind] = std::max<int64_t>(more[kind] - reservation.total_[kind], 0);
  }
  while (!MayPromise(more, /*firm=*/true)) {
    if (!Reclaim(more, /*firm=*/true)) return false;
  }
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    reservation.total_[kind] += more[kind];
    reservation.left_[kind] += more[kind];
    kinds_[kind].promised += more[kind];
    kinds_[kind].firm += more[kind];
  }
  return true;
}

void PagePool::Shrink(Reservation& reservation, const TokensByKind& tokens) {
  SLUICE_CHECK(reservation.pool_ == this);
  absl::MutexLock lock(&mutex_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const int64_t less =
        std::max<int64_t>(reservation.total_[kind] - layout_.PagesFor(kind, tokens[kind]), 0);
    SLUICE_CHECK(less <= reservation.left_[kind], "pages go back before their promise ends");
    reservation.total_[kind] -= less;
    reservation.left_[kind] -= less;
    kinds_[kind].promised -= less;
    if (reservation.firm_) kinds_[kind].firm -= less;
  }
}

bool PagePool::MakeFirm(Reservation& reservation) {
  SLUICE_CHECK(reservation.pool_ == this && !reservation.firm_);
  absl::MutexLock lock(&mutex_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    if (!follows_ && reservation.total_[kind] > kinds_[kind].pages - kinds_[kind].firm) {
      return false;
    }
  }
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    kinds_[kind].firm += reservation.total_[kind];
  }
  reservation.firm_ = true;
  return true;
}

bool PagePool::TryTake(Reservation& reservation, absl::Span<const Extent> extents) {
  SLUICE_CHECK(reservation.pool_ == this);
  absl::MutexLock lock(&mutex_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    int64_t count = 0;
    for (const Extent& extent : extents) count += extent.kind == kind ? extent.count : 0;
    SLUICE_CHECK(count <= reservation.left_[kind], "pages are taken under a reservation");
    if (!follows_ && count > kinds_[kind].pages - kinds_[kind].taken) {
      SLUICE_CHECK(overcommitted(), "promised pages are there");
      return false;
    }
  }
  for (const Extent& extent : extents) {
    KindState& state = kinds_[extent.kind];
    reservation.left_[extent.kind] -= extent.count;
    state.taken += extent.count;
    SLUICE_CHECK(state.taken <= state.promised && (follows_ || state.taken <= state.pages));
  }
  if (follows_) {
    TakeChosen(extents);
    return true;
  }
  if (slabs_.has_value()) {  // claims all that this call lacks at once, so that it lies together
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      const int64_t lacking = kinds_[kind].taken - slabs_->PagesIn(kind, slabs_->held(kind));
      if (lacking > 0) slabs_->Claim(kind, lacking, &kinds_[kind].free);
    }
  }
  for (const Extent& extent : extents) TakeRuns(extent);
  return true;
}

void PagePool::TakeChosen(absl::Span<const Extent> extents) {
  std::vector<size_t> layers(kinds_.size(), 0);  // extents of a kind are in the order of layers
  for (const Extent& extent : extents) {
    const size_t list = layers[extent.kind]++ * kinds_.size() + extent.kind;
    const size_t begin = extent.pages->size();
    SLUICE_CHECK(list < chosen_.size() && begin + size_t(extent.count) <= chosen_[list].size(),
                 "rank 0 has taken the same pages");
    const auto first = chosen_[list].begin() + static_cast<std::ptrdiff_t>(begin);
    extent.pages->insert(extent.pages->end(), first, first + extent.count);
  }
}

void PagePool::FollowRankZero() {
  absl::MutexLock lock(&mutex_);
  for (const KindState& kind : kinds_) SLUICE_CHECK(kind.promised == 0);
  follows_ = true;
}

void PagePool::ChoosePages(std::vector<std::vector<int32_t>> pages) {
  absl::MutexLock lock(&mutex_);
  SLUICE_CHECK(follows_);
  for (size_t i = 0; i < pages.size(); ++i) {
    for (const int32_t page : pages[i]) {
      SLUICE_CHECK(page >= 0 && page < kinds_[i % kinds_.size()].pages, "a page of this pool");
    }
  }
  chosen_ = std::move(pages);
}

Reservation PagePool::PromisePages(const PagesByKind& pages) {
  absl::MutexLock lock(&mutex_);
  SLUICE_CHECK(follows_);
  return MakePromise(pages, /*firm=*/true);
}

void PagePool::TakeRuns(const Extent& extent) {
  KindState& state = kinds_[extent.kind];
  int32_t wanted = extent.pages->empty() ? -1 : extent.pages->back() + 1;
  for (int64_t count = extent.count; count > 0; wanted = -1) {
    const PageRun run = state.free.Take(count, wanted);
    for (int32_t page = run.first; page < run.first + run.count; ++page) {
      SLUICE_CHECK(!state.owned[static_cast<size_t>(page)], "no page has two owners");
      state.owned[static_cast<size_t>(page)] = true;
      extent.pages->push_back(page);
    }
    if (slabs_.has_value()) slabs_->Take(extent.kind, run);
    count -= run.count;
  }
}

void PagePool::Give(Reservation& reservation, size_t kind, absl::Span<const int32_t> pages) {
  SLUICE_CHECK(reservation.pool_ == this);
  absl::MutexLock lock(&mutex_);
  const auto count = static_cast<int64_t>(pages.size());
  kinds_[kind].taken -= count;
  reservation.left_[kind] += count;
  SLUICE_CHECK(reservation.left_[kind] <= reservation.total_[kind]);
  for (size_t begin = 0, end; begin < pages.size(); begin = end) {
    end = begin + 1;
    while (end < pages.size() && pages[end] == pages[end - 1] + 1) ++end;
    GiveRun(kind, {pages[begin], static_cast<int32_t>(end - begin)});
  }
}

void PagePool::SetIdle(size_t kind, absl::Span<const int32_t> pages, bool idle) {
  absl::MutexLock lock(&mutex_);
  KindState& state = kinds_[kind];
  state.idle += idle ? std::ssize(pages) : -std::ssize(pages);
  SLUICE_CHECK(state.idle >= 0 && state.idle <= state.taken && state.idle <= state.firm);
  if (!slabs_.has_value()) return;
  for (const int32_t page : pages) slabs_->SetIdle(kind, {page, 1}, idle);
}

void PagePool::MoveTaken(Reservation& from, Reservation& to, size_t kind, int64_t count) {
  SLUICE_CHECK(from.pool_ == this && to.pool_ == this && from.firm_ && to.firm_);
  SLUICE_CHECK(from.total_[kind] - from.left_[kind] >= count, "pages move with their promise");
  from.total_[kind] -= count;
  to.total_[kind] += count;
}

void PagePool::GiveUp(Reservation& reservation, size_t kind, absl::Span<const int32_t> pages) {
  Give(reservation, kind, pages);
  absl::MutexLock lock(&mutex_);
  const int64_t count = std::ssize(pages);
  reservation.total_[kind] -= count;
  reservation.left_[kind] -= count;
  kinds_[kind].promised -= count;
  kinds_[kind].firm -= count;
}

void PagePool::GiveRun(size_t kind, PageRun run) {
  if (follows_) return;  // rank 0 has them
  KindState& state = kinds_[kind];
  for (int32_t page = run.first; page < run.first + run.count; ++page) {
    SLUICE_CHECK(state.owned[static_cast<size_t>(page)], "a page is given back once");
    state.owned[static_cast<size_t>(page)] = false;
  }
  state.free.Add(run);
  if (slabs_.has_value()) slabs_->Give(kind, run, &state.free);
}

PagePool::Headroom PagePool::HeadroomNow() const {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Headroom room{kMost, kMost, kMost};
  absl::MutexLock lock(&mutex_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const KindState& state = kinds_[kind];
    const int64_t pages = PagesLeftFor(kind);
    const int64_t unpromised = state.limit - state.promised + state.idle - (state.pages - pages);
    room.firm_tokens[kind] = TokensIn(kind, std::min(unpromised, pages - state.firm + state.idle));
    room.soft_tokens[kind] = TokensIn(kind, std::min(unpromised, pages));
    room.free_tokens[kind] = TokensIn(kind, pages - state.taken + state.idle);
  }
  return room;
}

TokensByKind PagePool::Capacity() const {
  absl::MutexLock lock(&mutex_);
  TokensByKind capacity = std::numeric_limits<int64_t>::max();
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    capacity[kind] = TokensIn(kind, kinds_[kind].pages);
  }
  return capacity;
}

int64_t PagePool::SequencesThatFit(const TokensByKind& tokens, const TokensByKind& more) const {
  const PagesByKind each = PagesFor(tokens), one = PagesFor(tokens + more);
  absl::MutexLock lock(&mutex_);
  int64_t high = std::numeric_limits<int64_t>::max();
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    if (each[kind] > 0) high = std::min(high, kinds_[kind].pages / each[kind]);
  }
  if (!Holds(one)) return 0;
  if (high == std::numeric_limits<int64_t>::max()) return high;
  return LargestThat(1, high, [&](int64_t sequences) {
    mutex_.AssertHeld();
    PagesByKind all = one;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) all[kind] += (sequences - 1) * each[kind];
    return Holds(all);
  });
}

PagePool::Usage PagePool::UsageOf(size_t kind) const {
  absl::MutexLock lock(&mutex_);
  const KindState& state = kinds_[kind];
  const int64_t page_bytes = layout_.kinds[kind].page_bytes();
  return {PagesLeftFor(kind) * page_bytes, (state.promised - state.idle) * page_bytes,
          (state.taken - state.idle) * page_bytes, state.idle * page_bytes};
}

PagePool::Usage PagePool::UsageOf(absl::Span<const PagePool* const> pools, size_t kind) {
  Usage sum;
  for (const PagePool* const pool : pools) {
    const Usage usage = pool->UsageOf(kind);
    sum.capacity_bytes += usage.capacity_bytes;
    sum.reserved_bytes += usage.reserved_bytes;
    sum.used_bytes += usage.used_bytes;
    sum.idle_bytes += usage.idle_bytes;
  }
  return sum;
}

std::vector<PageRun> PagePool::FreeRuns(size_t kind) const {
  absl::MutexLock lock(&mutex_);
  std::vector<PageRun> runs;
  if (slabs_.has_value()) runs = slabs_->Unclaimed(kind);
  for (const auto& [first, count] : kinds_[kind].free.runs()) runs.push_back({first, count});
  return runs;
}

std::vector<absl::Span<uint8_t>> PagePool::FreeMemory() const {
  std::vector<absl::Span<uint8_t>> free;
  for (size_t kind = 0; kind < layout_.kinds.size(); ++kind) {
    const auto page_bytes = static_cast<size_t>(layout_.kinds[kind].page_bytes());
    for (const PageRun& run : FreeRuns(kind)) {
      free.emplace_back(PageAddress(kind, run.first), static_cast<size_t>(run.count) * page_bytes);
    }
  }
  return free;
}

}  // namespace sluice
