// The search for the budgets of AnchorStatistics: each block takes a level of a query head, sorts
// the blocks of the cpu segment by their scores, and walks over the prefixes of that order.
#pragma once

#include "kernels/cuda/common/float_keys.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/fluxion/anchor_reduce.cuh"
#include "kernels/e4m3.h"

namespace sluice::kernels::cuda {

inline constexpr int kWalkThreads = 256;  // one for each element of an output, at most
inline constexpr int kWalkWarps = kWalkThreads / 32;
// Prefixes are taken in turns of so many, so that the loads of a turn's values need not wait for
// one another.
inline constexpr int kWalkTurn = 16;
inline constexpr int kMostUnits = kFluxionLargestBlock / kAnchorUnitTokens;  // of a block

// Returns in every lane a query's score by one row of digests. All lanes call it.
__device__ __forceinline__ double RowScore(const float* q, const uint8_t* row, int dim,
                                           bool has_spread) {
  double pieces[kDigestPieces] = {}, spread = 0;
  for (int d = threadIdx.x % 32; d < dim; d += 32) {
    const double of_q = double{q[d]};
#pragma unroll
    for (int i = 0; i < kDigestPieces; ++i) {
      pieces[i] += of_q * double{E4M3ToFloat(row[i * dim + d])};
    }
    if (has_spread) spread += of_q * of_q * double{E4M3ToFloat(row[kDigestPieces * dim + d])};
  }
  double best = -INFINITY;
  for (const double piece : pieces) best = fmax(best, AnchorWarpSum(piece));
  if (!has_spread) return best;
  return best + double{kFluxionDeviations} * sqrt(fmax(AnchorWarpSum(spread), 0.0));
}

// Writes the keys of the blocks of the cpu segment at a level: the smallest has the highest score,
// and the lower block's is less among equals. Scores are rounded to float32, as those of
// LevelScores are.
__device__ __forceinline__ void PutKeys(const LevelDigests& digests,
                                        const FluxionSegments& segments, int level, const float* q,
                                        int dim, int slot, int kv_head, uint64_t* keys) {
  const bool has_spread = HasSpread(digests.of[0], dim);
  const int lane = threadIdx.x % 32;
  const int first = FirstBlock(segments, level), count = CpuBlocks(segments, level);
  for (int i = threadIdx.x / 32; i < count; i += kWalkWarps) {
    const DigestRows rows = RowsOfBlock(digests, segments, level, first + i);
    double best = -INFINITY;
    for (int row = rows.begin; row < rows.end; ++row) {
      const uint8_t* const digest = RowAt<uint8_t>(digests.of[rows.level], slot, row, kv_head);
      best = fmax(best, RowScore(q, digest, dim, has_spread));
    }
    if (lane == 0) {
      keys[i] =
          uint64_t{RankKey(static_cast<float>(best))} << 32 | static_cast<uint32_t>(first + i);
    }
  }
}

// Sorts keys [0, count) in rising order. This is a bitonic sort in which every comparison puts the
// smaller key first: the first step of a merge compares mirrored places. So keys that would pad the
// count to a power of 2, and be the largest, need not exist.
__device__ __forceinline__ void SortKeys(uint64_t* keys, int count) {
  int padded = 1;
  while (padded < count) padded *= 2;
  for (int size = 2; size <= padded; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < padded / 2; i += kWalkThreads) {
        const int in_step = i % step, low = (i - in_step) * 2 + in_step;
        const int high = step == size / 2 ? low - in_step + 2 * step - 1 - in_step : low + step;
        if (high >= count) continue;
        const uint64_t a = keys[low], b = keys[high];
        if (b < a) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// The inputs of a head's walk.
struct WalkHead {
  const float* peaks;    // [units]
  const float* weights;  // [units]
  const float* values;   // [units], head_dim apart: the thread's element
  double largest;        // score
  double o;              // the thread's element
  int dim;
};

// The thread's element of a sum of weighted values, and the sum of weights.
struct WalkSum {
  double value = 0, weight = 0;
};

__device__ __forceinline__ void AddToDefault(const WalkHead& head, int begin, int end,
                                             WalkSum& sum) {
  for (int t = begin; t < end; t += kAnchorUnitTokens) {
    const int unit = t / kAnchorUnitTokens;
    const double factor = exp(double{head.peaks[unit]} - head.largest);
    sum.weight += factor * double{head.weights[unit]};
    sum.value += factor * double{head.values[int64_t{unit} * head.dim]};
  }
}

// The factors and the weights of a turn's blocks, and the sums of squared errors over warps.
struct WalkShared {
  double factors[kWalkTurn * kMostUnits];
  double weights[kWalkTurn * kMostUnits];
  double errors[kWalkTurn][kWalkWarps];
  int wanted;
};

// Returns how many blocks of the order are in the shortest prefix from which on every longer one
// has a squared error of at most `limit`. The prefix of all blocks has none.
__device__ __forceinline__ int WalkPrefixes(const WalkHead& head, const uint64_t* order, int blocks,
                                            int level, int first_unit, WalkSum sum, double limit,
                                            WalkShared& shared) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int units = 1 << level;
  const bool has_element = thread < head.dim;
  if (thread == 0) shared.wanted = 0;
  for (int first = 0; first < blocks; first += kWalkTurn) {
    const int count = min(kWalkTurn, blocks - first);
    __syncthreads();
    if (thread < count * units) {
      const int block = static_cast<int>(static_cast<uint32_t>(order[first + thread / units]));
      const int unit = block * units + thread % units;
      const bool in_segment = unit >= first_unit;
      const double factor = in_segment ? exp(double{head.peaks[unit]} - head.largest) : 0;
      shared.factors[thread] = factor;
      shared.weights[thread] = in_segment ? factor * double{head.weights[unit]} : 0;
    }
    __syncthreads();
    double values[kWalkTurn];
#pragma unroll
    for (int j = 0; j < kWalkTurn; ++j) {
      values[j] = 0;
      if (j >= count || !has_element) continue;
      const int block = static_cast<int>(static_cast<uint32_t>(order[first + j]));
      const float* const of_block = head.values + int64_t{block} * units * head.dim;
      for (int u = max(first_unit - block * units, 0); u < units; ++u) {
        values[j] += shared.factors[j * units + u] * double{of_block[u * head.dim]};
      }
    }
#pragma unroll
    for (int j = 0; j < kWalkTurn; ++j) {
      if (j >= count) continue;
      const double off = has_element ? sum.value / sum.weight - head.o : 0;
      const double square = AnchorWarpSum(off * off);
      if (lane == 0) shared.errors[j][warp] = square;
      sum.value += values[j];
      for (int u = 0; u < units; ++u) sum.weight += shared.weights[j * units + u];
    }
    __syncthreads();
    if (thread < count) {
      double error = 0;
      for (int w = 0; w < kWalkWarps; ++w) error += shared.errors[thread][w];
      if (!(error <= limit)) atomicMax(&shared.wanted, first + thread + 1);
    }
  }
  __syncthreads();
  return shared.wanted;
}

// Blocks are (query head, level).
__global__ void __launch_bounds__(kWalkThreads)
    AnchorWalkKernel(const AnchorStatisticsParams p, int row) {
  __shared__ WalkShared shared;
  WaitForPriorKernels();
  const int slot = p.slots[row];
  if (slot < 0) return;
  const FluxionSegments segments = SegmentsOf(p.positions[row]);
  const AnchorLayout layout = RowLayout(p, row);
  const int head = blockIdx.x, level = blockIdx.y, thread = threadIdx.x, dim = p.cache.head_dim;
  const AnchorOutput* const outputs = AnchorArray<AnchorOutput>(p, layout.heads);
  double largest = 0, resident = 0;
  for (int h = 0; h < p.heads; ++h) {
    largest = fmax(largest, outputs[h].length);
    resident = fmax(resident, outputs[h].resident);
  }
  if (head == 0 && level == 0 && thread == 0) {
    p.anchors.resident[slot] = static_cast<float>(resident);
  }
  float* const out = HeadNumbers(p, slot, head) + 11 + level;
  const int blocks = CpuBlocks(segments, level);
  if (blocks == 0) {
    if (thread == 0) *out = 0;
    return;
  }
  uint64_t* const order = AnchorArray<uint64_t>(p, layout.order) + int64_t{head} * layout.blocks +
                          AnchorBlocksBefore(layout.units, level);
  PutKeys(p.digests, segments, level, p.q + row * p.q_stride + int64_t{head} * dim, dim, slot,
          head / (p.heads / p.cache.kv_heads), order);
  SortKeys(order, blocks);

  const int64_t units_before = int64_t{head} * layout.units;
  const int element = min(thread, dim - 1);
  const WalkHead of_head = {AnchorArray<float>(p, layout.peaks) + units_before,
                            AnchorArray<float>(p, layout.weights) + units_before,
                            AnchorArray<float>(p, layout.values) + units_before * dim + element,
                            outputs[head].largest,
                            AnchorArray<double>(p, layout.outputs)[int64_t{head} * dim + element],
                            dim};
  WalkSum sum;
  AddToDefault(of_head, 0, segments.sink, sum);
  AddToDefault(of_head, segments.local, segments.end, sum);
  const double bound = double{p.tau} * largest;
  const int wanted = WalkPrefixes(of_head, order, blocks, level, segments.sink / kAnchorUnitTokens,
                                  sum, bound * bound, shared);
  if (thread != 0) return;
  const double tokens = static_cast<double>(wanted) * LevelTokens(level);
  *out = wanted == 0 ? 0 : static_cast<float>(fmin(1.0, tokens / CpuTokens(segments)));
}

}  // namespace sluice::kernels::cuda
