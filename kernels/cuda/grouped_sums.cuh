// The warpgroups of a grouped product that empty the rings: weights into registers, products, sums.
//
// e4m3 to bf16: 4 bits of exponent and 3 of mantissa are put where bf16 has the lowest bits of the
// one and the highest of the other; that is the value times 2^-120, subnormal or not, so that one
// product by a power of two makes it exact. The power takes the exponent of the block's scale
// along, also exactly; what is left of the scale, a factor in [1, 2), is kept out of the sums: a
// sum counts in units of the newest block's factor and is brought to the next one's before that is
// added. (The code 0x7F, NaN, counts as 480.)
#pragma once

#include <algorithm>

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/grouped_tile.cuh"
#include "kernels/cuda/tensor_copy.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sluice::kernels::cuda {
namespace {

// The scales of 32 steps of a warp's features, a lane having those of one step.
struct Scales {
  uint32_t power;  // bf16 twice: 2^120 and the scale's exponent; 0: the scale is 0
  float ratio;     // factor of the step before over that of this step
  float factor;    // the rest of the scale

  // `before`: the factor of the step before lane 0's.
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

// Two e4m3, times 2^-120, of a register whose lower half has them. As 16-bit integers with their
// sign they are shifted by 4: bit 15 is the sign then, bits 10 to 4 are the exponent and the
// mantissa.
__device__ __forceinline__ uint32_t WidenPair(uint32_t pair) {
  uint32_t integers;
  asm("prmt.b32 %0, %1, 0, 0x9180;" : "=r"(integers) : "r"(pair));
  return integers << 4 & 0x87F087F0u;
}

// A consumer's sums of 64 features of its warpgroup and kRows rows.
template <typename Weights, typename P, int kRows>
struct Consumer {
  Rings<P> rings;
  int feature;          // of the warp, inside the tile
  const float* scales;  // of the warp's features and the slice's first step
  Place<P::kWeightStages> w{};
  Place<P::kRowStages> x{};
  float sums[kRows / 2];

  // Returns once the stage's weights are there: the address of this lane's row for what follows.
  __device__ uint32_t AwaitWeights() const {
    WaitBarrier(rings.WeightsFull(w.stage), w.parity);
    const int lane = threadIdx.x % 32;
    return rings.Weights(w.stage) + (Weights::kIsFp8
                                         ? (feature + lane / 4) * 128 + lane / 4 * 16 + lane % 4 * 2
                                         : (feature + lane % 16) * 128);
  }
  // bf16: 16 of k, of 4 times 16 in a stage, of this warp's 16 features, as operand A.
  __device__ static void LoadPiece(uint32_t (&a)[4], uint32_t row, int piece) {
    LoadMatrices(a, row + ((2 * piece + threadIdx.x % 32 / 16) ^ (threadIdx.x % 8)) * 16);
  }
  // e4m3: 16 of k, of 8 times 16; two weights to a register. Piece i of row r is the row's i ^ r.
  __device__ static void LoadBytes(uint32_t (&raw)[4], uint32_t row, int piece) {
    const uint32_t at = row ^ piece * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint16_t pair;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(pair) : "r"(at + i % 2 * 1024 + i / 2 * 8));
      raw[i] = pair;
    }
  }
  __device__ static void MakeOperand(uint32_t (&a)[4], const uint32_t (&raw)[4], uint32_t power) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = MultiplyBf16(WidenPair(raw[i]), power);
  }
  __device__ void LeaveWeights() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive(rings.WeightsEmpty(w.stage));
    w.Advance();
  }
  __device__ void AwaitRows() const { WaitBarrier(rings.RowsFull(x.stage), x.parity); }
  __device__ void LeaveRows() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive(rings.RowsEmpty(x.stage));
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

  // The result: the factor in whose units the sums count.
  __device__ float AccumulateFp8(int steps) {
    // Products are begun kBatch at a time, their operands made together; two batches are kept.
    constexpr int kBatch = P::kBlocksPerProcessor == 3 ? (kRows <= 8 ? 2 : 1)
                           : kRows <= 64               ? 4
                           : kRows <= 80               ? 2
                                                       : 1;
    constexpr int kBatches = 8 / kBatch;
    const int lane = threadIdx.x % 32;
    float factor = 1;
    Scales mine{};
    for (int step = 0; step < steps; ++step) {
      const uint32_t row = AwaitWeights();
      uint32_t raw[kBatch][4], a[2][kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) LoadBytes(raw[i], row, i);
      if (step % 32 == 0) {
        mine = Scales::Of(step + lane < steps ? __ldg(scales + step + lane) : 1.0f, factor);
      }
      const uint32_t power = __shfl_sync(~0u, mine.power, step % 32);
      const float ratio = __shfl_sync(~0u, mine.ratio, step % 32);
      factor = __shfl_sync(~0u, mine.factor, step % 32);
      if (ratio != 1) {  // scales that are powers of two leave it at 1
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) sums[i] *= ratio;
      }
#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch) {
        if (batch >= 2) WaitForProducts<1>();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) MakeOperand(a[batch % 2][i], raw[i], power);
        if (batch + 1 < kBatches) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) LoadBytes(raw[i], row, (batch + 1) * kBatch + i);
        }
        if (batch == 0) AwaitRows();
        BeginProducts();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int piece = batch * kBatch + i;
          MultiplyAdd<kRows>(
              sums, a[batch % 2][i],
              TileDescriptor(rings.Rows(x.stage) + piece / 4 * P::kRowTileBytes) + piece % 4 * 2);
        }
        CommitProducts();
      }
      LeaveWeights();
      WaitForProducts<0>();
      LeaveRows();
    }
    return factor;
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

  // To out[kRows][kSumStride], a row's features next to each other.
  __device__ void Store(float* out) const {
    const int lane = threadIdx.x % 32;
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
