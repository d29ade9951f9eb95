// TopK: exact. Lists of up to 4,096 units are handled here, one thread block a list;
// top_k_long.cu has longer ones. Scores become integers of the same order. A histogram over the
// range of the list's scores finds the few among which the k-th is, and these are ranked against
// each other (or another histogram splits them). Then two walks in order of the units count and
// write those above the k-th, and the first of those that equal it.
//
// The kernel moves 4 bytes a unit: 8 KB a list of 2,048 units. Its time is latency: of memory
// once, and of 7 or 8 barriers of the block. Scores stay in registers, and blocks are small
// enough to run beside those of products. Measured on an H200, 80 lists: 64 of 2,048 units 4.9
// us.
#include <type_traits>

#include "kernels/cuda/common/float_keys.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/select/top_k.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kAtOnce = 8;  // scores that a lane loads, or keeps
constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr int kRanked = 256;  // maximum number of keys that are ranked
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The units of a list among which scores choose, [begin, end), `wanted` of them. Each warp has a
// run of them; it reads their scores once and keeps them. A NaN among the scores becomes -inf. A
// NaN here marks a position behind the last unit: it compares with nothing.
template <int threads>
struct Candidates {
  const float* scores;
  int units, begin, end, wanted;
  int first, last;  // this warp's units
  float kept[kAtOnce];

  __device__ Candidates(const float* of_list, int count, int forced_first, int forced_last, int k)
      : scores(of_list), units(count) {
    begin = min(forced_first, units);
    end = max(begin, units - forced_last);
    wanted = k - begin - (units - end);
    const int share = (end - begin + threads - 1) / threads * 32;
    first = min(begin + static_cast<int>(threadIdx.x) / 32 * share, end);
    last = min(first + share, end);
    Load(first, kept);
  }

  // Calls visit(unit, score) for this warp's units, in order, 32 neighbours at a time.
  template <typename Visit>
  __device__ __forceinline__ void ForEach(Visit visit) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) visit(first + 32 * i + lane, kept[i]);
  }

  // Returns the largest score of this thread's share of the units that are forced in.
  __device__ float LargestForced() const {
    float largest = -INFINITY;
    for (int i = static_cast<int>(threadIdx.x); i < begin; i += threads) {
      largest = fmaxf(largest, scores[i]);
    }
    for (int i = end + static_cast<int>(threadIdx.x); i < units; i += threads) {
      largest = fmaxf(largest, scores[i]);
    }
    return largest;
  }

 private:
  template <int count>
  __device__ __forceinline__ void Load(int from, float (&loaded)[count]) const {
    const float* const at = scores + from + static_cast<int>(threadIdx.x) % 32;
    const int left = last - from - static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < count; ++i) loaded[i] = 32 * i < left ? at[32 * i] : 0.0f;
#pragma unroll
    for (int i = 0; i < count; ++i) loaded[i] = 32 * i < left ? fmaxf(loaded[i], -INFINITY) : NAN;
  }
};

// The chosen units: scores of `from` and above, and the first `equals` of those that equal
// `equal`.
struct Cut {
  float from;
  float equal;
  int equals;
};
// A cut by keys; `from` is the least key that it leaves.
__device__ __forceinline__ Cut AllFrom(uint32_t from) { return {FloatOf(from), NAN, 0}; }
__device__ __forceinline__ Cut SomeOf(uint32_t key, int equals) {
  return {FloatOf(key + 1), FloatOf(key), equals};
}

struct Shared {
  int4 bins[kBins / 4];  // zero while not in use
  int sums[32][2];
  uint32_t bounds[32][3];  // of each warp: least and largest candidate, largest of all
  uint32_t ranked[kRanked];
  int listed;
  int bin, before, count;  // the bin that was found, the sum of better bins, and its own sum
  Cut cut;
};

// The keys of the least and the largest score that may be chosen. If there is none, low > high.
struct KeyRange {
  uint32_t low, high;
};

template <int threads>
__device__ KeyRange RangeOf(Candidates<threads>& c, float margin, Shared& shared) {
  float high = -INFINITY, low = INFINITY;
  c.ForEach([&](int, float score) {
    high = fmaxf(high, score);
    low = fminf(low, score);
  });
  const bool has_margin = !isinf(margin);
  uint32_t top = has_margin ? KeyOf(fmaxf(high, c.LargestForced())) : 0;
  KeyRange range = {__reduce_min_sync(kAllLanes, KeyOf(low)),
                    __reduce_max_sync(kAllLanes, KeyOf(high))};
  top = __reduce_max_sync(kAllLanes, top);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    shared.bounds[warp][0] = range.low;
    shared.bounds[warp][1] = range.high;
    shared.bounds[warp][2] = top;
  }
  __syncthreads();
  const uint32_t(&other)[3] = shared.bounds[min(lane, threads / 32 - 1)];
  range = {__reduce_min_sync(kAllLanes, other[0]), __reduce_max_sync(kAllLanes, other[1])};
  top = __reduce_max_sync(kAllLanes, other[2]);
  if (has_margin) range.low = max(range.low, KeyOf(FloatOf(top) - margin));
  return range;
}

// Finds where the running sum of the bins, from the last one down, reaches `wanted`. A count of 0
// means nowhere. Clears the bins.
template <int threads>
__device__ void FindBin(int wanted, Shared& shared) {
  constexpr int kEach = kBins / threads, kVector = kEach < 4 ? 2 : 4;
  using Vector = std::conditional_t<kVector == 4, int4, int2>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // This thread's bins; the first thread has the last bins.
  int* const mine =
      reinterpret_cast<int*>(shared.bins) + kBins - (static_cast<int>(threadIdx.x) + 1) * kEach;
  __align__(16) int bins[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i += kVector) {
    *reinterpret_cast<Vector*>(bins + i) = *reinterpret_cast<const Vector*>(mine + i);
    *reinterpret_cast<Vector*>(mine + i) = Vector{};
  }
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += bins[i];
  int through = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, through, step);
    if (lane >= step) through += other;
  }
  if (lane == 31) shared.sums[warp][0] = through;
  if (threadIdx.x == 0) {
    shared.count = 0;
    shared.listed = 0;
  }
  __syncthreads();
  const int of_warp = lane < warp ? shared.sums[lane][0] : 0;  // sum over the warps before this one
  int before = __reduce_add_sync(kAllLanes, of_warp) + through - sum;
  if (before < wanted && wanted <= before + sum) {
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      if (before < wanted && wanted <= before + bins[i]) {
        shared.bin = kBins - (static_cast<int>(threadIdx.x) + 1) * kEach + i;
        shared.before = before;
        shared.count = bins[i];
      }
      before += bins[i];
    }
  }
  __syncthreads();
}

// Ranks the keys of a bin, from `least` on and at most kRanked, and returns the cut that leaves
// `wanted` of them.
template <int threads>
__device__ Cut RankBin(Candidates<threads>& c, uint32_t least, int bits, int wanted,
                       Shared& shared) {
  const int count = shared.count;
  const float from = FloatOf(least);
  c.ForEach([&](int, float score) {
    if (!(score >= from)) return;
    const uint32_t key = KeyOf(score);
    if ((key - least) >> bits == 0) shared.ranked[atomicAdd(&shared.listed, 1)] = key;
  });
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < count) {
    const uint32_t mine = shared.ranked[threadIdx.x];
    int above = 0, equal = 0;
    for (int i = 0; i < count; ++i) {
      above += shared.ranked[i] > mine ? 1 : 0;
      equal += shared.ranked[i] == mine ? 1 : 0;
    }
    // All threads with equal keys write the same value.
    if (above < wanted && wanted <= above + equal) shared.cut = SomeOf(mine, wanted - above);
  }
  __syncthreads();
  return shared.cut;
}

// Returns the cut that leaves c.wanted >= 1 candidates, or all if there are fewer.
template <int threads>
__device__ Cut CutOf(Candidates<threads>& c, const KeyRange& range, Shared& shared) {
  if (range.low > range.high) return {NAN, NAN, 0};
  // The keys of interest: `least` and `bits` more bits.
  uint32_t least = range.low;
  int bits = 32 - __clz(static_cast<int>(range.high - range.low)), wanted = c.wanted;
  while (true) {
    const int shift = max(bits - kDigitBits, 0);
    const float from = FloatOf(least);
    c.ForEach([&](int, float score) {
      if (!(score >= from)) return;
      const uint32_t value = KeyOf(score) - least;
      if (bits < 32 && value >> bits != 0) return;  // in a better bin
      atomicAdd(reinterpret_cast<int*>(shared.bins) + (value >> shift), 1);
    });
    __syncthreads();
    FindBin<threads>(wanted, shared);
    if (shared.count == 0) return AllFrom(range.low);  // fewer than wanted
    least += static_cast<uint32_t>(shared.bin) << shift;
    wanted -= shared.before;
    bits = shift;
    if (shared.count == wanted) return AllFrom(least);
    if (shift == 0) return SomeOf(least, wanted);
    if (shared.count <= kRanked) return RankBin(c, least, bits, wanted, shared);
    // The values read here are overwritten only after another barrier.
  }
}

// Writes the units that `cut` leaves to `out`, in order. Returns how many.
template <int threads>
__device__ int WriteChosen(Candidates<threads>& c, const Cut& cut, int32_t* out, Shared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int above = 0, equal = 0;
  c.ForEach([&](int, float score) {
    above += score >= cut.from ? 1 : 0;
    equal += score == cut.equal ? 1 : 0;
  });
  above = __reduce_add_sync(kAllLanes, above);
  equal = __reduce_add_sync(kAllLanes, equal);
  if (lane == 0) {
    shared.sums[warp][0] = above;
    shared.sums[warp][1] = equal;
  }
  __syncthreads();
  const int of_lane_above = lane < threads / 32 ? shared.sums[lane][0] : 0;
  const int of_lane_equal = lane < threads / 32 ? shared.sums[lane][1] : 0;
  const int all_above = __reduce_add_sync(kAllLanes, of_lane_above);
  const int all_equal = __reduce_add_sync(kAllLanes, of_lane_equal);
  // total of the warps before
  above = __reduce_add_sync(kAllLanes, lane < warp ? of_lane_above : 0);
  equal = __reduce_add_sync(kAllLanes, lane < warp ? of_lane_equal : 0);
  const unsigned before = (1u << lane) - 1;
  c.ForEach([&](int unit, float score) {
    const unsigned aboves = __ballot_sync(kAllLanes, score >= cut.from);
    const unsigned equals = __ballot_sync(kAllLanes, score == cut.equal);
    if ((aboves | equals) == 0) return;
    const int equals_before = equal + __popc(equals & before);
    if (score >= cut.from || (score == cut.equal && equals_before < cut.equals)) {
      out[above + __popc(aboves & before) + min(equals_before, cut.equals)] = unit;
    }
    above += __popc(aboves);
    equal += __popc(equals);
  });
  return all_above + min(all_equal, cut.equals);
}

// Grid: lists.
template <int threads>
__global__ void __launch_bounds__(threads) TopKKernel(const __grid_constant__ TopKParams p) {
  __shared__ Shared shared;
  const int list = static_cast<int>(blockIdx.x), row = list / p.kv_heads;
  for (int i = static_cast<int>(threadIdx.x); i < kBins / 4; i += threads) {
    shared.bins[i] = int4{0, 0, 0, 0};
  }
  WaitForPriorKernels();
  LetNextKernelStart();
  if (!IsWanted(p, list, row)) {
    if (threadIdx.x == 0) p.selected.counts[list] = 0;
    return;
  }
  const int units = p.positions[row] / p.unit_tokens + 1;
  Candidates<threads> c(p.scores + list * p.score_stride, units, p.first_units, p.last_units,
                        KOfRow(p, units));
  int32_t* const out = p.selected.units + int64_t{list} * p.selected.capacity;
  int chosen = 0;
  if (c.wanted > 0 && c.begin < c.end) {
    const Cut cut = CutOf(c, RangeOf(c, p.margin, shared), shared);
    chosen = WriteChosen(c, cut, out + c.begin, shared);
  }
  for (int i = static_cast<int>(threadIdx.x); i < c.begin; i += threads) out[i] = i;
  for (int i = static_cast<int>(threadIdx.x); i < c.units - c.end; i += threads) {
    out[c.begin + chosen + i] = c.end + i;
  }
  if (threadIdx.x == 0) p.selected.counts[list] = c.begin + chosen + c.units - c.end;
}

template <int threads>
cudaError_t Launch(const TopKParams& p, cudaStream_t stream) {
  return LaunchKernel(TopKKernel<threads>, dim3(p.rows * p.kv_heads), dim3(threads), 0, stream, p);
}

}  // namespace

cudaError_t LaunchTopK(const TopKParams& p, cudaStream_t stream) {
  if (p.first_units < 0 || p.last_units < 0 || p.k < p.first_units + p.last_units ||
      p.selected.capacity < max(p.k, p.short_k)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  // Callers that ask for runners-up have lists of some thousand units. A block of the long form
  // handles few units as well.
  if (p.runners_up.units != nullptr) return LaunchLongTopK(p, stream);
  // A list's units are at most score_stride.
  if (p.score_stride <= 256 * kAtOnce) return Launch<256>(p, stream);
  if (p.score_stride <= 512 * kAtOnce) return Launch<512>(p, stream);
  return LaunchLongTopK(p, stream);
}

}  // namespace sluice::kernels::cuda
