// What a transfer's warps move: which parts of which lists, told from the lists' lengths.
#pragma once

#include "kernels/cuda/move.cuh"
#include "kernels/params.h"

namespace sluice::kernels::cuda {

// How units are cut into items, of at most item_bytes each; `entries` or `pieces` is 1.
struct TransferPlan {
  int32_t item_bytes;
  int32_t entries;  // of an item
  int32_t pieces;   // of a unit
  bool wide;        // every address that the host knows is a multiple of 16
};

// What a warp moves at a time.
struct TransferItem {
  int64_t source_offset;  // of the list
  int64_t target_offset;
  int32_t source_unit;  // this lane's entry; -1: none
  int32_t target_unit;
  int32_t entries;
  int32_t begin;  // bytes into the unit
};

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The lists [base, base + 32), a lane each.
struct TransferLists {
  int32_t base;
  int32_t count;  // entries of this lane's list
  int64_t source_offset;
  int64_t target_offset;
  int64_t items;
  int64_t end;  // items of all lists up to and with this lane's

  __device__ TransferLists(const TransferParams& p, const TransferPlan& plan, int32_t first,
                           int64_t before)
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
      const int64_t other = __shfl_up_sync(kAllLanes, end, step);
      if (lane >= step) end += other;
    }
    end += before;
  }

  // Item number `index` of all, which is one of these lists'. Its entry's loads are on their way.
  __device__ TransferItem Fetch(const TransferParams& p, const TransferPlan& plan,
                                int64_t index) const {
    const int lane = threadIdx.x % kWarp;
    const int owner = __popc(__ballot_sync(kAllLanes, end <= index));
    const auto own = static_cast<int32_t>(index - __shfl_sync(kAllLanes, end - items, owner));
    const int32_t first = own / plan.pieces * plan.entries;
    TransferItem item;
    item.source_offset = __shfl_sync(kAllLanes, source_offset, owner);
    item.target_offset = __shfl_sync(kAllLanes, target_offset, owner);
    item.source_unit = item.target_unit = -1;
    item.entries = min(plan.entries, __shfl_sync(kAllLanes, count, owner) - first);
    item.begin = own % plan.pieces * plan.item_bytes;
    if (lane < item.entries) {
      // Not by the read-only path: the kernel before this one may have written them while this one
      // waited.
      const int64_t at = int64_t{base + owner} * p.capacity + first + lane;
      item.source_unit = p.source_units != nullptr ? __ldcg(p.source_units + at) : first + lane;
      item.target_unit = p.target_units != nullptr ? __ldcg(p.target_units + at) : first + lane;
    }
    return item;
  }
};

// The items of a warp, in order. Each warp numbers those of 32 lists at a time by a scan over their
// counts, so there is no limit to the lists and nothing to share between warps. All lanes.
class TransferWalk {
 public:
  __device__ TransferWalk(const TransferParams& p, const TransferPlan& plan)
      : p_(p),
        plan_(plan),
        warps_(int64_t{gridDim.x} * (blockDim.x / kWarp)),
        next_(int64_t{blockIdx.x} * (blockDim.x / kWarp) + threadIdx.x / kWarp),
        lists_(p, plan, 0, 0),
        last_(__shfl_sync(kAllLanes, lists_.end, kWarp - 1)) {}

  // False: there is none left.
  __device__ bool Next(TransferItem& item) {
    while (next_ >= last_) {
      if (lists_.base + kWarp >= p_.lists) return false;
      lists_ = TransferLists(p_, plan_, lists_.base + kWarp, last_);
      last_ = __shfl_sync(kAllLanes, lists_.end, kWarp - 1);
    }
    item = lists_.Fetch(p_, plan_, next_);
    next_ += warps_;
    return true;
  }

 private:
  const TransferParams& p_;
  const TransferPlan& plan_;
  const int64_t warps_;
  int64_t next_;
  TransferLists lists_;
  int64_t last_;  // items of the lists so far
};

}  // namespace sluice::kernels::cuda
