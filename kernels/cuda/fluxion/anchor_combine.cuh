// The pass over units and splits of AnchorStatistics: the numbers of heads but for their budgets.
#pragma once

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/fluxion/anchor_reduce.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kCombineThreads = 512;
inline constexpr int kCombineMaxDim = 256;

// Sums of some tokens' weighted values and weights, relative to the score `largest`.
struct CombinedPart {
  double largest = -INFINITY;
  double weight = 0;
};

// Adds up units [begin, end) of a head. The block's threads are as many slices of head_dim threads
// as there can be; a slice takes every so manyth unit. The sums go to values[head_dim].
__device__ __forceinline__ CombinedPart AddUnits(const AnchorStatisticsParams& p,
                                                 const AnchorLayout& layout, int head, int begin,
                                                 int end, double* values) {
  __shared__ double factors[kCombineThreads], of_slices[kCombineThreads];
  const int dim = p.cache.head_dim, thread = threadIdx.x;
  const int slices = kCombineThreads / dim, slice = thread / dim, d = thread % dim;
  const float* const peaks = AnchorArray<float>(p, layout.peaks) + int64_t{head} * layout.units;
  const float* const weights = AnchorArray<float>(p, layout.weights) + int64_t{head} * layout.units;
  const float* const of_units =
      AnchorArray<float>(p, layout.values) + int64_t{head} * layout.units * dim + d;
  float peak = -INFINITY;
  for (int u = begin + thread; u < end; u += kCombineThreads) peak = fmaxf(peak, peaks[u]);
  CombinedPart part;
  part.largest = double{AnchorBlockLargest(peak)};
  double weight = 0, sum = 0;
  for (int first = begin; first < end; first += kCombineThreads) {
    const int unit = first + thread, count = min(kCombineThreads, end - first);
    if (unit < end) {
      factors[thread] = exp(double{peaks[unit]} - part.largest);
      weight += factors[thread] * double{weights[unit]};
    }
    __syncthreads();
    if (slice < slices) {
#pragma unroll 8
      for (int i = slice; i < count; i += slices) {
        sum += factors[i] * double{of_units[int64_t{first + i} * dim]};
      }
    }
    __syncthreads();
  }
  part.weight = AnchorBlockSum(weight);
  of_slices[thread] = sum;
  __syncthreads();
  if (thread < dim) {
    double all = 0;
    for (int s = 0; s < slices; ++s) all += of_slices[s * dim + thread];
    values[thread] = all;
  }
  __syncthreads();
  return part;
}

// Returns an element of the output over two parts, or 0 where both are empty.
__device__ __forceinline__ double OutputOf(const CombinedPart& a, const CombinedPart& b,
                                           double of_a, double of_b) {
  const double largest = fmax(a.largest, b.largest);
  const double by_a = a.weight > 0 ? exp(a.largest - largest) : 0;
  const double by_b = b.weight > 0 ? exp(b.largest - largest) : 0;
  const double weight = by_a * a.weight + by_b * b.weight;
  return weight != 0 ? (by_a * of_a + by_b * of_b) / weight : 0;
}

// Adds up the moments of the splits of the cpu segment, which lie `stride` apart, and writes mean,
// variance, skewness and kurtosis of the values times `factor`.
__device__ __forceinline__ void CombineMoments(const AnchorMoments* of_splits, int stride,
                                               const FluxionSegments& segments, double factor,
                                               float* out) {
  const int first = segments.sink / kAnchorSplitTokens, count = CpuTokens(segments);
  const int end = count == 0 ? first : (segments.local - 1) / kAnchorSplitTokens + 1;
  const auto tokens_of = [&](int split) {
    const int begin = split * kAnchorSplitTokens;
    return static_cast<double>(min(segments.local, begin + kAnchorSplitTokens) -
                               max(segments.sink, begin));
  };
  double sum = 0;
  for (int s = first + static_cast<int>(threadIdx.x); s < end; s += kCombineThreads) {
    sum += tokens_of(s) * of_splits[int64_t{s} * stride].mean;
  }
  const double mean = count > 0 ? AnchorBlockSum(sum) / count : AnchorBlockSum(sum);
  AnchorMoments all;
  for (int s = first + static_cast<int>(threadIdx.x); s < end; s += kCombineThreads) {
    const AnchorMoments moved = Moved(of_splits[int64_t{s} * stride], tokens_of(s), mean);
    all.second += moved.second;
    all.third += moved.third;
    all.fourth += moved.fourth;
  }
  all.second = AnchorBlockSum(all.second);
  all.third = AnchorBlockSum(all.third);
  all.fourth = AnchorBlockSum(all.fourth);
  if (threadIdx.x != 0) return;
  for (int i = 0; i < 4; ++i) out[i] = 0;
  if (count == 0) return;
  const double variance = all.second / count;
  out[0] = static_cast<float>(mean * factor);
  out[1] = static_cast<float>(variance * factor * factor);
  if (!(variance * factor > 0)) return;
  out[2] = static_cast<float>(all.third / count / (variance * sqrt(variance)));
  out[3] = static_cast<float>(all.fourth / count / (variance * variance));
}

__device__ __forceinline__ void CombineKvHead(const AnchorStatisticsParams& p,
                                              const AnchorLayout& layout,
                                              const FluxionSegments& segments, int slot, int head) {
  const int dim = p.cache.head_dim, thread = threadIdx.x;
  float* const out = KvNumbers(p, slot, head);
  const float* const sums =
      AnchorArray<float>(p, layout.kv_sums) + int64_t{head} * layout.splits * 2 * dim;
  const AnchorMoments* const moments =
      AnchorArray<AnchorMoments>(p, layout.kv_moments) + int64_t{head} * layout.splits * 2;
  // Splits without tokens of the cpu segment have sums of 0.
  for (int i = 0; i < 2; ++i) {
    double sum = 0;
    if (thread < dim) {
#pragma unroll 8
      for (int s = 0; s < layout.splits; ++s) {
        sum += double{sums[(int64_t{s} * 2 + i) * dim + thread]};
      }
    }
    const double mean = sum / max(CpuTokens(segments), 1);
    if (i == 0 && thread < dim) out[kAnchorKvNumbers + thread] = static_cast<float>(mean);
    const double square = AnchorBlockSum(mean * mean);
    if (thread == 0) out[2 + i] = static_cast<float>(sqrt(square));
    CombineMoments(moments + i, 2, segments, 1, out + 4 + 4 * i);
  }
}

__device__ __forceinline__ void CombineHead(const AnchorStatisticsParams& p,
                                            const AnchorLayout& layout,
                                            const FluxionSegments& segments, int row, int head) {
  __shared__ double values[3][kCombineMaxDim];
  const int dim = p.cache.head_dim, thread = threadIdx.x;
  const bool has_element = thread < dim;
  float* const out = HeadNumbers(p, p.slots[row], head);
  const int bounds[4] = {0, segments.sink, segments.local, segments.end};
  CombinedPart parts[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int begin = bounds[i] / kAnchorUnitTokens;
    const int end =
        bounds[i] == bounds[i + 1] ? begin : (bounds[i + 1] - 1) / kAnchorUnitTokens + 1;
    parts[i] = AddUnits(p, layout, head, begin, end, values[i]);
    const double o = has_element && parts[i].weight != 0 ? values[i][thread] / parts[i].weight : 0;
    const double square = AnchorBlockSum(o * o);
    if (thread != 0) continue;
    out[4 + i] = static_cast<float>(parts[i].largest + log(parts[i].weight));
    out[7 + i] = static_cast<float>(sqrt(square));
  }
  // The default set counts as one part, relative to its own largest score.
  CombinedPart resident;
  resident.largest = fmax(parts[0].largest, parts[2].largest);
  double sum = 0;
#pragma unroll
  for (int i = 0; i < 3; i += 2) {
    const double by = parts[i].weight > 0 ? exp(parts[i].largest - resident.largest) : 0;
    resident.weight += by * parts[i].weight;
    if (has_element) sum += by * values[i][thread];
  }
  const double of_resident = has_element ? sum / resident.weight : 0;
  const double o = has_element ? OutputOf(resident, parts[1], sum, values[1][thread]) : 0;
  const double resident_square = AnchorBlockSum(of_resident * of_resident);
  const double square = AnchorBlockSum(o * o);
  if (has_element) AnchorArray<double>(p, layout.outputs)[int64_t{head} * dim + thread] = o;
  const float* const q = p.q + row * p.q_stride + int64_t{head} * dim;
  const double q_element = has_element ? double{q[thread]} : 0;
  const double q_square = AnchorBlockSum(q_element * q_element);
  if (has_element) out[kAnchorHeadNumbers + thread] = q[thread];
  const double length = sqrt(q_square * dim);
  CombineMoments(AnchorArray<AnchorMoments>(p, layout.z_moments) + int64_t{head} * layout.splits, 1,
                 segments, length > 0 ? 1 / length : 0, out);
  if (thread != 0) return;
  out[10] = static_cast<float>(sqrt(q_square));
  AnchorArray<AnchorOutput>(p, layout.heads)[head] = {fmax(resident.largest, parts[1].largest),
                                                      sqrt(square), sqrt(resident_square), 0};
}

// Blocks are the query heads, then the KV heads.
__global__ void __launch_bounds__(kCombineThreads)
    AnchorCombineKernel(const AnchorStatisticsParams p, int row) {
  WaitForPriorKernels();
  const int slot = p.slots[row], block = blockIdx.x;
  if (slot < 0) return;
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  const AnchorLayout layout = RowLayout(p, row);
  if (block < p.heads) {
    CombineHead(p, layout, segments, row, block);
  } else {
    CombineKvHead(p, layout, segments, slot, block - p.heads);
  }
}

}  // namespace sluice::kernels::cuda
