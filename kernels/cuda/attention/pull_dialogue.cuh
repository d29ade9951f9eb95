// The device's side of the words through which a puller and the arbiter speak
// (kernels/pull_params.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/common/system_words.cuh"
#include "kernels/pull_params.h"

namespace sluice::kernels::cuda {

__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// A part that is granted; a list of -1 says that the puller has no more to do.
struct PulledPart {
  int32_t list;
  int32_t part;
};

// One thread of a puller speaks for it. A poll is a read over the link.
class PullDialogue {
 public:
  __device__ PullDialogue(const PullAttentionParams& p, int puller) : p_(p), puller_(puller) {}

  // Goes on from where the last launch left the words, and asks for the first part. Once the words
  // are closed it asks for nothing.
  __device__ void Begin() {
    open_ = LoadAcquireSystem(p_.closed) == 0;
    if (!open_) return;
    number_ = LoadRelaxedSystem(&p_.asks[puller_].number);
    Ask();
  }

  // Returns the part that was asked for, and asks for the next.
  __device__ PulledPart Next() {
    constexpr PulledPart kNone = {-1, -1};
    if (!open_ || !Await()) return kNone;
    const PullGrant& grant = p_.grants[puller_];
    const auto list = static_cast<int32_t>(LoadRelaxedSystem(&grant.list));
    const auto part = static_cast<int32_t>(LoadRelaxedSystem(&grant.part));
    if (list < 0) return kNone;
    Ask();
    return {list, part};
  }

 private:
  __device__ void Ask() {
    asked_at_ = Nanoseconds();
    StoreReleaseSystem(&p_.asks[puller_].number, ++number_);
  }

  // Returns whether the answer came in time. The clock is read before the word, so that an answer
  // that is there counts however long the part before it took.
  __device__ bool Await() const {
    const uint32_t* const answered = &p_.grants[puller_].number;
    while (true) {
      const bool late = Nanoseconds() - asked_at_ > p_.deadline_ns;
      if (LoadAcquireSystem(answered) == number_) return true;
      if (late) break;
      __nanosleep(100);
    }
    StoreReleaseSystem(p_.missed, 1);
    return false;
  }

  const PullAttentionParams& p_;
  const int puller_;
  bool open_ = false;
  uint32_t number_ = 0;
  uint64_t asked_at_ = 0;
};

// Says that the results of a part are written. One thread calls it; the kernel's end makes the
// results and the bit visible together.
__device__ __forceinline__ void TakePart(const PullAttentionParams& p, const PulledPart& part) {
  atomicOr(p.taken + part.list, uint32_t{1} << part.part);
}

}  // namespace sluice::kernels::cuda
