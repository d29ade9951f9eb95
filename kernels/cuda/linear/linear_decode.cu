// y = x W^T for the few rows of a decode step: W is read once, at the speed of the memory.
//
// A block has a tile of 64 features and one slice of k. One thread keeps a ring of W and x tiles
// filled by tensor copies. A warpgroup multiplies them: W is the operand of 64 rows and x that of
// 8 to 64 columns. The blocks of a cluster share a tile of features, one slice of k each, and add
// their sums up through each other's shared memory, in order of k. Two or three blocks fit on a
// multiprocessor, so that blocks of the next product fill their rings with W while this one's
// still run (launch.cuh).
//
// The kernel moves 2nk bytes of W, and 2k + 4n (8n to accumulate) for each row. Floor: the
// reading of W, as long as the x that every tile reads from the L2 cache, rows / 64 times the
// bytes of W, is no more than that. Measured on an H100, the products of Qwen3-8B's step back to
// back, as the share of the rate of plain reads: 93 % with 1 row, 92 % with 8, 91 % with 32, 87 %
// with 64 (README.md beside this file has the table).
//
// Bits: the order of additions follows from (n, k) alone: 16 consecutive k a step, Slices(n, k)
// slices of k, added in order, then the bias, then the old y.
#include "kernels/cuda/linear/linear_decode.h"

#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/tensor_copy.cuh"
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/common/wgmma.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kFeatures = 64;              // features of a block: the rows of a warpgroup's product
constexpr int kDepth = 64;                 // k of a tile: 128 bytes, the width of the swizzle
constexpr int kConsumers = 128;            // threads of the warpgroup
constexpr int kThreads = kConsumers + 32;  // and the warp that copies
constexpr int kWeightTileBytes = kFeatures * kDepth * 2;
constexpr int kMaxSlices = 8;
constexpr int kMinBlocks = 192;  // of the 132 x 3 that run at a time

// Returns the number of slices of k, one for each block of a cluster. There are enough blocks to
// keep the memory busy, and not so many that a block's work besides reading counts. The result
// depends on n and k alone (see "Bits" above).
int Slices(int n, int k) {
  const int tiles = (n + kFeatures - 1) / kFeatures;
  const int steps = (k + kDepth - 1) / kDepth;
  int slices = 1;
  while (slices < kMaxSlices && tiles * slices < kMinBlocks && steps >= 4 * slices) slices *= 2;
  return slices;
}

// The shared memory of a block that computes up to kRows rows.
template <int kRows>
struct Plan {
  static constexpr int kRowTileBytes = kRows * kDepth * 2;
  static constexpr int kStageBytes = kWeightTileBytes + kRowTileBytes;
  static constexpr int kRingBudget = 70 * 1024;  // leaves room for three blocks on a multiprocessor
  static constexpr int kStages = std::min(8, kRingBudget / kStageBytes);
  static constexpr int kSumStride = kFeatures + 4;  // keeps a quad's stores in different banks
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kBytes = kRingBytes + 2 * kStages * 8;
  static_assert(kRows * kSumStride * 4 <= kRingBytes, "the sums take the ring's place");
};

// Addresses of one stage of the ring, and its position in the order of all stages.
template <int kRows>
struct Ring {
  using P = Plan<kRows>;
  uint32_t base;

  __device__ uint32_t Weights(int stage) const { return base + stage * P::kStageBytes; }
  __device__ uint32_t Rows(int stage) const { return Weights(stage) + kWeightTileBytes; }
  __device__ uint32_t Full(int stage) const { return base + P::kRingBytes + stage * 16; }
  __device__ uint32_t Empty(int stage) const { return Full(stage) + 8; }
};

struct Slice {
  int first;  // first step, in steps of kDepth
  int count;
};

__device__ Slice SliceOfBlock(int k) {
  const int steps = (k + kDepth - 1) / kDepth;
  const int each = (steps + gridDim.x - 1) / gridDim.x;
  const int first = min(static_cast<int>(blockIdx.x) * each, steps);
  return {first, min(each, steps - first)};
}

// The copying thread's work.
template <int kRows>
struct Copier {
  using P = Plan<kRows>;
  Ring<kRows> ring;
  const CUtensorMap* w_map;
  const CUtensorMap* x_map;
  Slice slice;

  __device__ void CopyWeights(int step, int stage) const {
    ArriveExpecting(ring.Full(stage), P::kStageBytes);
    CopyTile(ring.Weights(stage), w_map, (slice.first + step) * kDepth, blockIdx.y * kFeatures,
             ring.Full(stage), kEvictFirst);
  }
  __device__ void CopyRows(int step, int stage) const {
    CopyTile(ring.Rows(stage), x_map, (slice.first + step) * kDepth, blockIdx.z * kRows,
             ring.Full(stage), kEvictLast);
  }

  // Fills the ring with W while the kernels before this one still run: W is constant.
  __device__ void Start() const {
    PrefetchMap(w_map);
    PrefetchMap(x_map);
    for (int stage = 0; stage < P::kStages; ++stage) {
      InitBarrier(ring.Full(stage), 1);
      InitBarrier(ring.Empty(stage), 1);
    }
    PublishBarriers();
    const int early = min(P::kStages, slice.count);
    for (int step = 0; step < early; ++step) CopyWeights(step, step);
  }

  __device__ void Finish() const {
    const int early = min(P::kStages, slice.count);
    for (int step = 0; step < early; ++step) CopyRows(step, step);
    int stage = 0;
    uint32_t parity = 0;
    for (int step = early; step < slice.count; ++step) {
      WaitBarrier(ring.Empty(stage), parity);
      CopyWeights(step, stage);
      CopyRows(step, stage);
      if (++stage == P::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
};

// The warpgroup's products of kFeatures and kRows rows over the slice.
template <int kRows>
struct Sums {
  float value[kRows / 2] = {};

  __device__ void Accumulate(const Ring<kRows>& ring, int count) {
    constexpr int kStages = Plan<kRows>::kStages;
    int stage = 0;
    uint32_t parity = 0;
    for (int step = 0; step < count; ++step) {
      WaitBarrier(ring.Full(stage), parity);
      const uint64_t w = TileDescriptor(ring.Weights(stage));
      BeginProducts();
      const uint64_t x = TileDescriptor(ring.Rows(stage));
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) MultiplyAdd<kRows>(value, w + 2 * i, x + 2 * i);
      CommitProducts();
      WaitForProducts<0>();
      if (threadIdx.x == 0) Arrive(ring.Empty(stage));
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }

  // Writes sums[kRows][kSumStride], a row's features next to each other.
  __device__ void Store(float* sums) const {
    const int lane = threadIdx.x % 32;
    const int feature = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) {
      const int row = j / 4 * 8 + lane % 4 * 2 + j % 2;
      sums[row * Plan<kRows>::kSumStride + feature + j / 2 % 2 * 8] = value[j];
    }
  }
};

__device__ float4 Add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Adds up the cluster's sums, in order of k, for this block's share of the features. Each thread
// has several reads of the neighbours' memory and of y under way: their latency is all the time
// that this takes.
template <int kRows>
__device__ void StoreRows(const LinearParams& p, uint32_t sums) {
  constexpr int kAtOnce = std::min(4, kRows / 8);
  const int slices = gridDim.x;
  const int quads = kFeatures / 4 / slices;
  const int first_row = blockIdx.z * kRows;
  const int items = min(kRows, p.rows - first_row) * quads;
  for (int first = threadIdx.x; first < items; first += kAtOnce * kThreads) {
    float4* y[kAtOnce];
    int feature[kAtOnce];
    float4 sum[kAtOnce], before[kAtOnce];
    uint32_t at[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int item = min(first + j * kThreads, items - 1);
      const int row = item / quads;
      const int quad = blockIdx.x * quads + item % quads;
      feature[j] = blockIdx.y * kFeatures + quad * 4;
      const bool exists = first + j * kThreads < items && feature[j] < p.w.n;
      float* place = p.y + static_cast<int64_t>(first_row + row) * p.w.n + feature[j];
      y[j] = exists ? reinterpret_cast<float4*>(place) : nullptr;
      at[j] = sums + (row * Plan<kRows>::kSumStride + quad * 4) * 4;
      before[j] = exists && p.accumulate ? *y[j] : float4{};
      sum[j] = LoadFromBlock(at[j], 0);
    }
    for (int slice = 1; slice < slices; ++slice) {
      float4 part[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) part[j] = LoadFromBlock(at[j], slice);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) sum[j] = Add(sum[j], part[j]);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (y[j] == nullptr) continue;
      if (p.bias != nullptr) {
        const float* bias = p.bias + feature[j];
        sum[j] = Add(sum[j], {bias[0], bias[1], bias[2], bias[3]});
      }
      *y[j] = p.accumulate ? Add(sum[j], before[j]) : sum[j];
    }
  }
}

// Grid: (slices of k, tiles of features, tiles of rows). A cluster is the slices of one tile.
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    DecodeProduct(const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map, const LinearParams p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  LetNextKernelStart();
  const Ring<kRows> ring = {SharedAddress(shared)};
  const Copier<kRows> copier = {ring, &w_map, &x_map, SliceOfBlock(p.w.k)};
  const bool copies = threadIdx.x == kConsumers;
  if (copies) copier.Start();
  __syncthreads();  // the barriers exist
  WaitForPriorKernels();
  Sums<kRows> sums;
  if (copies) copier.Finish();
  if (threadIdx.x < kConsumers) sums.Accumulate(ring, copier.slice.count);
  __syncthreads();  // every tile has been read: the ring's memory is free
  if (threadIdx.x < kConsumers) sums.Store(reinterpret_cast<float*>(shared));
  SyncCluster();
  StoreRows<kRows>(p, ring.base);
  LeaveCluster();  // a block's sums stay until all blocks have read them
  AwaitCluster();
}

template <int kRows>
cudaError_t Launch(const LinearParams& p, cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(
      DecodeProduct<kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan<kRows>::kBytes);
  CUtensorMap w_map, x_map;
  if (error == cudaSuccess) error = MakeTileMap(p.w.data, p.w.n, p.w.k, kFeatures, &w_map);
  if (error == cudaSuccess) error = MakeTileMap(p.x, p.rows, p.w.k, kRows, &x_map);
  if (error != cudaSuccess) return error;
  const unsigned slices = static_cast<unsigned>(Slices(p.w.n, p.w.k));
  const dim3 grid(slices, static_cast<unsigned>((p.w.n + kFeatures - 1) / kFeatures),
                  static_cast<unsigned>((p.rows + kRows - 1) / kRows));
  return LaunchClusters(DecodeProduct<kRows>, grid, dim3(kThreads), dim3(slices),
                        Plan<kRows>::kBytes, stream, w_map, x_map, p);
}

}  // namespace

cudaError_t LaunchDecodeProduct(const LinearParams& p, cudaStream_t stream) {
  if (p.rows <= 8) return Launch<8>(p, stream);
  if (p.rows <= 32) return Launch<32>(p, stream);
  if (p.rows <= kMaxDecodeProductRows) return Launch<64>(p, stream);
  return cudaErrorInvalidValue;
}

int DecodeProductSlices(int n, int k) { return Slices(n, k); }

}  // namespace sluice::kernels::cuda
