// Gather and scatter of units by lists on the device (TransferParams). The GPU itself reads and
// writes pinned memory, without a copy engine or the host ("FlashTrans" of ESS, section 3.2).
//
// Bytes moved: the sum of counts x unit_bytes over the link, as much in HBM, and 4 or 8 bytes an
// entry. Floor: the link. Small rows are bound by its 128-byte reads (rows of 656 B touch 6.1
// lines) and by the reach of the GPU's address translation: rows far apart run at less than half
// the speed. This decides the order of the work. An *item* is a run of neighbouring entries of
// one list (or a piece of one large unit), items are numbered list by list, and warp w of W takes
// items w, w + W, .... So at any time all warps are on neighbouring items, in one list or two.
//
// Measured on an H100, pool of 64 GiB, to HBM by 8 blocks of half as many loads, GB/s of payload,
// medians of 5, spread below 3 % (sluice-transfer-bench; copy engine 55.1 in and 55.2 out,
// cudaMemcpyAsync per row 0.25):
//   656 B, 32 x    64  256  605    128 x    64  256  605    blocks of 16 KiB
//   to HBM        38.7 43.6 44.6          43.2 38.1 45.0    50.8
//   to DRAM       44.1 46.2 46.8          36.7 45.1 44.9    50.8
// A unit of two parts (K and V of a token: rows of 256 B, 8 KB apart) costs hardly more than one
// row of 512 B, and rows of 256 B alone run at half of that rate (H200, 80 x
// 256: 43.4, 47.2, 24.2).
//
// Another host with an H100 gave up to 5 % less in and 18 % less out for
// rows of 656 B. Beside a kernel that reads HBM at 3.1 TB/s (32 x 605): 35.0 out, and that kernel
// keeps 89 % (8 blocks: 23.2, 98 %).
//
// To HBM the cost is the multiprocessors that a transfer takes from a step. H200, 76 x 605, by 1,
// 2, 3, 4 blocks (sluice-overlap-bench): with 4 loads a lane 12.4, 23.6, 34.7, 41-45 GB/s; with 8
// loads 18.0, 35.4, 44.3, 44.6; with 1,024 threads of 4 loads the same, of 8 (which spill) 13.5,
// 26.0, 36, 43. Copies to shared memory that no register waits for (cp.async) end at 24, whatever
// is in flight.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/move.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr unsigned kAll = 0xFFFFFFFFu;

// Settings for a transfer to either side. `kLoads` is the words in flight per lane, and so sets
// the bytes in flight per warp. More blocks than these do not make it faster by themselves: they
// put further sequences in flight, beyond the reach of the GPU's address translation.
struct ToHbm {
  static constexpr int kLoads = 8;
  static constexpr int kBlocks = 4;
  static constexpr bool kInStep = false;
};
struct ToDram {
  static constexpr int kLoads = 8;
  static constexpr int kBlocks = 16;
  // If true, a warp's stores of one item have arrived before it sends the next one's. Stores that
  // wait for the link hold up everybody's way to memory: without this a kernel beside the
  // transfer reads HBM at two thirds of its speed.
  static constexpr bool kInStep = true;
};
template <typename Side>
constexpr int kItemBytes = Side::kLoads* kWarp* static_cast<int>(sizeof(uint4));

struct Plan {
  // How units are cut into items. One of the first two fields is 1.
  int32_t entries;  // entries of an item
  int32_t pieces;   // pieces of a unit, of kItemBytes each
  bool wide;        // every address that the host knows is a multiple of 16
};

// The piece of work that a warp moves at a time.
struct Item {
  int64_t source_offset;  // offset of the list
  int64_t target_offset;
  int32_t source_unit;  // this lane's entry; -1 for none
  int32_t target_unit;
  int32_t entries;
  int32_t begin;  // bytes into the unit
};

// Copies `bytes` of each part of each entry's unit, in words of T. Word c of the item is word c %
// words of part c / words, counted over the item's entries.
template <typename Side, typename T>
__device__ __forceinline__ void MoveWords(const TransferParams& p, const Item& item,
                                          const char* source, char* target, int32_t bytes) {
  constexpr int kLoads = Side::kLoads;
  const int32_t words = bytes / static_cast<int32_t>(sizeof(T));
  const int32_t total = item.entries * p.parts * words;
  const int lane = threadIdx.x % kWarp;
  for (int32_t first = 0; first < total; first += kLoads * kWarp) {
    T value[kLoads];
    T* to[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t word = first + i * kWarp + lane;
      const int32_t part = word / words, entry = part / p.parts;
      const int32_t source_unit = __shfl_sync(kAll, item.source_unit, entry % kWarp);
      const int32_t target_unit = __shfl_sync(kAll, item.target_unit, entry % kWarp);
      to[i] = nullptr;
      if (word < total && source_unit >= 0 && target_unit >= 0) {
        const int64_t at = item.begin + int64_t{part - entry * p.parts} * p.part_pitch +
                           int64_t{word - part * words} * sizeof(T);
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
__device__ __forceinline__ void Move(const TransferParams& p, const Plan& plan, const Item& item) {
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

// The lists [base, base + 32), one to a lane.
template <typename Side>
struct Lists {
  int32_t base;
  int32_t count;  // entries of this lane's list
  int64_t source_offset;
  int64_t target_offset;
  int64_t items;
  int64_t end;  // items of all lists up to and including this lane's

  __device__ Lists(const TransferParams& p, const Plan& plan, int32_t first, int64_t before)
      : base(first) {
    const int lane = threadIdx.x % kWarp;
    const int32_t list = base + lane;
    const bool there = list < p.lists;
    count = there ? max(0, min(p.counts[list], p.capacity)) : 0;
    source_offset = p.source_offsets == nullptr ? list * p.source_stride
                    : there                     ? p.source_offsets[list]
                                                : 0;
    target_offset = p.target_offsets == nullptr ? list * p.target_stride
                    : there                     ? p.target_offsets[list]
                                                : 0;
    items = (int64_t{count} + plan.entries - 1) / plan.entries * plan.pieces;
    end = items;
    for (int step = 1; step < kWarp; step *= 2) {
      const int64_t other = __shfl_up_sync(kAll, end, step);
      if (lane >= step) end += other;
    }
    end += before;
  }

  // Returns item number `index` of all, which belongs to one of these lists. The loads of its
  // entry are under way.
  __device__ Item Fetch(const TransferParams& p, const Plan& plan, int64_t index) const {
    const int lane = threadIdx.x % kWarp;
    const int owner = __popc(__ballot_sync(kAll, end <= index));
    const auto own = static_cast<int32_t>(index - __shfl_sync(kAll, end - items, owner));
    const int32_t first = own / plan.pieces * plan.entries;
    Item item;
    item.source_offset = __shfl_sync(kAll, source_offset, owner);
    item.target_offset = __shfl_sync(kAll, target_offset, owner);
    item.source_unit = item.target_unit = -1;
    item.entries = min(plan.entries, __shfl_sync(kAll, count, owner) - first);
    item.begin = own % plan.pieces * kItemBytes<Side>;
    if (lane < item.entries) {
      // The load must not take the read-only path: the kernel before this one may have written
      // the entries while this one waited.
      const int64_t at = int64_t{base + owner} * p.capacity + first + lane;
      item.source_unit = p.source_units != nullptr ? __ldcg(p.source_units + at) : first + lane;
      item.target_unit = p.target_units != nullptr ? __ldcg(p.target_units + at) : first + lane;
    }
    return item;
  }
};

// Grid: any; block: kThreads. Each warp numbers the items of 32 lists at a time by a scan over
// their counts, so the number of lists has no limit and warps share nothing. While an item's
// units are on their way, the next one's entries are loading.
template <typename Side>
__global__ void __launch_bounds__(kThreads)
    TransferKernel(const TransferParams p, const Plan plan) {
  WaitForPriorKernels();
  LetNextKernelStart();  // SparseMlaParams::then_arrives relies on this order
  const int64_t warps = int64_t{gridDim.x} * (kThreads / kWarp);
  int64_t next = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  int64_t last = 0;  // items of the lists so far
  for (int32_t base = 0; base < p.lists; base += kWarp) {
    const Lists<Side> lists(p, plan, base, last);
    last = __shfl_sync(kAll, lists.end, kWarp - 1);
    if (next >= last) continue;
    Item item = lists.Fetch(p, plan, next);
    for (next += warps; next < last; next += warps) {
      const Item following = lists.Fetch(p, plan, next);
      Move<Side>(p, plan, item);
      item = following;
    }
    Move<Side>(p, plan, item);
  }
}

bool IsMultiple(const TransferParams& p, uintptr_t of) {
  const uintptr_t bits =
      reinterpret_cast<uintptr_t>(p.source) | reinterpret_cast<uintptr_t>(p.target) |
      static_cast<uintptr_t>(p.source_pitch | p.target_pitch | p.unit_bytes | p.part_pitch) |
      static_cast<uintptr_t>(p.source_offsets == nullptr ? p.source_stride : 0) |
      static_cast<uintptr_t>(p.target_offsets == nullptr ? p.target_stride : 0);
  return bits % of == 0;
}

template <typename Side>
cudaError_t Launch(const TransferParams& p, cudaStream_t stream) {
  Plan plan{};
  plan.wide = IsMultiple(p, sizeof(uint4));
  plan.entries = max(1, min(kItemBytes<Side> / (p.unit_bytes * p.parts), kWarp));
  plan.pieces = (p.unit_bytes + kItemBytes<Side> - 1) / kItemBytes<Side>;
  const int64_t items =
      (int64_t{p.capacity} + plan.entries - 1) / plan.entries * plan.pieces * p.lists;
  if (items == 0) return cudaSuccess;
  const int64_t wanted = (items + kThreads / kWarp - 1) / (kThreads / kWarp);
  const int64_t allowed = p.max_workers > 0 ? p.max_workers : Side::kBlocks;
  return LaunchKernel(TransferKernel<Side>, dim3(static_cast<unsigned>(min(wanted, allowed))),
                      dim3(kThreads), 0, stream, p, plan);
}

}  // namespace

cudaError_t LaunchTransfer(const TransferParams& p, cudaStream_t stream) {
  if (p.lists < 0 || p.capacity < 0 || p.unit_bytes <= 0 || p.max_workers < 0 || p.parts < 1 ||
      (p.parts > 1 && p.unit_bytes > kMaxPartsBytes / p.parts) ||
      !IsMultiple(p, sizeof(uint32_t))) {
    return cudaErrorInvalidValue;
  }
  return IsHostMemory(p.target) ? Launch<ToDram>(p, stream) : Launch<ToHbm>(p, stream);
}

}  // namespace sluice::kernels::cuda
