// TakeRing, for every path.
#include "kernels/cpu/ring.h"

#include <cstring>
#include <thread>

#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

void CopyBundle(const TakeRingParams& p, int64_t place, int32_t units) {
  const char* from = static_cast<const char*>(p.units) + place * p.place_bytes;
  const int32_t* const entries = p.entries + place * kMostBundleUnits;
  for (int32_t i = 0; i < units; ++i) {
    const int64_t to = entries[i] < 0 ? -1 : p.target_units[entries[i]];
    for (int64_t part = 0; part < p.parts; ++part, from += p.unit_bytes) {
      if (to < 0) continue;
      std::memcpy(static_cast<char*>(p.target) + to * p.target_pitch + part * p.part_pitch, from,
                  static_cast<size_t>(p.unit_bytes));
    }
  }
}

// Takes what is there of a worker's bundles from number `next` on. Returns the number after it.
int64_t TakeOf(const TakeRingParams& p, int64_t worker, int64_t next) {
  while (true) {
    const int64_t place = worker * p.depth + next % p.depth;
    uint32_t* const word = &p.words[place].value;
    const int32_t units = RingUnits(__atomic_load_n(word, __ATOMIC_ACQUIRE), next);
    if (units == 0) return next;
    CopyBundle(p, place, units);
    __atomic_store_n(word, 0u, __ATOMIC_RELEASE);
    ++next;
  }
}

}  // namespace

void TakeRing(const TakeRingParams& p, Worker worker) {
  if (p.workers > kMostRingWorkers) KernelCheckFailed("take_ring: at most 64 workers");
  if (worker.index != 0) return;
  int64_t next[kMostRingWorkers] = {};
  while (true) {
    // The word is read before the rings are: what a worker wrote before the round's end is there.
    const bool over = p.open == nullptr || __atomic_load_n(p.open, __ATOMIC_ACQUIRE) == 0;
    bool took = false;
    for (int32_t w = 0; w < p.workers; ++w) {
      const int64_t before = next[w];
      next[w] = TakeOf(p, w, before);
      took = took || next[w] != before;
    }
    if (over) return;
    if (!took) std::this_thread::yield();
  }
}

}  // namespace sluice::kernels::cpu
