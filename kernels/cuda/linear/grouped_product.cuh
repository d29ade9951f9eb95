// y = x W^T on tensor cores for few rows and many weights, each read once: the body of
// grouped_product_fp8.cu and grouped_product_bf16.cu. Its parts are grouped_tile.cuh (shapes and
// memory), grouped_copy.cuh (the threads that fill the rings) and grouped_sums.cuh (the threads
// that empty them).
//
// A block has a tile of 64 features for each of its consumer warpgroups and one slice of k. One
// thread keeps a ring of W tiles filled by tensor copies. x has a ring of its own, filled by
// another thread in the same way or, if rows are gathered, by three warps with copies of 16
// bytes. The consumers read their features from the ring of W as operand A in registers (e4m3
// becomes bf16 on the way) and multiply by x, operand B in shared memory. The blocks of a cluster
// are the slices of one tile. They add their sums up through each other's shared memory, in order
// of k.
//
// Bits: the additions of a row take 16 values of k at a time in order, in Slices() slices that
// are added in order, then the bias, then the old y. The number of rows decides only which
// instance computes them.
#pragma once

#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/linear/grouped_copy.cuh"
#include "kernels/cuda/linear/grouped_product.h"
#include "kernels/cuda/linear/grouped_sums.cuh"
#include "kernels/cuda/linear/grouped_tile.cuh"

namespace sluice::kernels::cuda {
namespace {

__device__ __forceinline__ float4 Sum(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Adds up the sums of kSlices blocks, in order of k, for this block's share of the features of
// `count` rows from entry `first` of the range on.
template <typename P, int kSlices>
__device__ void StoreSums(const GroupedProduct& p, const TileWork& work, int first, int count,
                          const int32_t* rows, uint32_t sums) {
  // Reads that a thread has under way: their latency is all the time that this takes.
  constexpr int kItems = std::max(1, 4 / kSlices);
  constexpr int kQuads = P::kFeatures / 4 / kSlices;
  const int items = count * kQuads;
  for (int begin = threadIdx.x; begin < items; begin += kItems * P::kConsumers) {
    float4 part[kItems][kSlices], before[kItems];
    int64_t place[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int item = min(begin + j * P::kConsumers, items - 1);
      const int quad = blockIdx.x * kQuads + item % kQuads;
      const uint32_t at = sums + (item / kQuads * P::kSumStride + quad * 4) * 4;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) part[j][slice] = LoadFromBlock(at, slice);
      const int row = item / kQuads;
      place[j] = (p.pairs == nullptr ? first + row : rows[row]) * p.y_stride +
                 work.group * p.y_group_stride + work.feature + quad * 4;
      before[j] = p.accumulate && work.feature + quad * 4 < p.n
                      ? *reinterpret_cast<const float4*>(static_cast<float*>(p.y) + place[j])
                      : float4{};
    }
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int item = begin + j * P::kConsumers;
      const int feature = work.feature + (blockIdx.x * kQuads + item % kQuads) * 4;
      if (item >= items || feature >= p.n) continue;
      float4 sum = part[j][0];
#pragma unroll
      for (int slice = 1; slice < kSlices; ++slice) sum = Sum(sum, part[j][slice]);
      if (p.bias != nullptr) {
        const float* bias = p.bias + feature;
        sum = Sum(sum, {bias[0], bias[1], bias[2], bias[3]});
      }
      if (p.y_type == DType::kFloat32) {
        *reinterpret_cast<float4*>(static_cast<float*>(p.y) + place[j]) =
            p.accumulate ? Sum(sum, before[j]) : sum;
      } else {
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.y) + place[j]) =
            make_uint2(PackBf16(sum.x, sum.y), PackBf16(sum.z, sum.w));
      }
    }
  }
}

// Writes a tile that has one slice and is not accumulated, from the registers that hold it. All
// of a thread's rows are on their way at once.
template <typename P, int kRows, typename Consumer>
__device__ void WriteSums(const GroupedProduct& p, const TileWork& work, int first, int count,
                          const int32_t* rows, const Consumer& consumer) {
  const int lane = consumer.lane;
  const int feature = work.feature + consumer.feature + lane / 4;
  float* const y = static_cast<float*>(p.y) + work.group * p.y_group_stride + feature;
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
    if (row >= count) continue;
    float* const out = y + (p.pairs == nullptr ? first + row : rows[row]) * p.y_stride;
    if (feature < p.n) out[0] = consumer.sums[i / 2 * 4 + i % 2];
    if (feature + 8 < p.n) out[8] = consumer.sums[i / 2 * 4 + 2 + i % 2];
  }
}

// The sums of a tile lie in the rings of the cluster's blocks between the two halves, and all
// threads of a block call both. In a cluster of one block only the consumers use the sums until
// `is_last` is false: then the copying threads wait for the rings.
template <typename P>
__device__ __forceinline__ void BeginSums(bool is_consumer) {
  if (gridDim.x > 1) {
    SyncCluster();
  } else if (is_consumer) {
    SyncThreads(kConsumerBarrier, P::kConsumers);
  }
}
template <typename P>
__device__ __forceinline__ void EndSums(bool is_last) {
  if (gridDim.x > 1) {
    LeaveCluster();  // loads from other blocks have completed: their values have been written to y
    AwaitCluster();
  } else if (!is_last) {
    __syncthreads();
  }
}

template <typename P>
__device__ void StoreRows(const GroupedProduct& p, const TileWork& work, int first, int count,
                          const int32_t* rows, uint32_t sums) {
  switch (gridDim.x) {
    case 1:
      return StoreSums<P, 1>(p, work, first, count, rows, sums);
    case 2:
      return StoreSums<P, 2>(p, work, first, count, rows, sums);
    case 4:
      return StoreSums<P, 4>(p, work, first, count, rows, sums);
    default:
      return StoreSums<P, 8>(p, work, first, count, rows, sums);
  }
}

// Grid: (slices of k, tiles of rows, groups x tiles of features). A cluster is the slices of one
// tile. Blocks take every gridDim.y-th tile of rows of their group. If `early`, W is asked for
// before it is known whether the group has rows.
template <typename Weights, int kRows, int kWarpgroups, int kBlocks>
__global__ void __launch_bounds__(
    TilePlan<Weights, kRows, kWarpgroups, kBlocks>::kThreads,
    TilePlan<Weights, kRows, kWarpgroups, kBlocks>::kBlocksPerProcessor)
    TiledProduct(const __grid_constant__ CUtensorMap w_map,
                 const __grid_constant__ CUtensorMap x_map, const GroupedProduct p, bool early,
                 bool by_map) {
  using P = TilePlan<Weights, kRows, kWarpgroups, kBlocks>;
  extern __shared__ __align__(1024) unsigned char shared[];
  LetNextKernelStart();
  Rings<P> rings = {SharedAddress(shared)};
  auto* const rows =
      reinterpret_cast<int32_t*>(shared + P::kRingBytes + 16 * (P::kWeightStages + P::kRowStages));
  const TileWork work = WorkOfBlock<Weights, P::kFeatures>(p);
  const int warp = threadIdx.x / 32;
  const auto is_last = [](int tile, RowRange range) {
    return (tile + static_cast<int>(gridDim.y)) * kRows >= range.count;
  };
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
        BeginSums<P>(false);
        EndSums<P>(is_last(tile, range));
      }
      if (copies && range.count <= static_cast<int>(blockIdx.y) * kRows) copier.AwaitEarly(begun);
    } else {
      const int thread = threadIdx.x - P::kConsumers - 32;
      WaitForPriorKernels();
      const RowRange range = RowsOfGroup(p, work.group);
      const int first_k = work.first_step * Weights::kDepth;
      RowCopier<Weights, P, kRows> copier = {
          rings, &x_map, work.group * static_cast<int>(p.x_group_stride) + first_k};
      RowGatherer<Weights, P, kRows> gatherer = {p, rings, rows, first_k, thread};
      for (int tile = blockIdx.y; tile * kRows < range.count; tile += gridDim.y) {
        if (by_map) {
          if (thread == 0) copier.Copy(tile * kRows, work.steps);
        } else {
          gatherer.Take(work, range, tile * kRows);
          gatherer.Copy(work.steps);
        }
        __syncwarp();
        BeginSums<P>(false);
        EndSums<P>(is_last(tile, range));
      }
    }
  } else {
    TakeRegisters<P::kConsumerRegisters>();
    const bool is_plain =
        gridDim.x == 1 && p.bias == nullptr && !p.accumulate && p.y_type == DType::kFloat32;
    Consumer<Weights, P, kRows> consumer;
    consumer.lane = threadIdx.x % 32;
    // Keeps these in registers; the compiler would otherwise recompute them at every use.
    asm volatile("" : "+r"(rings.base), "+r"(consumer.lane));
    consumer.rings = rings;
    consumer.feature = warp * 16;
    const int row = min(work.group * p.n + work.feature + warp * 16, p.w.n - 1);
    consumer.scales = p.w.scales +
                      row / kFp8BlockRows * ((p.w.k + kFp8BlockColumns - 1) / kFp8BlockColumns) +
                      work.first_step;
    if constexpr (Weights::kIsFp8) consumer.AskForScales(0, work.steps);
    WaitForPriorKernels();
    const RowRange range = RowsOfGroup(p, work.group);
    for (int tile = blockIdx.y; tile * kRows < range.count; tile += gridDim.y) {
      consumer.Accumulate(work.steps);
      if (is_plain) {
        WriteSums<P, kRows>(p, work, tile * kRows, min(kRows, range.count - tile * kRows), rows,
                            consumer);
        EndSums<P>(is_last(tile, range));
        continue;
      }
      SyncThreads(kConsumerBarrier, P::kConsumers);  // the rings have been read
      consumer.Store(reinterpret_cast<float*>(shared));
      BeginSums<P>(true);
      StoreRows<P>(p, work, tile * kRows, min(kRows, range.count - tile * kRows), rows, rings.base);
      PublishToAsyncProxy();  // orders the reads before the next copies into the rings
      EndSums<P>(is_last(tile, range));
    }
  }
}

inline int TilesOf(const GroupedProduct& p, int features) {
  return p.groups * ((p.n + features - 1) / features);
}

template <typename Weights>
int StepsOf(const GroupedProduct& p) {
  return (p.w.k + Weights::kDepth - 1) / Weights::kDepth;
}

template <typename Weights>
int SlicesOf(const GroupedProduct& p) {
  return p.slices > 0 ? p.slices : Slices(TilesOf(p, kSliceFeatures), StepsOf<Weights>(p));
}

template <typename Weights, int kRows, int kWarpgroups, int kBlocks>
cudaError_t LaunchTiles(const GroupedProduct& p, cudaStream_t stream) {
  using P = TilePlan<Weights, kRows, kWarpgroups, kBlocks>;
  const auto kernel = TiledProduct<Weights, kRows, kWarpgroups, kBlocks>;
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
  const int slices = SlicesOf<Weights>(p);
  const int row_tiles = p.pairs != nullptr ? 1 : (p.rows + kRows - 1) / kRows;
  // Among few experts hardly any goes without rows.
  const bool early = p.pairs == nullptr || p.groups <= 16 || p.rows >= 4 * p.groups;
  const dim3 grid(static_cast<unsigned>(slices), static_cast<unsigned>(row_tiles),
                  static_cast<unsigned>(TilesOf(p, P::kFeatures)));
  return LaunchClusters(kernel, grid, dim3(P::kThreads), dim3(static_cast<unsigned>(slices)),
                        P::kBytes, stream, w_map, x_map, p, early, by_map);
}

// Returns the typical rows of a group: all rows, or the average per group.
inline int TypicalRows(const GroupedProduct& p) {
  return p.pairs == nullptr ? p.rows : (p.rows + p.groups - 1) / p.groups;
}

// Launches with two or three blocks on a multiprocessor. Few rows leave room for three, and they
// are better if there are many more blocks than run at one time otherwise. In bf16 they are also
// better with somewhat more blocks, or with short ones, whose beginnings and ends then lie
// beneath others. Elsewhere they are worse: some multiprocessors would have three blocks and
// others one.
template <typename Weights, int kRows>
cudaError_t LaunchFewRows(const GroupedProduct& p, cudaStream_t stream) {
  const int slices = SlicesOf<Weights>(p);
  const int blocks = slices * TilesOf(p, kSliceFeatures);
  const bool are_short = StepsOf<Weights>(p) <= 8 * slices;
  const bool takes_three = Weights::kIsFp8
                               ? blocks > 2 * kAtOnce
                               : blocks > kAtOnce || (blocks > kAtOnce * 9 / 10 && are_short);
  return takes_three ? LaunchTiles<Weights, kRows, 2, 3>(p, stream)
                     : LaunchTiles<Weights, kRows, 2, 2>(p, stream);
}

template <typename Weights>
cudaError_t LaunchTiledProduct(const GroupedProduct& p, cudaStream_t stream) {
  constexpr int kFewBlocks = 64;  // blocks of the widest tiles
  const int rows = TypicalRows(p);
  if (rows <= 8) return LaunchFewRows<Weights, 8>(p, stream);
  if (rows <= 32) return LaunchFewRows<Weights, 32>(p, stream);
  if (rows <= 64) return LaunchTiles<Weights, 64, 2, 2>(p, stream);
  if (rows <= 80) {
    if constexpr (Weights::kIsFp8) {
      // Wide tiles read x half as often. They are used if they leave no multiprocessor without a
      // block.
      const int places = 2 * TilesOf(p, 256) * SlicesOf<Weights>(p);
      if (places <= kAtOnce && places * 10 >= kAtOnce * 9) {
        return LaunchTiles<Weights, 80, 4, 1>(p, stream);
      }
    }
    return LaunchTiles<Weights, 80, 2, 2>(p, stream);
  }
  if (p.n <= kSliceFeatures || TilesOf(p, 256) * SlicesOf<Weights>(p) < kFewBlocks) {
    return LaunchTiles<Weights, 64, 2, 2>(p, stream);
  }
  return LaunchTiles<Weights, 128, 4, 1>(p, stream);
}

}  // namespace
}  // namespace sluice::kernels::cuda
