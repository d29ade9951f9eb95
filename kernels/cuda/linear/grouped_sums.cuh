// The warpgroups of a grouped product that empty the rings: weights into registers, products,
// sums.
//
// The conversion of e4m3 to bf16 puts the 4 bits of the exponent and 3 of the mantissa where bf16
// has the lowest bits of the exponent and the highest of the mantissa. That is the value times
// 2^-120, subnormal or not, so that one product by a power of two makes it exact. The power
// includes the exponent of the block's scale, also exactly. The rest of the scale, a factor in
// [1, 2), is kept out of the sums: a sum counts in units of the newest block's factor and is
// converted to the next one's before that is added. (The code 0x7F, NaN, counts as 480.)
#pragma once

#include <algorithm>

#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/tensor_copy.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/linear/grouped_tile.cuh"

namespace sluice::kernels::cuda {
namespace {

// The scales of 32 steps of a warp's features. A lane has those of one step.
struct Scales {
  uint32_t power;    // bf16 twice: 2^120 and the scale's exponent; 0 if the scale is 0
  float ratio;       // factor of the step before over that of this step
  float factor = 1;  // the rest of the scale

  // Returns the parts of `scale`. `before` is the factor of the step before lane 0's.
  __device__ static Scales Of(float scale, float before) {
    constexpr int kLeast = -100, kMost = 7;  // 448 * 2^7 and 2^-9 * 2^-100 are normal bf16
    const int biased = __float_as_uint(scale) >> 23 & 0xFF;
    const int exponent = min(max(biased - 127, kLeast), kMost);
    Scales s;
    const bool is_zero = scale == 0;
    s.power = is_zero ? 0 : static_cast<uint32_t>(120 + 127 + exponent) * 0x00800080u;
    s.factor =
        is_zero ? 1.0f : scale * __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
    const float previous = __shfl_up_sync(~0u, s.factor, 1);
    s.ratio = (threadIdx.x % 32 == 0 ? before : previous) / s.factor;
    return s;
  }
};

__device__ __forceinline__ uint32_t MultiplyBf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Converts two e4m3 of the lower or the upper half of a register, times 2^-120. As 16-bit
// integers with their sign they are shifted by 4: then bit 15 is the sign, and bits 10 to 4 are
// the exponent and the mantissa.
template <int kHalf>
__device__ __forceinline__ uint32_t WidenPair(uint32_t pairs) {
  uint32_t integers;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(integers) : "r"(pairs), "n"(kHalf == 0 ? 0x9180 : 0xB3A2));
  return integers << 4 & 0x87F087F0u;
}

// A consumer's sums of 64 features of its warpgroup and kRows rows.
template <typename Weights, typename P, int kRows>
struct Consumer {
  Rings<P> rings;
  int feature;  // first feature of the warp, inside the tile
  int lane;
  const float* scales;  // scales of the warp's features from the slice's first step on
  Place<P::kWeightStages> w{};
  Place<P::kRowStages> x{};
  float ahead = 1;  // the scale of one of the next 32 steps, by lane
  float sums[kRows / 2];

  // Begins to load the scales of 32 steps from `step` on. They are asked for early, because the
  // memory is busy with everything else when they are needed.
  __device__ void AskForScales(int step, int steps) {
    const int mine = step + lane;
    ahead = mine < steps ? __ldg(scales + mine) : 1.0f;
  }

  // Waits until the stage's weights have arrived, and returns the address of this lane's row for
  // the loads below.
  __device__ uint32_t AwaitWeights() const {
    WaitBarrier(rings.WeightsFull(w.stage), w.parity);
    const uint32_t at = rings.Weights(w.stage) + (feature + lane % 16) * 128;
    return Weights::kIsFp8 ? at + (lane / 16 ^ lane % 8) * 16 : at;
  }
  // Loads one of a stage's 4 pieces of bf16 weights, 16 of k by this warp's 16 features, as
  // operand A.
  __device__ static void LoadPiece(uint32_t (&a)[4], uint32_t row, int piece) {
    LoadMatrices(a, row + ((2 * piece + threadIdx.x % 32 / 16) ^ (threadIdx.x % 8)) * 16);
  }
  // Loads two pieces of e4m3 weights, twice 16 of k; a stage has 4 such pairs. A register has the
  // four weights of a row that a lane contributes to both halves of an operand (kFp8Pairs): rows
  // 0-7 and 8-15, then the same 16 further in k.
  __device__ static void LoadPairs(uint32_t (&raw)[4], uint32_t row, int two) {
    LoadMatrices(raw, row ^ two * 32);
  }
  // Makes the operand of one of the two pieces.
  __device__ static void MakeOperand(uint32_t (&a)[4], const uint32_t (&raw)[4], int which,
                                     uint32_t power) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[i] = MultiplyBf16(WidenPair<0>(raw[2 * which + i]), power);
      a[2 + i] = MultiplyBf16(WidenPair<1>(raw[2 * which + i]), power);
    }
  }
  __device__ void LeaveWeights() {
    __syncwarp();
    if (lane == 0) Arrive(rings.WeightsEmpty(w.stage));
    w.Advance();
  }
  __device__ void AwaitRows() const { WaitBarrier(rings.RowsFull(x.stage), x.parity); }
  __device__ void LeaveRows() {
    __syncwarp();
    if (lane == 0) Arrive(rings.RowsEmpty(x.stage));
    x.Advance();
  }

  __device__ void AccumulateBf16(int steps) {
    constexpr int kUnderWay = kRows <= 64 ? 4 : 2;  // pieces whose products are not done
    for (int step = 0; step < steps; ++step) {
      uint32_t a[kUnderWay][4];
      const uint32_t row = AwaitWeights();
      AwaitRows();
      const uint64_t b = TileDescriptor(rings.Rows(x.stage));
#pragma unroll
      for (int first = 0; first < 4; first += kUnderWay) {
        if (first > 0) WaitForProducts<0>();
#pragma unroll
        for (int i = 0; i < kUnderWay; ++i) LoadPiece(a[i], row, first + i);
        BeginProducts();
#pragma unroll
        for (int i = 0; i < kUnderWay; ++i) {
          MultiplyAdd<kRows>(sums, a[i], b + 2 * (first + i));
        }
        CommitProducts();
      }
      LeaveWeights();
      WaitForProducts<0>();
      LeaveRows();
    }
  }

  // Accumulates all steps. Returns the factor in whose units the sums count.
  __device__ float AccumulateFp8(int steps) {
    // Products are started kBatch at a time, and their operands are made together. Two batches
    // are kept, so that one is made, across steps too, while the products of the other are under
    // way.
    constexpr int kBatch = P::kBlocksPerProcessor == 3 ? (kRows <= 8 ? 2 : 1)
                           : kRows <= 64               ? 4
                           : kRows <= 80               ? 2
                                                       : 1;
    constexpr int kBatches = 8 / kBatch;
    constexpr int kLoads = std::max(1, kBatch / 2);  // loads at a time, of 2 pieces each
    uint32_t raw[kLoads][4], a[2][kBatch][4];
    uint32_t row = 0, power = 0;
    float ratio = 1;
    Scales mine{};
    const auto load = [&](int piece) {  // loads the weights of `piece`, and those that come with it
      if (piece % (2 * kLoads) != 0) return;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) LoadPairs(raw[i], row, piece / 2 + i);
    };
    const auto make = [&](int batch) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int piece = batch * kBatch + i;
        MakeOperand(a[batch % 2][i], raw[piece / 2 % kLoads], piece % 2, power);
      }
    };
    const auto load_first = [&] {
      row = AwaitWeights();
      load(0);
    };
    const auto take_scale = [&](int step) {
      if (step % 32 == 0) {
        mine = Scales::Of(ahead, __shfl_sync(~0u, mine.factor, 31));
        // after the last step, from 0 for the next tile of rows
        AskForScales(step + 32 < steps ? step + 32 : 0, steps);
      }
      power = __shfl_sync(~0u, mine.power, step % 32);
      ratio = __shfl_sync(~0u, mine.ratio, step % 32);
    };
    if (steps == 0) return 1;
    load_first();
    take_scale(0);
    make(0);
    load(kBatch);
    bool are_there = false;
    for (int step = 0; step < steps; ++step) {
      const bool is_last = step + 1 == steps;
      if (ratio != 1) {  // scales that are powers of two leave it at 1
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) sums[i] *= ratio;
      }
      if (!are_there) AwaitRows();
      const uint64_t b = TileDescriptor(rings.Rows(x.stage));
#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch) {
        BeginProducts();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int piece = batch * kBatch + i;
          MultiplyAdd<kRows>(sums, a[batch % 2][i],
                             b + (piece / 4 * P::kRowTileBytes / 16 + piece % 4 * 2));
        }
        CommitProducts();
        if (batch > 0) WaitForProducts<1>();
        if (batch + 1 < kBatches) {
          make(batch + 1);
          if (batch + 2 < kBatches) {
            load((batch + 2) * kBatch);
          } else {
            LeaveWeights();
            if (!is_last) {
              load_first();
              take_scale(step + 1);
            }
          }
        } else if (!is_last) {
          make(0);
          load(kBatch);
        }
      }
      const Place<P::kRowStages> left = x;
      x.Advance();
      are_there = !is_last && TestBarrier(rings.RowsFull(x.stage), x.parity);
      WaitForProducts<0>();
      __syncwarp();
      if (lane == 0) Arrive(rings.RowsEmpty(left.stage));
    }
    return __shfl_sync(~0u, mine.factor, (steps - 1) % 32);
  }

  __device__ void Accumulate(int steps) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] = 0;
    if constexpr (Weights::kIsFp8) {
      const float factor = AccumulateFp8(steps);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) sums[i] *= factor;
    } else {
      AccumulateBf16(steps);
    }
  }

  // Writes out[kRows][kSumStride], a row's features next to each other.
  __device__ void Store(float* out) const {
    const int mine = feature + lane / 4;
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) {
      const int row = j / 4 * 8 + lane % 4 * 2 + j % 2;
      out[row * P::kSumStride + mine + j / 2 % 2 * 8] = sums[j];
    }
  }
};

}  // namespace
}  // namespace sluice::kernels::cuda
