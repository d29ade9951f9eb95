#include "src/prefill/held_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;

// Returns memory for std::free, with huge pages where it is large: a prompt's caches are written
// once, so that page faults would be much of the time.
uint8_t* AllocateOrdinary(uint64_t bytes) {
  void* data = nullptr;
  SLUICE_CHECK(posix_memalign(&data, bytes < kHugePage ? 64 : kHugePage, bytes) == 0,
               "no memory for ", bytes, " bytes of held caches");
  madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // advice that may be refused
  return static_cast<uint8_t*>(data);
}

}  // namespace

struct HeldMemory::State {
  State(uint64_t most, Buffer memory) : max_bytes(most), arena(std::move(memory)) {
    SLUICE_CHECK(!in_arena() || arena.bytes() >= max_bytes, "an arena of ", arena.bytes(),
                 " bytes for held prompts of ", max_bytes);
    if (in_arena()) gaps[0] = max_bytes;
  }
  bool in_arena() const { return arena.data() != nullptr; }

  // Returns null if there is no room.
  uint8_t* Take(uint64_t count) {
    absl::MutexLock lock(&mutex);
    if (count > max_bytes - taken) return nullptr;
    if (!in_arena()) {
      taken += count;
      return AllocateOrdinary(count);
    }
    // The first gap that is long enough keeps what is free together at the arena's end.
    const auto gap = std::find_if(gaps.begin(), gaps.end(),
                                  [&](const auto& entry) { return entry.second >= count; });
    if (gap == gaps.end()) return nullptr;
    taken += count;
    const auto [begin, length] = *gap;
    gaps.erase(gap);
    if (length > count) gaps[begin + count] = length - count;
    return arena.as<uint8_t>() + begin;
  }
  void GiveBack(uint8_t* data, uint64_t count) {
    if (!in_arena()) std::free(data);
    absl::MutexLock lock(&mutex);
    taken -= count;
    if (!in_arena()) return;
    auto gap = gaps.emplace(static_cast<uint64_t>(data - arena.as<uint8_t>()), count).first;
    if (const auto next = std::next(gap);
        next != gaps.end() && gap->first + gap->second == next->first) {
      gap->second += next->second;
      gaps.erase(next);
    }
    if (gap == gaps.begin()) return;
    if (const auto before = std::prev(gap); before->first + before->second == gap->first) {
      before->second += gap->second;
      gaps.erase(gap);
    }
  }

  const uint64_t max_bytes;
  const Buffer arena;
  mutable absl::Mutex mutex;
  uint64_t taken ABSL_GUARDED_BY(mutex) = 0;
  // Free parts of the arena by where they begin. No two of them touch.
  std::map<uint64_t, uint64_t> gaps ABSL_GUARDED_BY(mutex);
};

HeldMemory::HeldMemory(uint64_t max_bytes, Buffer arena)
    : state_(std::make_shared<State>(max_bytes, std::move(arena))) {}

std::shared_ptr<uint8_t[]> HeldMemory::Take(uint64_t bytes) {
  SLUICE_CHECK(bytes > 0);
  uint8_t* const data = state_->Take(bytes);
  if (data == nullptr) return nullptr;
  return {data, [state = state_, bytes](uint8_t* taken) { state->GiveBack(taken, bytes); }};
}

uint64_t HeldMemory::taken() const {
  absl::MutexLock lock(&state_->mutex);
  return state_->taken;
}

uint64_t HeldMemory::max_bytes() const { return state_->max_bytes; }

}  // namespace sluice
