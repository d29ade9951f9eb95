// y = x W^T on tensor cores for few rows and many weights, each read once: the body of
// grouped_product_fp8.cu and grouped_product_bf16.cu.
//
// A block owns a tile of 64 features for each of its consumer warpgroups and one slice of k. One
// thread keeps a ring of W tiles filled by tensor copies; x has a ring of its own, filled by
// another thread in the same way, or where rows are gathered by three warps with copies of 16
// bytes. The consumers read their features from the ring of W as operand A in registers (e4m3
// becomes bf16 on the way) and multiply by x, operand B in shared memory. The blocks of a cluster
// are the slices of one tile; they add their sums up through each other's shared memory, in order
// of k.
//
// e4m3 to bf16: 4 bits of exponent and 3 of mantissa are put where bf16 has the lowest bits of the
// one and the highest of the other; that is the value times 2^-120, subnormal or not, so that one
// product by a power of two makes it exact. The power takes the exponent of the block's scale
// along, also exactly; what is left of the scale, a factor in [1, 2), is kept out of the sums: a
// sum counts in units of the newest block's factor and is brought to the next one's before that is
// added. (The code 0x7F, NaN, counts as 480.)
//
// Bits: 16 values of k at a time in order, Slices() slices, added in order, then the bias, then
// what y held. The number of rows decides only which instance computes them.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/grouped_product.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_copy.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/vectors.cuh"
#include "kernels/cuda/wgmma.cuh"

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

constexpr int kSliceFeatures = 128;  // what Slices() counts tiles in
constexpr int kMaxSlices = 8;        // blocks of a cluster
constexpr int kMinBlocks = 192;      // of kAtOnce that the device runs at one time
constexpr int kAtOnce = 264;
constexpr int kGatherers = 96;
constexpr int kFewRows = 0;  // so many leave room for three blocks on a multiprocessor

// Slices of k: enough blocks to keep the memory busy; where they are more than run at one time, so
// many that the last ones do not run alone for long. Of the matrix alone (bits, above).
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

// The shared memory and the registers of a block of kWarpgroups consumers, up to kRows rows.
template <typename Weights, int kRows, int kWarpgroups>
struct TilePlan {
  static constexpr int kFeatures = 64 * kWarpgroups;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kBlocksPerProcessor = kWarpgroups > 2 ? 1 : kRows > kFewRows ? 2 : 3;
  static constexpr int kWeightBytes = kFeatures * 128;
  static constexpr int kRowTileBytes = kRows * 128;  // 64 of k
  static constexpr int kRowTiles = Weights::kDepth / 64;
  static constexpr int kRowBytes = kRowTiles * kRowTileBytes;
  static constexpr int kRowStages = kRowBytes >= 16384 || kBlocksPerProcessor == 3 ? 3 : 4;
  static constexpr int kOtherBytes = kWarpgroups == 2 ? 1024 : 2048;
  static constexpr int kRingBudget =
      (228 / kBlocksPerProcessor - 1) * 1024 - kOtherBytes;  // of 228 KiB, 1 KiB a block
  static constexpr int kWeightStages =
      std::min(8, (kRingBudget - kRowStages * kRowBytes) / kWeightBytes);
  static constexpr int kRowRing = kWeightStages * kWeightBytes;
  static constexpr int kRingBytes = kRowRing + kRowStages * kRowBytes;
  static constexpr int kSumStride = kFeatures + 4;  // keeps a quad's stores in different banks
  static constexpr int kBytes = kRingBytes + kOtherBytes;
  static_assert(kRows * kSumStride * 4 <= kRingBytes, "the sums take the ring's place");
  static_assert(16 * (kWeightStages + kRowStages) + 8 * kRows <= kOtherBytes, "what is left");
  // Registers of a consumer's thread and of the others', of 64 Ki in all.
  static constexpr int kConsumerRegisters = kBlocksPerProcessor == 3   ? 64
                                            : kBlocksPerProcessor == 2 ? 96
                                                                       : 112;
  static constexpr int kLoaderRegisters = kBlocksPerProcessor == 3   ? 40
                                          : kBlocksPerProcessor == 2 ? 48
                                                                     : 32;
};

// A ring's place in the order of all its stages.
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

// What a block computes: features [feature, ..) of a group, over its slice of k.
struct TileWork {
  int group;
  int feature;     // of the group
  int first_step;  // of kDepth
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

__device__ __forceinline__ void SyncThreads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
constexpr int kGathererBarrier = 1;
constexpr int kConsumerBarrier = 2;

// The thread that copies W.
template <typename Weights, typename P>
struct WeightCopier {
  Rings<P> rings;
  const CUtensorMap* map;
  TileWork work;
  int row;  // of the stack
  Place<P::kWeightStages> place{};

  __device__ void Copy(int step) {
    ArriveExpecting(rings.WeightsFull(place.stage), P::kWeightBytes);
    CopyTile(rings.Weights(place.stage), map, (work.first_step + step) * Weights::kDepth, row,
             rings.WeightsFull(place.stage), kEvictFirst);
    place.Advance();
  }

  // W is constant: what fits is asked for while the kernels before this one still run.
  __device__ int CopyEarly() {
    const int early = min(P::kWeightStages, work.steps);
    for (int step = 0; step < early; ++step) Copy(step);
    return early;
  }

  // The rest of a round of all steps. A stage is free at first, and when its consumers have said
  // so.
  __device__ void CopyFrom(int step) {
    for (; step < work.steps; ++step) {
      WaitBarrier(rings.WeightsEmpty(place.stage), place.parity ^ 1);
      Copy(step);
    }
  }

  // No block ends before its copies.
  __device__ void AwaitEarly(int early) const {
    for (int stage = 0; stage < early; ++stage) WaitBarrier(rings.WeightsFull(stage), 0);
  }
};

// The thread that copies tiles of x where its rows lie in order.
template <typename Weights, typename P, int kRows>
struct RowCopier {
  Rings<P> rings;
  const CUtensorMap* map;
  int first_column;
  Place<P::kRowStages> place{};

  __device__ void Copy(int first_row, int steps) {
    for (int step = 0; step < steps; ++step) {
      WaitBarrier(rings.RowsEmpty(place.stage), place.parity ^ 1);
      const uint32_t full = rings.RowsFull(place.stage);
      ArriveExpecting(full, P::kRowBytes);
#pragma unroll
      for (int tile = 0; tile < P::kRowTiles; ++tile) {
        CopyTile(rings.Rows(place.stage) + tile * P::kRowTileBytes, map,
                 first_column + step * Weights::kDepth + tile * 64, first_row, full, kEvictLast);
      }
      place.Advance();
    }
  }
};

// One of the threads that gather rows of x, 16 bytes at a time.
template <typename Weights, typename P, int kRows>
struct RowGatherer {
  static constexpr int kRowsAtOnce = kGatherers / 8;

  const GroupedProduct& p;
  Rings<P> rings;
  const int64_t* offsets;  // in shared memory: of each row of x in elements; -1: none
  int first_k;
  int thread;
  Place<P::kRowStages> place{};

  __device__ void Copy(int steps) {
    const int piece = thread % 8;  // of the 8 of a row of a tile, swizzled over its 128 bytes
    for (int step = 0; step < steps; ++step) {
      WaitBarrier(rings.RowsEmpty(place.stage), place.parity ^ 1);
      const uint32_t stage = rings.Rows(place.stage);
      const int k = first_k + step * Weights::kDepth + piece * 8;
      for (int row = thread / 8; row < kRows; row += kRowsAtOnce) {
        const int64_t offset = offsets[row];
        if (offset < 0) break;  // none after it either
        const uint32_t target = stage + row * 128 + (piece ^ (row % 8)) * 16;
#pragma unroll
        for (int tile = 0; tile < P::kRowTiles; ++tile) {
          const bool exists = k + tile * 64 < p.w.k;
          CopyPiece(target + tile * P::kRowTileBytes, p.x + offset + (exists ? k + tile * 64 : 0),
                    exists ? 16 : 0);
        }
      }
      ArriveWithCopies(rings.RowsFull(place.stage));
      place.Advance();
    }
  }

  // `bytes` of 16, and zeros after them.
  __device__ static void CopyPiece(uint32_t target, const uint16_t* source, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(bytes)
                 : "memory");
  }
  // Arrives once this thread's copies so far are done.
  __device__ static void ArriveWithCopies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  }
};

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

// Four e4m3, times 2^-120: bytes 0 and 2, then bytes 1 and 3.
__device__ __forceinline__ uint32_t EvenBytes(uint32_t v) {
  return (v << 8 & 0x80008000u) | (v << 4 & 0x07F007F0u);
}
__device__ __forceinline__ uint32_t OddBytes(uint32_t v) {
  return (v & 0x80008000u) | (v >> 4 & 0x07F007F0u);
}

// A consumer's sums of 64 features of its warpgroup and kRows rows.
template <typename Weights, typename P, int kRows>
struct Consumer {
  Rings<P> rings;
  int feature;          // of the warp, inside the tile
  const float* scales;  // of the warp's features and the slice's first step
  bool gathered;        // x
  Place<P::kWeightStages> w{};
  Place<P::kRowStages> x{};
  float sums[kRows / 2];

  // Returns once the stage's weights are there: the address of this lane's row for what follows.
  __device__ uint32_t AwaitWeights() const {
    WaitBarrier(rings.WeightsFull(w.stage), w.parity);
    const int lane = threadIdx.x % 32;
    return rings.Weights(w.stage) + (Weights::kIsFp8 ? (feature + lane / 4) * 128 + lane % 4 * 2
                                                     : (feature + lane % 16) * 128);
  }
  // bf16: 16 of k, of 4 times 16 in a stage, of this warp's 16 features, as operand A.
  __device__ static void LoadPiece(uint32_t (&a)[4], uint32_t row, int piece) {
    LoadMatrices(a, row + ((2 * piece + threadIdx.x % 32 / 16) ^ (threadIdx.x % 8)) * 16);
  }
  // e4m3: 16 of k, of 8 times 16; two weights to a register.
  __device__ static void LoadBytes(uint32_t (&raw)[4], uint32_t row, int piece) {
    const uint32_t at = row + (piece ^ (threadIdx.x % 32 / 4)) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint16_t pair;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(pair) : "r"(at + i % 2 * 1024 + i / 2 * 8));
      raw[i] = pair;
    }
  }
  // Bytes 0 and 2 are neighbours in k, and bytes 1 and 3, 8 further.
  __device__ static void MakeOperand(uint32_t (&a)[4], const uint32_t (&raw)[4], uint32_t power) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t four = __byte_perm(raw[half], raw[half + 2], 0x5140);
      a[half] = MultiplyBf16(EvenBytes(four), power);
      a[half + 2] = MultiplyBf16(OddBytes(four), power);
    }
  }
  __device__ void LeaveWeights() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive(rings.WeightsEmpty(w.stage));
    w.Advance();
  }
  __device__ void AwaitRows() const {
    WaitBarrier(rings.RowsFull(x.stage), x.parity);
    if (gathered) PublishToAsyncProxy();  // what other threads wrote
  }
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
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) sums[i] *= ratio;
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

__device__ __forceinline__ float4 Sum(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Adds up the cluster's sums, in order of k, for this block's share of the features of `count` rows
// from entry `first` of the range on.
template <typename P>
__device__ void StoreRows(const GroupedProduct& p, const TileWork& work, RowRange range, int first,
                          int count, uint32_t sums) {
  constexpr int kItems = 4;  // of a thread under way
  const int slices = gridDim.x;
  const int quads = P::kFeatures / 4 / slices;
  const int items = count * quads;
  for (int begin = threadIdx.x; begin < items; begin += kItems * P::kConsumers) {
    float4 sum[kItems];
    uint32_t at[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int item = min(begin + j * P::kConsumers, items - 1);
      const int quad = blockIdx.x * quads + item % quads;
      at[j] = sums + (item / quads * P::kSumStride + quad * 4) * 4;
      sum[j] = LoadFromBlock(at[j], 0);
    }
    for (int slice = 1; slice < slices; ++slice) {
      float4 part[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) part[j] = LoadFromBlock(at[j], slice);
#pragma unroll
      for (int j = 0; j < kItems; ++j) sum[j] = Sum(sum[j], part[j]);
    }
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int item = begin + j * P::kConsumers;
      const int feature = work.feature + (blockIdx.x * quads + item % quads) * 4;
      if (item >= items || feature >= p.n) continue;
      if (p.bias != nullptr) {
        const float* bias = p.bias + feature;
        sum[j] = Sum(sum[j], {bias[0], bias[1], bias[2], bias[3]});
      }
      const int64_t place = RowAt(p, range, first + item / quads) * p.y_stride +
                            work.group * p.y_group_stride + feature;
      if (p.y_type == DType::kFloat32) {
        float4* y = reinterpret_cast<float4*>(static_cast<float*>(p.y) + place);
        *y = p.accumulate ? Sum(sum[j], *y) : sum[j];
      } else {
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.y) + place) =
            make_uint2(PackBf16(sum[j].x, sum[j].y), PackBf16(sum[j].z, sum[j].w));
      }
    }
  }
}

template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Grid: (slices of k, tiles of rows, groups x tiles of features); a cluster is the slices of one
// tile. Blocks take every gridDim.y-th tile of rows of their group. `early`: W is asked for before
// it is known whether the group has rows.
template <typename Weights, int kRows, int kWarpgroups>
__global__ void __launch_bounds__(TilePlan<Weights, kRows, kWarpgroups>::kThreads,
                                  TilePlan<Weights, kRows, kWarpgroups>::kBlocksPerProcessor)
    TiledProduct(const __grid_constant__ CUtensorMap w_map,
                 const __grid_constant__ CUtensorMap x_map, const GroupedProduct p, bool early,
                 bool by_map) {
  using P = TilePlan<Weights, kRows, kWarpgroups>;
  extern __shared__ __align__(1024) unsigned char shared[];
  LetNextKernelStart();
  const Rings<P> rings = {SharedAddress(shared)};
  int64_t* const offsets =
      reinterpret_cast<int64_t*>(shared + P::kRingBytes + 16 * (P::kWeightStages + P::kRowStages));
  const TileWork work = WorkOfBlock<Weights, P::kFeatures>(p);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == P::kConsumers) {
    PrefetchMap(&w_map);
    if (by_map) PrefetchMap(&x_map);
    for (int stage = 0; stage < P::kWeightStages; ++stage) {
      InitBarrier(rings.WeightsFull(stage), 1);
      InitBarrier(rings.WeightsEmpty(stage), kWarpgroups * 4);
    }
    for (int stage = 0; stage < P::kRowStages; ++stage) {
      InitBarrier(rings.RowsFull(stage), by_map ? 1 : kGatherers);
      InitBarrier(rings.RowsEmpty(stage), kWarpgroups * 4);
    }
    PublishBarriers();
  }
  __syncthreads();  // the barriers exist
  if (warp >= kWarpgroups * 4) {
    GiveRegisters<P::kLoaderRegisters>();
    if (warp == kWarpgroups * 4) {
      const bool copies = threadIdx.x % 32 == 0;
      WeightCopier<Weights, P> copier = {rings, &w_map, work, work.group * p.n + work.feature};
      int begun = 0;
      if (copies && early) begun = copier.CopyEarly();
      WaitForPriorKernels();
      const RowRange range = RowsOfGroup(p, work.group);
      for (int tile = blockIdx.y; tile * kRows < range.count; tile += gridDim.y) {
        if (copies) copier.CopyFrom(begun);
        begun = 0;
        __syncwarp();
        SyncCluster();
        SyncCluster();
      }
      if (copies && range.count <= static_cast<int>(blockIdx.y) * kRows) copier.AwaitEarly(begun);
    } else {
      const int thread = threadIdx.x - P::kConsumers - 32;
      WaitForPriorKernels();
      const RowRange range = RowsOfGroup(p, work.group);
      const int first_k = work.first_step * Weights::kDepth;
      RowCopier<Weights, P, kRows> copier = {
          rings, &x_map, work.group * static_cast<int>(p.x_group_stride) + first_k};
      RowGatherer<Weights, P, kRows> gatherer = {p, rings, offsets, first_k, thread};
      for (int tile = blockIdx.y; tile * kRows < range.count; tile += gridDim.y) {
        if (by_map) {
          if (thread == 0) copier.Copy(tile * kRows, work.steps);
        } else {
          for (int row = thread; row < kRows; row += kGatherers) {
            const int i = tile * kRows + row;
            const int64_t x_row = i < range.count ? RowAt(p, range, i) / p.pairs_per_row : 0;
            offsets[row] =
                i < range.count ? x_row * p.x_stride + work.group * p.x_group_stride : -1;
          }
          SyncThreads(kGathererBarrier, kGatherers);
          gatherer.Copy(work.steps);
        }
        __syncwarp();
        SyncCluster();
        SyncCluster();
      }
    }
  } else {
    TakeRegisters<P::kConsumerRegisters>();
    WaitForPriorKernels();
    const RowRange range = RowsOfGroup(p, work.group);
    Consumer<Weights, P, kRows> consumer;
    consumer.rings = rings;
    consumer.feature = warp * 16;
    consumer.gathered = !by_map;
    const int row = min(work.group * p.n + work.feature + warp * 16, p.w.n - 1);
    consumer.scales = p.w.scales +
                      row / kFp8BlockRows * ((p.w.k + kFp8BlockColumns - 1) / kFp8BlockColumns) +
                      work.first_step;
    for (int tile = blockIdx.y; tile * kRows < range.count; tile += gridDim.y) {
      consumer.Accumulate(work.steps);
      SyncThreads(kConsumerBarrier, P::kConsumers);  // the rings have been read
      consumer.Store(reinterpret_cast<float*>(shared));
      SyncCluster();
      StoreRows<P>(p, work, range, tile * kRows, min(kRows, range.count - tile * kRows),
                   rings.base);
      PublishToAsyncProxy();  // what comes into the rings next
      SyncCluster();
    }
  }
}

template <typename Weights, int kRows, int kWarpgroups>
cudaError_t LaunchTiles(const GroupedProduct& p, cudaStream_t stream) {
  using P = TilePlan<Weights, kRows, kWarpgroups>;
  const auto kernel = TiledProduct<Weights, kRows, kWarpgroups>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes);
  CUtensorMap w_map, x_map{};
  if (error == cudaSuccess) {
    error = MakeTileMap(p.w.data, p.w.n, p.w.k, P::kFeatures, &w_map,
                        Weights::kIsFp8 ? DType::kFloat8E4M3 : DType::kBFloat16);
  }
  // A tile of x must not reach into the next group's columns.
  const bool by_map = p.pairs == nullptr && (p.groups == 1 || p.w.k % Weights::kDepth == 0);
  if (error == cudaSuccess && by_map) {
    const int64_t columns = (p.groups - 1) * p.x_group_stride + p.w.k;
    error = MakeTileMap(p.x, p.rows, static_cast<int32_t>(columns), kRows, &x_map, DType::kBFloat16,
                        p.x_stride);
  }
  if (error != cudaSuccess) return error;
  const int steps = (p.w.k + Weights::kDepth - 1) / Weights::kDepth;
  const int tiles = (p.n + P::kFeatures - 1) / P::kFeatures;
  const int slices = p.slices > 0
                         ? p.slices
                         : Slices(p.groups * ((p.n + kSliceFeatures - 1) / kSliceFeatures), steps);
  const int row_tiles = p.pairs != nullptr ? 1 : (p.rows + kRows - 1) / kRows;
  // Of few experts hardly any goes without rows.
  const bool early = p.pairs == nullptr || p.groups <= 16 || p.rows >= 4 * p.groups;
  const dim3 grid(static_cast<unsigned>(slices), static_cast<unsigned>(row_tiles),
                  static_cast<unsigned>(p.groups * tiles));
  return LaunchClusters(kernel, grid, dim3(P::kThreads), dim3(static_cast<unsigned>(slices)),
                        P::kBytes, stream, w_map, x_map, p, early, by_map);
}

// Rows of a group: all, or as many as there are of each on average.
inline int TypicalRows(const GroupedProduct& p) {
  return p.pairs == nullptr ? p.rows : (p.rows + p.groups - 1) / p.groups;
}

}  // namespace
}  // namespace sluice::kernels::cuda
