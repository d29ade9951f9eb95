// The division of decode attention's work, which every block computes from the rows' positions.
//
// The context of a row is cut into splits of kSplitTokens tokens, and the splits into groups of
// kGroupSplits. One block computes a split, in one order. The splits of a group are folded in
// order, then the groups of a row and KV head in order (Fold). That is the whole arithmetic. It
// knows nothing of blocks, so a row's bits do not depend on its batch.
//
// Neighbouring rows of one sequence whose positions rise by one, as those of drafts do, form a
// *bundle* of at most DecodeShape::bundle_rows rows, which read each K and V once: its context is
// that of its last row. A row that ends before a split, or inside it, adds nothing for the tokens
// behind its position, to the bit.
//
// Units of work are (bundle, KV head, split), in that order. A bundle goes by its first row. Block
// c of `blocks` takes the consecutive units [Begin(c), Begin(c + 1)), an even share whatever the
// mix of contexts. A block's share of one (bundle, KV head) is a *fragment*. A block that has all
// of it writes its result. Otherwise the block stores each group that lies inside the fragment
// folded, and splits of groups that straddle a fragment's edge one by one, and the combining
// kernel's block folds them.
#pragma once

#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/row_runs.cuh"
#include "kernels/params.h"

namespace sluice::kernels::cuda {

inline constexpr int kSplitTokens = kAttentionSplitTokens;
inline constexpr int kGroupSplits = 8;
inline constexpr int kPlanRows = 128;  // rows of one launch; more rows take more launches

// Fields that a launch adds to AttentionParams.
struct DecodeShape {
  int32_t fragment_entries;   // room for entries of one fragment in `partial`
  uint32_t block_reciprocal;  // 2^32 / block_tokens, rounded up: t / block_tokens by one multiply
  int32_t page_rows;          // rows of head_dim elements
  int32_t bundle_rows;        // most rows of a bundle
};

// An entry of `partial` is the state of a split or a group for the query heads of a bundle and a KV
// head, `heads` = bundle_rows x group of them, row by row: o [heads][head_dim] unscaled, m [heads],
// l [heads]. A bundle with fewer rows leaves the rest out. Entries of block c start at 2 c
// fragment_entries: those of the fragment it begins with, then those of the one it ends with. A
// fragment stores its groups by number, then the splits of its first group, then the splits of
// its last.
__host__ __device__ constexpr int64_t EntryFloats(int heads, int head_dim) {
  return int64_t{heads} * (head_dim + 2);
}

__host__ __device__ constexpr int64_t FragmentEntries(int64_t splits) {
  return (splits + kGroupSplits - 1) / kGroupSplits + 2 * kGroupSplits;
}

// A running softmax: exponentials are 2^(score - m), and their sum is l. It starts as (-inf, 0).
struct Softmax {
  float m;
  float l;
};

struct FoldWeights {
  float keep;  // weight of the sums that were there
  float add;   // weight of the sums that come in
};

// Returns a finite number in the place of m, so that weights relative to it are 0 if m is -inf.
__device__ __forceinline__ float FiniteBase(float m) { return m == NegativeInfinity() ? 0.0f : m; }

// Folds `from` into `into`. The weighted sums fold alike: o keep + from_o add. The m of `from` is
// finite, unless it `may_be_empty`: a state of no tokens changes nothing.
template <bool may_be_empty = false>
__device__ __forceinline__ FoldWeights Fold(Softmax& into, const Softmax& from) {
  const float m = fmaxf(into.m, from.m), base = may_be_empty ? FiniteBase(m) : m;
  const FoldWeights weights = {Exp2(into.m - base), Exp2(from.m - base)};
  into.l = fmaf(into.l, weights.keep, from.l * weights.add);
  into.m = m;
  return weights;
}

__device__ __forceinline__ float Fold(const FoldWeights& weights, float o, float from_o) {
  return fmaf(o, weights.keep, from_o * weights.add);
}

__device__ __forceinline__ float NaturalLse(const Softmax& state) {
  return (state.m + log2f(state.l)) * kLn2;
}

// The plan, in shared memory.
struct DecodePlan {
  // First unit of each row; the last entry is the number of units. Rows of a bundle behind its
  // first one have no units.
  int first_unit[kPlanRows + 1];
  int max_splits;
  // By row, a bit each: the row does not continue the one before. Padded rows and those behind the
  // last one have theirs. Written only where bundles have more than one row.
  uint32_t starts[kPlanRows / 32];

  // Returns how many rows lie between a row and the one that begins its sequence's rows.
  __device__ int PlaceInRun(int row) const {
    int word = row / 32;
    uint32_t bits = starts[word] & ((2u << row % 32) - 1);
    while (bits == 0) bits = starts[--word];  // row 0 has its bit
    return row - (word * 32 + 31 - __clz(static_cast<int>(bits)));
  }
  // Returns the rows of the bundle that begins with `row`.
  __device__ int BundleRows(int row, int most) const {
    if (most == 1) return 1;
    int word = row / 32;
    uint32_t bits = starts[word] & ~((2u << row % 32) - 1);
    while (bits == 0 && ++word < kPlanRows / 32) bits = starts[word];
    return min(most, word * 32 + (bits == 0 ? 0 : __ffs(static_cast<int>(bits)) - 1) - row);
  }
};

// Writes plan.starts. All threads of the block take part; the caller lets them meet.
__device__ inline void FindStarts(const AttentionParams& p, DecodePlan& plan) {
  const int r = static_cast<int>(threadIdx.x);
  if (r >= kPlanRows) return;
  const bool continues = r < p.rows && ContinuesRow(p.slots, p.positions, r);
  const uint32_t starts = __ballot_sync(0xffffffffu, !continues);
  if (r % 32 == 0) plan.starts[r / 32] = starts;
}

// Fills `plan`. All threads of the block, at least kPlanRows of them, take part.
__device__ inline void MakePlan(const AttentionParams& p, const DecodeShape& shape,
                                DecodePlan& plan) {
  __shared__ int warp_sums[kPlanRows / 32];
  const int r = static_cast<int>(threadIdx.x), lane = r % 32;
  int splits = 0, sum = 0;
  if (shape.bundle_rows > 1) {
    FindStarts(p, plan);
    __syncthreads();
  }
  if (r < kPlanRows) {
    if (r < p.rows && p.slots[r] >= 0 &&
        (shape.bundle_rows == 1 || plan.PlaceInRun(r) % shape.bundle_rows == 0)) {
      const int last = r + plan.BundleRows(r, shape.bundle_rows) - 1;
      splits = p.positions[last] / kSplitTokens + 1;
    }
    sum = splits * p.cache.kv_heads;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[r / 32] = sum;
    if (r == 0) plan.first_unit[0] = plan.max_splits = 0;
  }
  __syncthreads();
  if (r < kPlanRows) {
    for (int w = 0; w < r / 32; ++w) sum += warp_sums[w];
    plan.first_unit[r + 1] = sum;
    const int most = __reduce_max_sync(0xffffffffu, splits);
    if (lane == 0) atomicMax(&plan.max_splits, most);
  }
  __syncthreads();
}

// A plan as one block sees it.
class WorkRange {
 public:
  __device__ WorkRange(const DecodePlan& plan, const AttentionParams& p, const DecodeShape& shape,
                       int blocks)
      : plan_(plan),
        rows_(p.rows),
        kv_heads_(p.cache.kv_heads),
        bundle_rows_(shape.bundle_rows),
        units_(plan.first_unit[kPlanRows]),
        share_(units_ / blocks),
        longer_(units_ - share_ * blocks),
        whole_(p.partial == nullptr || FragmentEntries(plan.max_splits) > shape.fragment_entries) {}

  // Returns the first unit of block c in even shares. The first blocks take one unit more.
  __device__ int EvenBegin(int c) const { return c * share_ + min(c, longer_); }

  // Returns the first unit of block c. Without room for partial results a block takes whole
  // (bundle, KV head)s.
  __device__ int Begin(int c) const {
    const int unit = EvenBegin(c);
    if (!whole_ || unit == units_) return unit;
    const int row = RowOf(unit), first = plan_.first_unit[row], splits = Splits(row);
    return first + (unit - first + splits - 1) / splits * splits;
  }

  // REQUIRES: !whole().
  __device__ int Owner(int unit) const {
    const int in_longer = longer_ * (share_ + 1);
    return unit < in_longer ? unit / (share_ + 1) : longer_ + (unit - in_longer) / share_;
  }

  __device__ int RowOf(int unit) const {
    int low = 0, high = rows_;  // first_unit[low] <= unit < first_unit[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (plan_.first_unit[middle] <= unit ? low : high) = middle;
    }
    return low;
  }

  // Returns the rows of the bundle that begins with `row`.
  __device__ int Rows(int row) const { return plan_.BundleRows(row, bundle_rows_); }
  __device__ int Splits(int row) const { return (End(row) - FirstUnit(row)) / kv_heads_; }
  __device__ int FirstUnit(int row) const { return plan_.first_unit[row]; }
  __device__ int End(int row) const { return plan_.first_unit[row + 1]; }
  __device__ bool whole() const { return whole_; }

 private:
  const DecodePlan& plan_;
  const int rows_;
  const int kv_heads_;
  const int bundle_rows_;
  const int units_;
  const int share_;
  const int longer_;
  const bool whole_;
};

// A block's share of one (bundle, KV head): splits [begin, end) of `splits`.
struct Fragment {
  int begin;
  int end;
  int splits;

  __device__ bool HasAll() const { return begin == 0 && end == splits; }
  __device__ bool HasGroup(int group) const {
    return begin <= group * kGroupSplits && min((group + 1) * kGroupSplits, splits) <= end;
  }
  // Returns the index, among its entries, of a split of a group that this block does not have
  // whole.
  __device__ int SplitEntry(int split) const {
    const int groups = (splits + kGroupSplits - 1) / kGroupSplits;
    const bool first = split / kGroupSplits == begin / kGroupSplits;
    return groups + (first ? 0 : kGroupSplits) + split % kGroupSplits;
  }
};

}  // namespace sluice::kernels::cuda
