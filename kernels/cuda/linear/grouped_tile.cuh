// The work of a block of a grouped product, and the division of its shared memory and registers.
#pragma once

#include <algorithm>

#include "kernels/cuda/common/tensor_copy.cuh"
#include "kernels/cuda/common/warpgroup.cuh"
#include "kernels/cuda/linear/grouped_product.h"

namespace sluice::kernels::cuda {
namespace {

struct Fp8Weights {
  static constexpr bool kIsFp8 = true;
  static constexpr int kDepth = 128;  // k of a stage: 128 bytes of a row, the width of the swizzle
};
struct Bf16Weights {
  static constexpr bool kIsFp8 = false;
  static constexpr int kDepth = 64;
};

constexpr int kSliceFeatures = 128;  // features in a tile as Slices() counts tiles
constexpr int kMaxSlices = 8;        // blocks of a cluster
// one on a multiprocessor, with room for the next kernel's beside it
constexpr int kMinBlocks = 128;
constexpr int kAtOnce = 264;
constexpr int kGatherers = 96;

// Returns the number of slices of k. There are enough blocks to keep the memory busy; if they are
// more than run at one time, there are so many that the last ones do not run alone for long. The
// result depends on the matrix alone (see "Bits" in grouped_product.cuh).
inline int Slices(int tiles, int steps) {
  const auto is_even = [](int blocks) {
    const int turns = (blocks + kAtOnce - 1) / kAtOnce;
    return blocks * 100 >= turns * kAtOnce * 84;
  };
  int slices = 1;
  while (slices < kMaxSlices && tiles * slices < kMinBlocks && steps >= 4 * slices) slices *= 2;
  while (slices < kMaxSlices && tiles * slices > kAtOnce && !is_even(tiles * slices) &&
         steps >= 32 * slices) {
    slices *= 2;
  }
  return slices;
}

// The shared memory and the registers of a block of kWarpgroups consumers and up to kRows rows,
// of which kBlocks run on a multiprocessor.
template <typename Weights, int kRows, int kWarpgroups, int kBlocks>
struct TilePlan {
  static constexpr int kFeatures = 64 * kWarpgroups;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kBlocksPerProcessor = kBlocks;
  static constexpr int kWeightBytes = kFeatures * 128;
  static constexpr int kRowTileBytes = kRows * 128;  // 64 of k
  static constexpr int kRowTiles = Weights::kDepth / 64;
  static constexpr int kRowBytes = kRowTiles * kRowTileBytes;
  static constexpr int kRowStages = kRowBytes >= 16384 || kBlocksPerProcessor == 3 ? 3 : 4;
  static constexpr int kOtherBytes = kWarpgroups == 2 ? 1024 : 2048;
  static constexpr int kRingBudget =
      // 228 KiB in all, 1 KiB reserved per block
      (228 / kBlocksPerProcessor - 1) * 1024 - kOtherBytes;
  static constexpr int kWeightStages =
      std::min(8, (kRingBudget - kRowStages * kRowBytes) / kWeightBytes);
  static constexpr int kRowRing = kWeightStages * kWeightBytes;
  static constexpr int kRingBytes = kRowRing + kRowStages * kRowBytes;
  static constexpr int kSumStride = kFeatures + 4;  // keeps a quad's stores in different banks
  static constexpr int kBytes = kRingBytes + kOtherBytes;
  static_assert(kRows * kSumStride * 4 <= kRingBytes, "the sums take the ring's place");
  static_assert(16 * (kWeightStages + kRowStages) + 4 * kRows <= kOtherBytes, "what is left");
  // Registers of a consumer's thread and of the others', out of 64 Ki in all.
  static constexpr int kConsumerRegisters = kBlocksPerProcessor == 3   ? 64
                                            : kBlocksPerProcessor == 2 ? 96
                                                                       : 112;
  static constexpr int kLoaderRegisters = kBlocksPerProcessor == 3   ? 40
                                          : kBlocksPerProcessor == 2 ? 48
                                                                     : 32;
};

// A position in the order of all stages of a ring.
template <int kStages>
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Addresses in shared memory.
template <typename P>
struct Rings {
  uint32_t base;
  __device__ uint32_t Weights(int stage) const { return base + stage * P::kWeightBytes; }
  __device__ uint32_t Rows(int stage) const { return base + P::kRowRing + stage * P::kRowBytes; }
  __device__ uint32_t WeightsFull(int stage) const { return base + P::kRingBytes + stage * 16; }
  __device__ uint32_t WeightsEmpty(int stage) const { return WeightsFull(stage) + 8; }
  __device__ uint32_t RowsFull(int stage) const { return WeightsFull(P::kWeightStages + stage); }
  __device__ uint32_t RowsEmpty(int stage) const { return RowsFull(stage) + 8; }
};

// A block's work: features [feature, ..) of a group, over its slice of k.
struct TileWork {
  int group;
  int feature;     // first feature, within the group
  int first_step;  // in steps of kDepth
  int steps;
};

template <typename Weights, int kFeatures>
__device__ TileWork WorkOfBlock(const GroupedProduct& p) {
  const int tiles = (p.n + kFeatures - 1) / kFeatures;
  const int steps = (p.w.k + Weights::kDepth - 1) / Weights::kDepth;
  const int each = (steps + gridDim.x - 1) / gridDim.x;
  const int first = min(static_cast<int>(blockIdx.x) * each, steps);
  return {static_cast<int>(blockIdx.z) / tiles, static_cast<int>(blockIdx.z) % tiles * kFeatures,
          first, min(each, steps - first)};
}

// The rows of a group: entries [first, first + count) of the list of pairs, or rows of x.
struct RowRange {
  int first;
  int count;
};

__device__ __forceinline__ RowRange RowsOfGroup(const GroupedProduct& p, int group) {
  if (p.pairs == nullptr) return {0, p.rows};
  const int first = p.begins[group];
  return {first, p.begins[group + 1] - first};
}

__device__ __forceinline__ int RowAt(const GroupedProduct& p, RowRange range, int i) {
  return p.pairs == nullptr ? i : p.pairs[range.first + i];
}

constexpr int kConsumerBarrier = 1;

}  // namespace
}  // namespace sluice::kernels::cuda
