// Gather and scatter of units by lists on the device (TransferParams): the GPU itself reads and
// writes pinned memory, no copy engine, no host ("FlashTrans" of ESS, section 3.2).
//
// Bytes moved: sum of counts x unit_bytes over the link, as much in HBM, 4 or 8 bytes an entry.
// Floor: the link; small rows are bound by its 128-byte reads (rows of 656 B touch 6.1 lines) and
// by the reach of the GPU's address translation: rows far apart run at less than half the speed.
// Hence the order of the work: an *item* is a run of neighbouring entries of one list (or a piece
// of one large unit), items are numbered list by list, and warp w of W takes w, w + W, ...: at any
// time all warps are on neighbouring items, in one list or two.
//
// Measured: H100, pool of 64 GiB, default blocks, GB/s of payload, medians of 5, spread below 3 %
// (sluice-transfer-bench; copy engine 55.1 in and 55.2 out, cudaMemcpyAsync per row 0.25):
//   656 B, 32 x    64  256  605    128 x    64  256  605    blocks of 16 KiB
//   to HBM        38.7 43.6 44.6          43.2 38.1 45.0    50.8
//   to DRAM       44.1 46.2 46.8          36.7 45.1 44.9    50.8
// Another host with an H100 gave up to 5 % less in and 18 % less out for rows of 656 B. Beside a
// kernel that reads HBM at 3.1 TB/s (32 x 605): 25.7 in, that kernel keeps 92 % of its speed (16
// blocks: 37.6, 84 %); 35.0 out, 89 % (8 blocks: 23.2, 98 %). H200, 76 lists of 17 to 605 rows, in:
// 2, 4, 6, 8 blocks 21.4, 37.9, 42.1, 44.5; more in kernels/README.md.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/transfer_items.cuh"

namespace sluice::kernels::cuda {
namespace {

// How it is run to either side. `kLoads`: words of an item per lane. More blocks than these do not
// make it faster by themselves: they put further sequences in flight, and the GPU's address
// translation loses sight of them.
struct ToHbm {
  static constexpr int kThreads = 512;
  static constexpr int kLoads = 4;
  static constexpr int kBlocks = 4;
  static constexpr bool kInStep = false;
  // Items of a warp under way, in shared memory: what is in flight needs no registers, so that few
  // multiprocessors hold the link's latency.
  static constexpr int kAhead = 6;
};
struct ToDram {
  static constexpr int kThreads = 512;
  static constexpr int kLoads = 8;
  static constexpr int kBlocks = 16;
  // A warp's stores of one item have arrived before it sends the next one's. Stores that wait for
  // the link hold up everybody's way to memory: without this a kernel beside it reads HBM at two
  // thirds of its speed.
  static constexpr bool kInStep = true;
};
template <typename Side>
constexpr int kItemBytes = Side::kLoads* kWarp* static_cast<int>(sizeof(uint4));
constexpr int kRingBytes = ToHbm::kAhead * kItemBytes<ToHbm> * (ToHbm::kThreads / kWarp);

// Copies `bytes` of each entry's unit, in words of T: word c of the item is word c % words of entry
// c / words.
template <typename Side, typename T>
__device__ __forceinline__ void MoveWords(const TransferParams& p, const TransferItem& item,
                                          const char* source, char* target, int32_t bytes) {
  constexpr int kLoads = Side::kLoads;
  const int32_t words = bytes / static_cast<int32_t>(sizeof(T));
  const int32_t total = item.entries * words;
  const int lane = threadIdx.x % kWarp;
  for (int32_t first = 0; first < total; first += kLoads * kWarp) {
    T value[kLoads];
    T* to[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t word = first + i * kWarp + lane;
      const int32_t entry = word / words;
      const int32_t source_unit = __shfl_sync(kAllLanes, item.source_unit, entry % kWarp);
      const int32_t target_unit = __shfl_sync(kAllLanes, item.target_unit, entry % kWarp);
      to[i] = nullptr;
      if (word < total && source_unit >= 0 && target_unit >= 0) {
        const int64_t at = item.begin + int64_t{word - entry * words} * sizeof(T);
        to[i] = reinterpret_cast<T*>(target + target_unit * p.target_pitch + at);
        LoadOnce(reinterpret_cast<const T*>(source + source_unit * p.source_pitch + at), value[i]);
      }
    }
    if constexpr (Side::kInStep) __threadfence_system();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (to[i] != nullptr) StoreOnce(to[i], value[i]);
    }
  }
}

template <typename Side>
__device__ __forceinline__ void Move(const TransferParams& p, const TransferPlan& plan,
                                     const TransferItem& item) {
  const char* source = static_cast<const char*>(p.source) + item.source_offset;
  char* target = static_cast<char*>(p.target) + item.target_offset;
  const int32_t bytes =
      plan.pieces > 1 ? min(p.unit_bytes - item.begin, kItemBytes<Side>) : p.unit_bytes;
  if (plan.wide && BothAligned(source, target, sizeof(uint4))) {
    MoveWords<Side, uint4>(p, item, source, target, bytes);
  } else {
    MoveWords<Side, uint32_t>(p, item, source, target, bytes);
  }
}

// Grid: any; block: Side::kThreads. While an item's units are on their way, the next one's entries
// are.
template <typename Side>
__global__ void __launch_bounds__(Side::kThreads)
    TransferKernel(const TransferParams p, const TransferPlan plan) {
  WaitForPriorKernels();
  LetNextKernelStart();
  TransferWalk walk(p, plan);
  TransferItem item, following;
  for (bool more = walk.Next(item); more; item = following) {
    more = walk.Next(following);
    Move<Side>(p, plan, item);
  }
}

// A warp's ring of items under way from DRAM, of words of 16 bytes. Word c of an item is word
// c % words of entry c / words; a lane copies words lane, lane + 32, ... and stores the same ones,
// so that it waits for its own copies alone.
class Ring {
 public:
  __device__ Ring(const TransferParams& p, const TransferPlan& plan, uint4* memory)
      : p_(p),
        memory_(memory + threadIdx.x / kWarp * (kRingBytes / (ToHbm::kThreads / kWarp)) /
                             static_cast<int>(sizeof(uint4))),
        bytes_(min(p.unit_bytes, plan.item_bytes)) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int words = bytes_ / static_cast<int>(sizeof(uint4));
#pragma unroll
    for (int i = 0; i < ToHbm::kLoads; ++i) {
      entry_[i] = (i * kWarp + lane) / words;
      offset_[i] = (i * kWarp + lane - entry_[i] * words) * static_cast<int>(sizeof(uint4));
    }
  }

  // What is to be stored of an item: this lane's entry of it, or null.
  struct Stage {
    char* target;
    int32_t bytes;  // of an entry; 0: there is no item
  };

  __device__ Stage Ask(const TransferItem& item, int stage) const {
    const char* const source = static_cast<const char*>(p_.source) + item.source_offset +
                               item.source_unit * p_.source_pitch + item.begin;
    char* const target = static_cast<char*>(p_.target) + item.target_offset +
                         item.target_unit * p_.target_pitch + item.begin;
    const bool there = item.source_unit >= 0 && item.target_unit >= 0;
    const int32_t bytes = min(p_.unit_bytes - item.begin, bytes_);
#pragma unroll
    for (int i = 0; i < ToHbm::kLoads; ++i) {
      const auto from = Of(there ? source : nullptr, entry_[i]);
      if (from != nullptr && offset_[i] < bytes) CopyAside(At(stage, i), from + offset_[i]);
    }
    return {there ? target : nullptr, bytes};
  }
  __device__ void Store(const Stage& item, int stage) const {
#pragma unroll
    for (int i = 0; i < ToHbm::kLoads; ++i) {
      char* const to = const_cast<char*>(Of(item.target, entry_[i]));
      if (to != nullptr && offset_[i] < item.bytes) {
        StoreOnce(reinterpret_cast<uint4*>(to + offset_[i]), *At(stage, i));
      }
    }
  }

 private:
  __device__ uint4* At(int stage, int i) const {
    return memory_ + (stage * ToHbm::kLoads + i) * kWarp + threadIdx.x % kWarp;
  }
  // What lane `entry` has; past the last lane, nothing.
  __device__ static const char* Of(const char* pointer, int entry) {
    const auto bits = reinterpret_cast<unsigned long long>(pointer);
    const unsigned long long its = __shfl_sync(kAllLanes, bits, entry % kWarp);
    return entry < kWarp ? reinterpret_cast<const char*>(its) : nullptr;
  }

  const TransferParams& p_;
  uint4* const memory_;
  const int32_t bytes_;  // of an entry in an item
  int entry_[ToHbm::kLoads], offset_[ToHbm::kLoads];
};

// The same for units of whole words of 16 bytes, into HBM.
__global__ void __launch_bounds__(ToHbm::kThreads)
    RingKernel(const TransferParams p, const TransferPlan plan) {
  extern __shared__ __align__(16) uint4 memory[];
  constexpr int kAhead = ToHbm::kAhead;
  WaitForPriorKernels();
  LetNextKernelStart();
  const Ring ring(p, plan, memory);
  TransferWalk walk(p, plan);
  Ring::Stage stages[kAhead];
  TransferItem item;
  // The stage's item is asked for; its lists may lie where words do not, then it is moved at once.
  const auto ask = [&](Ring::Stage& stage, int number) {
    stage = {nullptr, 0};
    if (walk.Next(item)) {
      stage.bytes = 1;
      if (BothAligned(static_cast<const char*>(p.source) + item.source_offset,
                      static_cast<char*>(p.target) + item.target_offset, sizeof(uint4))) {
        stage = ring.Ask(item, number);
      } else {
        Move<ToHbm>(p, plan, item);
      }
    }
    EndCopies();
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ask(stages[i], i);
  for (bool more = true; more;) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      WaitForCopies<kAhead - 1>();
      more = stages[i].bytes > 0;
      if (!more) break;
      ring.Store(stages[i], i);
      ask(stages[i], i);
    }
  }
}

bool IsMultiple(const TransferParams& p, uintptr_t of) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(p.source) |
                         reinterpret_cast<uintptr_t>(p.target) |
                         static_cast<uintptr_t>(p.source_pitch | p.target_pitch | p.unit_bytes) |
                         static_cast<uintptr_t>(p.source_offsets == nullptr ? p.source_stride : 0) |
                         static_cast<uintptr_t>(p.target_offsets == nullptr ? p.target_stride : 0);
  return bits % of == 0;
}

template <typename Side>
cudaError_t Launch(const TransferParams& p, cudaStream_t stream) {
  TransferPlan plan{};
  plan.item_bytes = kItemBytes<Side>;
  plan.wide = IsMultiple(p, sizeof(uint4));
  plan.entries = max(1, min(kItemBytes<Side> / p.unit_bytes, kWarp));
  plan.pieces = (p.unit_bytes + kItemBytes<Side> - 1) / kItemBytes<Side>;
  const int64_t items =
      (int64_t{p.capacity} + plan.entries - 1) / plan.entries * plan.pieces * p.lists;
  if (items == 0) return cudaSuccess;
  constexpr int kWarps = Side::kThreads / kWarp;
  const int64_t wanted = (items + kWarps - 1) / kWarps;
  const int64_t allowed = p.max_workers > 0 ? p.max_workers : Side::kBlocks;
  const dim3 grid(static_cast<unsigned>(min(wanted, allowed)));
  if constexpr (!Side::kInStep) {
    static const cudaError_t roomy =
        cudaFuncSetAttribute(RingKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes);
    if (roomy != cudaSuccess) return roomy;
    if (plan.wide) {
      return LaunchKernel(RingKernel, grid, dim3(Side::kThreads), kRingBytes, stream, p, plan);
    }
  }
  return LaunchKernel(TransferKernel<Side>, grid, dim3(Side::kThreads), 0, stream, p, plan);
}

}  // namespace

cudaError_t LaunchTransfer(const TransferParams& p, cudaStream_t stream) {
  if (p.lists < 0 || p.capacity < 0 || p.unit_bytes <= 0 || p.max_workers < 0 ||
      !IsMultiple(p, sizeof(uint32_t))) {
    return cudaErrorInvalidValue;
  }
  return IsHostMemory(p.target) ? Launch<ToDram>(p, stream) : Launch<ToHbm>(p, stream);
}

}  // namespace sluice::kernels::cuda
