// Lookups of the slots of units, as device code of one block to a list and one warp to a row, so
// that a launch may do several of these. The results are those of kernels/cpu/residency.cc, to
// the last entry.
#pragma once

#include "kernels/cuda/common/block_scan.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/sparse_params.h"

namespace sluice::kernels::cuda {

// The table rows of one (slot, KV head), with 32-bit arithmetic.
class HeadTable {
 public:
  __device__ HeadTable(const PagedRows& rows, int slot, int head)
      : base_(static_cast<char*>(rows.base) + head * rows.head_bytes),
        pages_(rows.page_table + slot * rows.table_stride),
        page_bytes_(rows.page_bytes),
        rows_per_page_(static_cast<unsigned>(rows.rows_per_page)),
        reciprocal_(0xFFFFFFFFu / rows_per_page_),
        dim_(static_cast<unsigned>(rows.dim)) {}

  // Reads the page numbers from a copy of this slot's, which starts at its first page.
  __device__ void ReadPagesFrom(const int32_t* copy) { pages_ = copy; }
  __device__ const int32_t* pages() const { return pages_; }

  __device__ int32_t* At(int row) const {
    // The quotient, or one less.
    unsigned page = __umulhi(static_cast<unsigned>(row), reciprocal_);
    unsigned offset = static_cast<unsigned>(row) - page * rows_per_page_;
    if (offset >= rows_per_page_) {
      ++page;
      offset -= rows_per_page_;
    }
    return reinterpret_cast<int32_t*>(base_ + pages_[page] * page_bytes_) + offset * dim_;
  }

 private:
  char* base_;
  const int32_t* pages_;
  int64_t page_bytes_;
  unsigned rows_per_page_;
  unsigned reciprocal_;
  unsigned dim_;
};

// The tables of a list, and the values that follow from its row's position. No kernel writes what
// is read here.
struct ListTables {
  __device__ ListTables(const ResidencyTable& t, const int32_t* slots, const int32_t* positions,
                        int list, int kv_heads, int unit_tokens)
      : row(list / kv_heads),
        head(list - row * kv_heads),
        slot(slots[row]),
        position(positions[row]),
        newest(position / unit_tokens),
        ring(t.ring),
        count(t.count),
        persistent(t.persistent != nullptr && t.persistent[head] != 0),
        place_of(t.place_of, max(slot, 0), head),
        places(t.places, max(slot, 0), head) {}

  __device__ bool InRing(int unit) const { return newest - unit < ring; }
  // Returns the newest unit that has place `place` of the ring; negative: there is none.
  __device__ int UnitInRing(int place) const { return newest - (newest - place + ring) % ring; }

  int row, head, slot, position, newest, ring, count;
  bool persistent;
  HeadTable place_of, places;
};

// Entries that a thread takes at a time. Their loads are under way together.
inline constexpr int kListStrip = 4;
// The same where a block looks through the table of all units, which may be far more.
inline constexpr int kTableStrip = 16;
// Returns the threads of a block for lists or tables of `entries`.
inline int ListThreads(int64_t entries) {
  const int64_t warps = (entries + 32 * kListStrip - 1) / (32 * kListStrip);
  return static_cast<int>(32 * (warps < 2 ? 2 : warps > 16 ? 16 : warps));
}

inline bool IsTable(const PagedRows& rows, int dim) {
  return rows.dim == dim && rows.rows_per_page >= 1 && rows.type == DType::kFloat32;
}
// Returns whether the tables are as the kernels read them.
inline bool IsResidency(const ResidencyTable& t) {
  return t.ring >= 0 && t.count >= t.ring && IsTable(t.place_of, 1) && IsTable(t.places, 2);
}

// Splits list `list` of the row. `totals` is the scratch of ScanBlock.
__device__ __forceinline__ void SplitList(const SplitParams& p, int list, uint32_t* totals) {
  const ListTables t(p.residency, p.slots, p.positions, list, p.kv_heads, p.unit_tokens);
  WaitForPriorKernels();
  if (t.slot < 0) {
    if (threadIdx.x == 0) p.missing.counts[list] = p.resident.counts[list] = 0;
    return;
  }
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int32_t* const selected = p.selected.units + int64_t{list} * p.selected.capacity;
  int32_t* const resident = p.resident.units + int64_t{list} * p.resident.capacity;
  int32_t* const resident_places = p.places + int64_t{list} * p.resident.capacity;
  int32_t* const missing = p.missing.units + int64_t{list} * p.missing.capacity;
  const auto place_of = [&](int unit) {
    return t.InRing(unit) ? unit % t.ring : *t.place_of.At(unit);
  };

  const int count = p.selected.counts[list];
  int residents = 0, misses = 0;  // of the chunks so far
  for (int first = 0; first < count; first += threads * kListStrip) {
    const int begin = first + thread * kListStrip, end = min(begin + kListStrip, count);
    int unit[kListStrip], place[kListStrip];
#pragma unroll
    for (int i = 0; i < kListStrip; ++i) {
      if (begin + i < end) unit[i] = selected[begin + i];
    }
    uint32_t mine = 0;  // residents, and in the upper half misses: at most 2,048 in a chunk
#pragma unroll
    for (int i = 0; i < kListStrip; ++i) {
      if (begin + i >= end) continue;
      place[i] = place_of(unit[i]);
      mine += place[i] < 0 ? 0x10000u : p.whole ? 0u : 1u;
      if (place[i] >= 0 && !t.InRing(unit[i])) t.places.At(place[i])[1] = t.position;
    }
    const BlockSum sum = ScanBlock(mine, totals);
    int resident_at = residents + static_cast<int>(sum.before & 0xFFFF);
    int missing_at = misses + static_cast<int>(sum.before >> 16);
    residents += static_cast<int>(sum.total & 0xFFFF);
    misses += static_cast<int>(sum.total >> 16);
    if (residents > p.resident.capacity || misses > p.missing.capacity) __trap();
#pragma unroll
    for (int i = 0; i < kListStrip; ++i) {
      if (begin + i >= end) continue;
      if (place[i] < 0) {
        missing[missing_at++] = unit[i];
      } else if (!p.whole) {
        resident[resident_at] = unit[i];
        resident_places[resident_at++] = place[i];
      }
    }
  }
  // Lists every unit that has a place. If only the ring's units have one, it looks through the
  // ring alone.
  const int begin_all = t.ring == t.count ? max(0, t.newest - t.ring + 1) : 0;
  for (int first = begin_all; p.whole && first <= t.newest; first += threads * kTableStrip) {
    const int begin = first + thread * kTableStrip;
    int place[kTableStrip];
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kTableStrip; ++i) {
      place[i] = begin + i <= t.newest ? place_of(begin + i) : -1;
      mine += place[i] < 0 ? 0 : 1;
    }
    const BlockSum sum = ScanBlock(mine, totals);
    int at = residents + static_cast<int>(sum.before);
    residents += static_cast<int>(sum.total);
    if (residents > p.resident.capacity) __trap();
#pragma unroll
    for (int i = 0; i < kTableStrip; ++i) {
      if (place[i] < 0) continue;
      resident[at] = begin + i;
      resident_places[at++] = place[i];
    }
  }
  if (thread == 0) {
    p.resident.counts[list] = residents;
    p.missing.counts[list] = misses;
  }
}

// Decides for one row. A whole warp calls it.
__device__ __forceinline__ void RecallDueRow(const RecallDueParams& p, int row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int slot = p.slots[row];
  WaitForPriorKernels();
  int64_t selected = 0, missing = 0;
  for (int head = lane; slot >= 0 && head < p.kv_heads; head += 32) {
    selected += p.selected.counts[int64_t{row} * p.kv_heads + head];
    missing += p.missing.counts[int64_t{row} * p.kv_heads + head];
  }
  for (int step = 16; step > 0; step /= 2) {
    selected += __shfl_xor_sync(0xFFFFFFFFu, selected, step);
    missing += __shfl_xor_sync(0xFFFFFFFFu, missing, step);
  }
  if (lane != 0) return;
  if (slot < 0) {
    p.due[row] = 0;
    return;
  }
  SparseCounters& counters = p.counters[slot];
  counters.steps += 1;
  counters.selected += selected * p.unit_tokens;
  counters.missing += missing * p.unit_tokens;
  const int32_t since = p.since[slot];
  bool due = p.interval > 0 && since + 1 >= p.interval;
  if (p.interval <= 0) {
    const double share =
        static_cast<double>(missing) / (static_cast<double>(p.kv_heads) * p.budget_units);
    const double steps = double{1} + since;
    due = share * (steps + 1) / steps > double{p.share_limit};
  }
  p.due[row] = due ? 1 : 0;
  p.since[slot] = due ? 0 : since + 1;
}

}  // namespace sluice::kernels::cuda
