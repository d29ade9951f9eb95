// TopK: exact, one thread block a list. Scores become integers of the same order; histograms of
// their digits, of the range that the list's scores have, find the score of the k-th; then two
// walks in order of the units count and write what is above it, and the first of what equals it.
//
// Moves 4 bytes a unit, and reads them again from the nearest caches, 5 times or so: 8 KB a list of
// 2,048 units, 256 KB a list of 65,536. What it takes is latency: of memory once, and of about 12
// meetings of the block. 256 threads, or 512 for long lists, fit beside the blocks of products.
#include "kernels/cuda/float_keys.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kShortThreads = 256;
constexpr int kThreads = 512;
constexpr int kShortList = 8192;  // units
constexpr int kAtOnce = 8;        // loads of a lane that are under way
constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// NaN is -inf.
__device__ __forceinline__ uint32_t KeyOfScore(float score) {
  return KeyOf(isnan(score) ? -INFINITY : score);
}

// A list's units, those that scores choose among, [begin, end), and how many these choose.
struct Candidates {
  const float* scores;
  int units, begin, end, wanted;

  // Calls visit(unit, key, is candidate) for this warp's share of the units, in order, 32 next to
  // each other at a time; past the last unit too.
  template <typename Visit>
  __device__ __forceinline__ void ForEach(Visit visit) const {
    const int warps = static_cast<int>(blockDim.x) / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int share = (units + 32 * warps - 1) / (32 * warps) * 32;
    const int last = min((warp + 1) * share, units);
    for (int first = warp * share; first < last; first += 32 * kAtOnce) {
      float score[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int unit = first + 32 * i + lane;
        score[i] = unit < last ? scores[unit] : -INFINITY;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int unit = first + 32 * i + lane;
        visit(unit, KeyOfScore(score[i]), unit >= begin && unit < end && unit < last);
      }
    }
  }
};

// What is chosen: keys of `from` and above, and the first `equals` of those that are `key`.
struct Cut {
  uint32_t from;
  uint32_t key;
  int equals;
};

struct Shared {
  int bins[kBins];  // zero where nobody is at work
  int sums[kThreads / 32][2];
  uint32_t bounds[kThreads / 32][3];
  int digit, before, count;  // the bin that was found, what is in better ones, and in it
};

// The least and largest keys that may be chosen; none: low > high.
struct KeyRange {
  uint32_t low, high;
};

__device__ KeyRange RangeOf(const Candidates& c, float margin, Shared& shared) {
  uint32_t top = 0, high = 0, low = ~0u;
  c.ForEach([&](int, uint32_t key, bool candidate) {
    top = max(top, key);
    high = max(high, candidate ? key : 0u);
    low = min(low, candidate ? key : ~0u);
  });
  top = __reduce_max_sync(kAllLanes, top);
  high = __reduce_max_sync(kAllLanes, high);
  low = __reduce_min_sync(kAllLanes, low);
  uint32_t(&mine)[3] = shared.bounds[threadIdx.x / 32];
  if (threadIdx.x % 32 == 0) {
    mine[0] = top;
    mine[1] = high;
    mine[2] = low;
  }
  __syncthreads();
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    top = max(top, shared.bounds[w][0]);
    high = max(high, shared.bounds[w][1]);
    low = min(low, shared.bounds[w][2]);
  }
  if (!isinf(margin)) low = max(low, KeyOf(FloatOf(top) - margin));
  return {low, high};
}

// Where the running sum of the bins, from the last one down, reaches `wanted`; count 0: nowhere.
// Clears the bins.
__device__ void FindBin(int wanted, Shared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int each = kBins / static_cast<int>(blockDim.x);
  const int first = kBins - (static_cast<int>(threadIdx.x) + 1) * each;  // of this thread's bins
  int mine = 0;
  for (int i = 0; i < each; ++i) mine += shared.bins[first + i];
  int through = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, through, step);
    if (lane >= step) through += other;
  }
  if (lane == 31) shared.sums[warp][0] = through;
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
  int before = through - mine;
  for (int w = 0; w < warps; ++w) before += w < warp ? shared.sums[w][0] : 0;
  if (before < wanted && wanted <= before + mine) {
    int bin = first + each - 1;
    for (; before + shared.bins[bin] < wanted; --bin) before += shared.bins[bin];
    shared.digit = bin;
    shared.before = before;
    shared.count = shared.bins[bin];
  }
  for (int i = 0; i < each; ++i) shared.bins[first + i] = 0;
  __syncthreads();
}

// The cut that leaves c.wanted >= 1 candidates, or all where there are fewer.
__device__ Cut CutOf(const Candidates& c, const KeyRange& range, Shared& shared) {
  if (range.low > range.high) return {~0u, 0, 0};
  // Of key - low the digits from `shift` up are known to be `prefix`.
  const int bits = 32 - __clz(static_cast<int>(range.high - range.low));
  int known = bits, wanted = c.wanted;
  uint32_t prefix = 0;
  while (true) {
    const int shift = max(known - kDigitBits, 0);
    const uint32_t mask = (1u << (known - shift)) - 1;
    c.ForEach([&](int, uint32_t key, bool candidate) {
      const uint32_t value = key - range.low;
      if (!candidate || key < range.low) return;
      if (known < 32 && value >> known != prefix) return;
      atomicAdd(&shared.bins[value >> shift & mask], 1);
    });
    __syncthreads();
    FindBin(wanted, shared);
    if (shared.count == 0) return {range.low, 0, 0};  // fewer than wanted
    prefix = known < 32 ? prefix << (known - shift) : 0;
    prefix |= static_cast<uint32_t>(shared.digit);
    wanted -= shared.before;
    known = shift;
    if (shared.count == wanted) return {range.low + (prefix << shift), 0, 0};
    if (shift == 0) return {range.low + prefix + 1, range.low + prefix, wanted};
    // The next FindBin() writes what was read here only after a meeting.
  }
}

// Writes what `cut` leaves to `out`, in order. Returns how many.
__device__ int WriteChosen(const Candidates& c, const Cut& cut, int32_t* out, Shared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int above = 0, equal = 0;
  c.ForEach([&](int, uint32_t key, bool candidate) {
    above += candidate && key >= cut.from ? 1 : 0;
    equal += candidate && key == cut.key ? 1 : 0;
  });
  above = __reduce_add_sync(kAllLanes, above);
  equal = __reduce_add_sync(kAllLanes, equal);
  __syncthreads();  // all have read what FindBin() left
  if (lane == 0) {
    shared.sums[warp][0] = above;
    shared.sums[warp][1] = equal;
  }
  __syncthreads();
  int total_above = 0, total_equal = 0;
  above = equal = 0;  // of the warps before
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    above += w < warp ? shared.sums[w][0] : 0;
    equal += w < warp ? shared.sums[w][1] : 0;
    total_above += shared.sums[w][0];
    total_equal += shared.sums[w][1];
  }
  const unsigned before = (1u << lane) - 1;
  c.ForEach([&](int unit, uint32_t key, bool candidate) {
    const bool is_above = candidate && key >= cut.from, is_equal = candidate && key == cut.key;
    const unsigned aboves = __ballot_sync(kAllLanes, is_above);
    const unsigned equals = __ballot_sync(kAllLanes, is_equal);
    const int equals_before = equal + __popc(equals & before);
    if (is_above || (is_equal && equals_before < cut.equals)) {
      out[above + __popc(aboves & before) + min(equals_before, cut.equals)] = unit;
    }
    above += __popc(aboves);
    equal += __popc(equals);
  });
  return total_above + min(total_equal, cut.equals);
}

// Grid: lists.
__global__ void __launch_bounds__(kThreads) TopKKernel(const __grid_constant__ TopKParams p) {
  __shared__ Shared shared;
  const int list = static_cast<int>(blockIdx.x), row = list / p.kv_heads;
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += static_cast<int>(blockDim.x)) {
    shared.bins[i] = 0;
  }
  WaitForPriorKernels();
  LetNextKernelStart();
  if (p.slots[row] < 0) {
    if (threadIdx.x == 0) p.selected.counts[list] = 0;
    return;
  }
  const int units = p.positions[row] / p.unit_tokens + 1;
  const int begin = min(p.first_units, units), end = max(begin, units - p.last_units);
  const Candidates c = {p.scores + list * p.score_stride, units, begin, end,
                        p.k - begin - (units - end)};
  int32_t* const out = p.selected.units + int64_t{list} * p.selected.capacity;
  int chosen = 0;
  if (c.wanted > 0 && begin < end) {
    const Cut cut = CutOf(c, RangeOf(c, p.margin, shared), shared);
    chosen = WriteChosen(c, cut, out + begin, shared);
  }
  for (int i = static_cast<int>(threadIdx.x); i < begin; i += static_cast<int>(blockDim.x)) {
    out[i] = i;
  }
  for (int i = static_cast<int>(threadIdx.x); i < units - end; i += static_cast<int>(blockDim.x)) {
    out[begin + chosen + i] = end + i;
  }
  if (threadIdx.x == 0) p.selected.counts[list] = begin + chosen + units - end;
}

}  // namespace

cudaError_t LaunchTopK(const TopKParams& p, cudaStream_t stream) {
  if (p.first_units < 0 || p.last_units < 0 || p.k < p.first_units + p.last_units ||
      p.selected.capacity < p.k) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  // The split of an SM's memory that products have: changing it between kernels drains the SM.
  const cudaError_t error = cudaFuncSetAttribute(
      TopKKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  return LaunchKernel(TopKKernel, dim3(p.rows * p.kv_heads),
                      dim3(p.score_stride <= kShortList ? kShortThreads : kThreads), 0, stream, p);
}

}  // namespace sluice::kernels::cuda
