#include "src/kv/page_pool.h"

#include <algorithm>
#include <limits>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

// A page's first byte; keeps blocks on cache lines whatever the kinds.
constexpr int64_t kKindAlignment = 4096;

// Pages of each kind in an arena of `bytes`, in the proportion in which a token needs them.
std::vector<int64_t> DividePages(const CacheLayout& layout, int64_t bytes) {
  double bytes_per_token = 0;
  for (const CacheKind& kind : layout.kinds) {
    bytes_per_token += static_cast<double>(kind.bytes_per_token * kind.heads);
  }
  const int64_t usable = bytes - kKindAlignment * static_cast<int64_t>(layout.kinds.size());
  std::vector<int64_t> pages;
  for (const CacheKind& kind : layout.kinds) {
    const double share = static_cast<double>(kind.bytes_per_token * kind.heads) / bytes_per_token;
    pages.push_back(
        static_cast<int64_t>(static_cast<double>(std::max<int64_t>(usable, 0)) * share) /
        kind.page_bytes());
  }
  return pages;
}

}  // namespace

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    Reset();
    pool_ = std::exchange(other.pool_, nullptr);
    left_ = std::move(other.left_);
  }
  return *this;
}

void Reservation::Reset() {
  if (pool_ == nullptr) return;
  absl::MutexLock lock(&pool_->mutex_);
  for (size_t kind = 0; kind < left_.size(); ++kind) {
    pool_->kinds_[kind].promised -= left_[kind];
    SLUICE_CHECK(pool_->kinds_[kind].promised >= pool_->kinds_[kind].taken);
  }
  pool_ = nullptr;
}

absl::StatusOr<std::unique_ptr<PagePool>> PagePool::Create(std::string name,
                                                           const CacheLayout& layout,
                                                           Buffer arena) {
  const std::vector<int64_t> pages = DividePages(layout, static_cast<int64_t>(arena.bytes()));
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
  return std::unique_ptr<PagePool>(new PagePool(std::move(name), layout, std::move(arena)));
}

PagePool::PagePool(std::string name, const CacheLayout& layout, Buffer arena)
    : name_(std::move(name)), layout_(layout), arena_(std::move(arena)) {
  const std::vector<int64_t> pages = DividePages(layout_, static_cast<int64_t>(arena_.bytes()));
  auto* next = arena_.as<uint8_t>();
  for (size_t kind = 0; kind < pages.size(); ++kind) {
    const auto past = reinterpret_cast<uintptr_t>(next) % kKindAlignment;
    next += past == 0 ? 0 : kKindAlignment - past;
    base_.push_back(next);
    next += pages[kind] * layout_.kinds[kind].page_bytes();
    KindState state;
    state.pages = pages[kind];
    state.free_runs.emplace(0, static_cast<int32_t>(pages[kind]));
    state.owned.resize(static_cast<size_t>(pages[kind]));
    kinds_.push_back(std::move(state));
  }
}

PagePool::~PagePool() {
  absl::MutexLock lock(&mutex_);
  for (const KindState& kind : kinds_) {
    SLUICE_CHECK(kind.taken == 0 && kind.promised == 0, name_, ": pages outlive their pool");
  }
}

bool PagePool::CouldEverFit(int64_t tokens) const {
  absl::MutexLock lock(&mutex_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    if (layout_.PagesFor(kind, tokens) > kinds_[kind].pages) return false;
  }
  return true;
}

Reservation PagePool::TryReserve(int64_t tokens) {
  absl::MutexLock lock(&mutex_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const KindState& state = kinds_[kind];
    if (layout_.PagesFor(kind, tokens) > state.pages - state.promised) return Reservation();
  }
  Reservation reservation;
  reservation.pool_ = this;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    reservation.left_.push_back(layout_.PagesFor(kind, tokens));
    kinds_[kind].promised += reservation.left_.back();
  }
  return reservation;
}

std::vector<PageRun> PagePool::Take(Reservation& reservation, size_t kind, int64_t count,
                                    int32_t after) {
  SLUICE_CHECK(reservation.pool_ == this && reservation.left_[kind] >= count,
               "pages are taken under a reservation");
  absl::MutexLock lock(&mutex_);
  KindState& state = kinds_[kind];
  reservation.left_[kind] -= count;
  state.taken += count;
  SLUICE_CHECK(state.taken <= state.promised && state.promised <= state.pages);
  std::vector<PageRun> runs;
  while (count > 0) {
    // The run right after `after`; else the smallest that holds all; else the largest there is.
    auto best = state.free_runs.end();
    for (auto it = state.free_runs.begin(); it != state.free_runs.end(); ++it) {
      if (runs.empty() && it->first == after + 1) {
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
    SLUICE_CHECK(best != state.free_runs.end(), "promised pages are there");
    const auto [first, length] = *best;
    const auto take = static_cast<int32_t>(std::min<int64_t>(length, count));
    state.free_runs.erase(best);
    if (take < length) state.free_runs.emplace(first + take, length - take);
    for (int32_t page = first; page < first + take; ++page) {
      SLUICE_CHECK(!state.owned[static_cast<size_t>(page)], "no page has two owners");
      state.owned[static_cast<size_t>(page)] = true;
    }
    runs.push_back({first, take});
    count -= take;
  }
  return runs;
}

void PagePool::Give(size_t kind, const std::vector<PageRun>& runs) {
  absl::MutexLock lock(&mutex_);
  KindState& state = kinds_[kind];
  for (PageRun run : runs) {
    for (int32_t page = run.first; page < run.first + run.count; ++page) {
      SLUICE_CHECK(state.owned[static_cast<size_t>(page)], "a page is given back once");
      state.owned[static_cast<size_t>(page)] = false;
    }
    state.taken -= run.count;
    state.promised -= run.count;
    // Merge with the neighbours.
    auto next = state.free_runs.lower_bound({run.first, 0});
    if (next != state.free_runs.end() && next->first == run.first + run.count) {
      run.count += next->second;
      next = state.free_runs.erase(next);
    }
    if (next != state.free_runs.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == run.first) {
        run = {previous->first, previous->second + run.count};
        state.free_runs.erase(previous);
      }
    }
    state.free_runs.emplace(run.first, run.count);
  }
}

int64_t PagePool::capacity_tokens() const {
  absl::MutexLock lock(&mutex_);
  int64_t tokens = std::numeric_limits<int64_t>::max();
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    tokens =
        std::min(tokens, kinds_[kind].pages / layout_.layers * layout_.kinds[kind].block_tokens);
  }
  return tokens;
}

PagePool::Usage PagePool::UsageOf(size_t kind) const {
  absl::MutexLock lock(&mutex_);
  const KindState& state = kinds_[kind];
  const int64_t page_bytes = layout_.kinds[kind].page_bytes();
  return {state.pages * page_bytes, state.promised * page_bytes, state.taken * page_bytes};
}

std::vector<PageRun> PagePool::FreeRuns(size_t kind) const {
  absl::MutexLock lock(&mutex_);
  std::vector<PageRun> runs;
  for (const auto& [first, count] : kinds_[kind].free_runs) runs.push_back({first, count});
  return runs;
}

}  // namespace sluice
