#include "src/kv/page_pool.h"

#include <algorithm>
#include <limits>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

// A page's first byte; keeps blocks on cache lines whatever the kinds.
constexpr int64_t kKindAlignment = 4096;

// Pages of each kind in an arena of `bytes`, in the proportion in which sequences take them.
std::vector<int64_t> DividePages(const TierShape& shape, int64_t bytes) {
  const std::vector<CacheKind>& kinds = shape.layout.kinds;
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
  SLUICE_CHECK(overcommit >= 1);
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
      new PagePool(std::move(name), layout, pages, std::move(arena), overcommit));
}

PagePool::PagePool(std::string name, const CacheLayout& layout, const std::vector<int64_t>& pages,
                   Buffer arena, double overcommit)
    : name_(std::move(name)), layout_(layout), arena_(std::move(arena)), overcommit_(overcommit) {
  auto* next = arena_.as<uint8_t>();
  for (size_t kind = 0; kind < pages.size(); ++kind) {
    const auto past = reinterpret_cast<uintptr_t>(next) % kKindAlignment;
    next += past == 0 ? 0 : kKindAlignment - past;
    base_.push_back(next);
    next += pages[kind] * layout_.kinds[kind].page_bytes();
    KindState state;
    state.pages = pages[kind];
    state.limit = static_cast<int64_t>(static_cast<double>(pages[kind]) * overcommit_);
    state.free_runs.emplace(0, static_cast<int32_t>(pages[kind]));
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

bool PagePool::CouldEverFit(const TokensByKind& tokens) const {
  absl::MutexLock lock(&mutex_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    if (layout_.PagesFor(kind, tokens[kind]) > kinds_[kind].pages) return false;
  }
  return true;
}

Reservation PagePool::TryReserve(const TokensByKind& tokens, Promise promise) {
  const bool firm = promise == Promise::kFirm;
  absl::MutexLock lock(&mutex_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const KindState& state = kinds_[kind];
    const int64_t pages = layout_.PagesFor(kind, tokens[kind]);
    if (pages > state.limit - state.promised) return Reservation();
    if (pages > state.pages - (firm ? state.firm : 0)) return Reservation();
  }
  Reservation reservation;
  reservation.pool_ = this;
  reservation.firm_ = firm;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    reservation.total_.push_back(layout_.PagesFor(kind, tokens[kind]));
    kinds_[kind].promised += reservation.total_.back();
    if (firm) kinds_[kind].firm += reservation.total_.back();
  }
  reservation.left_ = reservation.total_;
  return reservation;
}

bool PagePool::Extend(Reservation& reservation, const TokensByKind& tokens) {
  SLUICE_CHECK(reservation.pool_ == this && reservation.firm_);
  absl::MutexLock lock(&mutex_);
  const auto lacking = [&](size_t kind) {
    return std::max<int64_t>(layout_.PagesFor(kind, tokens[kind]) - reservation.total_[kind], 0);
  };
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const KindState& state = kinds_[kind];
    if (lacking(kind) > std::min(state.limit - state.promised, state.pages - state.firm)) {
      return false;
    }
  }
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const int64_t more = lacking(kind);
    reservation.total_[kind] += more;
    reservation.left_[kind] += more;
    kinds_[kind].promised += more;
    kinds_[kind].firm += more;
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
    if (reservation.total_[kind] > kinds_[kind].pages - kinds_[kind].firm) return false;
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
    if (count > kinds_[kind].pages - kinds_[kind].taken) {
      SLUICE_CHECK(overcommitted(), "promised pages are there");
      return false;
    }
  }
  for (const Extent& extent : extents) {
    KindState& state = kinds_[extent.kind];
    reservation.left_[extent.kind] -= extent.count;
    state.taken += extent.count;
    SLUICE_CHECK(state.taken <= state.promised && state.taken <= state.pages);
    TakeRuns(state, extent);
  }
  return true;
}

void PagePool::TakeRuns(KindState& state, const Extent& extent) {
  int64_t count = extent.count;
  int32_t after = extent.pages->empty() ? -2 : extent.pages->back();
  while (count > 0) {
    // The run right after `after`; else the smallest that holds all; else the largest there is.
    auto best = state.free_runs.end();
    for (auto it = state.free_runs.begin(); it != state.free_runs.end(); ++it) {
      if (it->first == after + 1) {
        best = it;
        break;
      }
      if (best == state.free_runs.end()) {
        best = it;
        continue;
      }
      const bool holds = it->second >= count, best_holds = best->second >= count;
      if (holds ? (!best_holds || it->second < best->second)
                : (!best_holds && it->second > best->second)) {
        best = it;
      }
    }
    SLUICE_CHECK(best != state.free_runs.end(), "free pages are in runs");
    auto node = state.free_runs.extract(best);  // used again for what is left of the run
    const auto [first, length] = node.value();
    const auto take = static_cast<int32_t>(std::min<int64_t>(length, count));
    for (int32_t page = first; page < first + take; ++page) {
      SLUICE_CHECK(!state.owned[static_cast<size_t>(page)], "no page has two owners");
      state.owned[static_cast<size_t>(page)] = true;
      extent.pages->push_back(page);
    }
    if (take < length) {
      node.value() = {first + take, length - take};
      state.free_runs.insert(std::move(node));
    }
    after = -2;
    count -= take;
  }
}

void PagePool::Give(Reservation& reservation, size_t kind, absl::Span<const int32_t> pages) {
  SLUICE_CHECK(reservation.pool_ == this);
  absl::MutexLock lock(&mutex_);
  KindState& state = kinds_[kind];
  const auto count = static_cast<int64_t>(pages.size());
  state.taken -= count;
  reservation.left_[kind] += count;
  SLUICE_CHECK(reservation.left_[kind] <= reservation.total_[kind]);
  for (size_t begin = 0, end; begin < pages.size(); begin = end) {
    end = begin + 1;
    while (end < pages.size() && pages[end] == pages[end - 1] + 1) ++end;
    GiveRun(state, pages[begin], static_cast<int32_t>(end - begin));
  }
}

void PagePool::GiveRun(KindState& state, int32_t first, int32_t count) {
  for (int32_t page = first; page < first + count; ++page) {
    SLUICE_CHECK(state.owned[static_cast<size_t>(page)], "a page is given back once");
    state.owned[static_cast<size_t>(page)] = false;
  }
  // Merge with the neighbours.
  auto next = state.free_runs.lower_bound({first, 0});
  if (next != state.free_runs.end() && next->first == first + count) {
    count += next->second;
    next = state.free_runs.erase(next);
  }
  if (next != state.free_runs.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == first) {
      first = previous->first;
      count += previous->second;
      state.free_runs.erase(previous);
    }
  }
  state.free_runs.emplace(first, count);
}

PagePool::Room PagePool::RoomNow() const {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Room room{kMost, kMost, kMost};
  absl::MutexLock lock(&mutex_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const KindState& state = kinds_[kind];
    const int64_t unpromised = state.limit - state.promised;
    room.firm_tokens[kind] = TokensIn(kind, std::min(unpromised, state.pages - state.firm));
    room.soft_tokens[kind] = TokensIn(kind, std::min(unpromised, state.pages));
    room.free_tokens[kind] = TokensIn(kind, state.pages - state.taken);
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

int64_t PagePool::SequencesThatFit(const TokensByKind& tokens) const {
  absl::MutexLock lock(&mutex_);
  int64_t sequences = std::numeric_limits<int64_t>::max();
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const int64_t pages = layout_.PagesFor(kind, tokens[kind]);
    if (pages > 0) sequences = std::min(sequences, kinds_[kind].pages / pages);
  }
  return sequences;
}

PagePool::Usage PagePool::UsageOf(size_t kind) const {
  absl::MutexLock lock(&mutex_);
  const KindState& state = kinds_[kind];
  const int64_t page_bytes = layout_.kinds[kind].page_bytes();
  return {state.pages * page_bytes, state.promised * page_bytes, state.taken * page_bytes};
}

std::vector<PagePool::PageRun> PagePool::FreeRuns(size_t kind) const {
  absl::MutexLock lock(&mutex_);
  std::vector<PageRun> runs;
  for (const auto& [first, count] : kinds_[kind].free_runs) runs.push_back({first, count});
  return runs;
}

}  // namespace sluice
