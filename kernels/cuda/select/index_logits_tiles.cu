// IndexLogits of packed keys on tensor cores.
//
// The kernel moves each key once for each row, 132 bytes of it, and writes 4: 554 MB for 32 rows
// of 128K, 132 us at the 4.2 TB/s at which an H200 reads as many bytes. Its products are 69 GFLOP
// there, 35 us of the fp8 tensor cores. A relu, a multiplication and an addition for each head
// and key take some 20 us of the CUDA cores. All three run beneath the reads. Measured on an
// H200: 146 us, 85 % of plain reads; the keys of one row of 32K 5.2 us.
//
// A tile is 64 keys. Four warps in turn ask for keys and scales as far ahead as there are stages
// (one warp alone is too slow: it takes 400 cycles for the keys of one page). The copy engine
// puts keys where wgmma expects its A operand; the 64 heads of the query are B. Tiles go to the
// warpgroups in turn, so that one's products run beneath the others' sums over heads. The order
// of a sum: heads 8 j + 2 c and 8 j + 2 c + 1 in order of j, for c < 4, then c by pairs. If there
// are fewer heads, zeros follow the last one. Blocks, one to a multiprocessor that is not spared,
// take equal runs of the tiles of all rows.
//
// Where sequences have rows of drafts, a bundle of up to kDraftRows of them takes its keys
// together: each row's products and sums are those that it would have alone.
#include <cuda.h>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/tensor_copy.cuh"
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/common/tile_walk.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/select/index_logits.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kTokens = kIndexTileTokens, kHeads = kIndexTileHeads;
constexpr int kGroups = 3;   // warpgroups of products
constexpr int kLoaders = 4;  // warps that ask for tiles
constexpr int kThreads = 128 * kGroups + 32 * kLoaders;
constexpr int kStages = 12;
constexpr int kKeyBytes = kTokens * kIndexDim;
constexpr int kQueryBytes = kHeads * kIndexDim;
constexpr int kDraftRows = 4;
// Fewer rows are sooner done apart: what a bundle saves are reads, and those find keys in L2.
constexpr int kLeastBundledRows = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Shared memory, from a multiple of 1,024 on, of a kernel that takes up to kRows rows together.
template <int kRows>
struct Memory {
  unsigned char keys[kStages][kKeyBytes];
  unsigned char queries[2][kRows][kQueryBytes];
  float scales[kStages][kTokens];
  uint64_t keys_full[kStages], keys_empty[kStages];
  uint64_t query_full[2], query_empty[2];
};

struct Tiles {
  __device__ int operator()(int position) const { return position / kTokens + 1; }
};
template <int kRows>
using Walk = TileWalk<Tiles, kRows>;

// The stage of the ring that a warp is at: the number of the tile, counted by the block.
struct Stage {
  __device__ explicit Stage(uint32_t tile) : index(tile % kStages), phase(tile / kStages % 2) {}
  uint32_t index, phase;
};

// A loader warp's work: it asks for the data of every kLoaders-th of the block's tiles, in order.
template <int kRows>
__device__ __forceinline__ void LoadTiles(const IndexLogitsParams& p, const CUtensorMap* keys,
                                          const CUtensorMap* queries, Walk<kRows>& walk,
                                          Memory<kRows>& memory) {
  const PagedIndexKeys& c = p.cache;
  const uint32_t loader = threadIdx.x / 32 - 4 * kGroups;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int piece = min(c.block_tokens, kTokens);  // tokens of a copy
  const int pieces = kTokens / piece;              // copies of a tile
  uint32_t before = 0;                             // tiles of the block's parts so far
  for (uint32_t part = 0;; ++part) {
    const uint32_t buffer = part % 2;
    if (lane == 0) {
      // Every loader warp waits for each part and arrives for it, whichever warp loads the query.
      // A parity tells a phase from its neighbours alone, and with short rows a warp that loads
      // no query could otherwise be four parts ahead, or behind.
      WaitBarrier(SharedAddress(&memory.query_empty[buffer]), part / 2 % 2 ^ 1);
      Arrive(SharedAddress(&memory.query_empty[buffer]));
      if (loader == part % kLoaders) {
        const uint32_t full = SharedAddress(&memory.query_full[buffer]);
        ArriveExpecting(full, static_cast<uint32_t>(walk.bundle * kQueryBytes));
        for (int i = 0; i < walk.bundle; ++i) {
          CopyTile(SharedAddress(memory.queries[buffer][i]), queries, 0, 0, walk.row + i, full,
                   kEvictLast);
        }
      }
    }
    __syncwarp();
    const int count = walk.Last() - walk.tile;  // number of tiles
    const int end = walk.position / piece + 1;  // pieces that the row has
    const int32_t* const table = c.block_table + walk.slot * c.table_stride;
    // Each lane takes one piece of this warp's next 32 / pieces tiles.
    const int tiles_at_once = 32 / pieces;
    // the first of this warp's tiles
    const auto mine = static_cast<int>((loader - before) % kLoaders);
    for (int first = mine; first < count; first += tiles_at_once * kLoaders) {
      const int of_lane = (walk.tile + first + lane / pieces * kLoaders) * pieces + lane % pieces;
      const bool is_there = first + lane / pieces * kLoaders < count && of_lane < end;
      const int block = of_lane * piece / c.block_tokens;
      const int in_page = of_lane * piece - block * c.block_tokens;
      const int page = is_there ? table[block] : 0;
      const char* const scales = static_cast<const char*>(c.base) + page * c.page_bytes +
                                 int64_t{c.block_tokens} * kIndexDim + int64_t{4} * in_page;
      const unsigned there = __ballot_sync(kAllLanes, is_there);
      for (int i = 0; i < tiles_at_once && first + i * kLoaders < count; ++i) {
        const Stage stage(before + static_cast<uint32_t>(first + i * kLoaders));
        const uint32_t full = SharedAddress(&memory.keys_full[stage.index]);
        if (lane == i * pieces) {
          const unsigned of_tile = there >> lane & ((2u << (pieces - 1)) - 1);
          WaitBarrier(SharedAddress(&memory.keys_empty[stage.index]), stage.phase ^ 1);
          ArriveExpecting(full, static_cast<uint32_t>(__popc(of_tile) * piece * (kIndexDim + 4)));
        }
        __syncwarp();
        if (lane / pieces == i && is_there) {
          const int at = lane % pieces * piece;
          CopyTile(SharedAddress(memory.keys[stage.index] + at * kIndexDim), keys, 0, in_page, page,
                   full, kEvictFirst);
          CopyBytes(SharedAddress(memory.scales[stage.index] + at), scales,
                    static_cast<uint32_t>(4 * piece), full);
        }
        __syncwarp();
      }
    }
    before += static_cast<uint32_t>(count);
    if (walk.left == count) return;
    walk.NextList();
  }
}

// Returns sum_h weights[h] * max(products[..][h], 0) of this thread's rows, added up by the four
// threads of a row.
__device__ __forceinline__ float2 SumHeads(const float (&products)[32],
                                           const float (&weights)[16]) {
  float upper = 0, lower = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      upper = fmaf(weights[2 * j + i], fmaxf(products[4 * j + i], 0.0f), upper);
      lower = fmaf(weights[2 * j + i], fmaxf(products[4 * j + 2 + i], 0.0f), lower);
    }
  }
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    upper += __shfl_xor_sync(kAllLanes, upper, step);
    lower += __shfl_xor_sync(kAllLanes, lower, step);
  }
  return {upper, lower};
}

// A warpgroup's work: every kGroups-th tile of the block.
template <int kRows>
__device__ __forceinline__ void ScoreTiles(const IndexLogitsParams& p, Walk<kRows>& walk,
                                           Memory<kRows>& memory) {
  const uint32_t group = threadIdx.x / 128;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int upper = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;  // key of the tile
  uint32_t tile = 0;
  for (uint32_t part = 0;; ++part) {
    const uint32_t buffer = part % 2;
    float weights[kRows][16];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int head = j / 2 * 8 + lane % 4 * 2 + j % 2;
        weights[i][j] = head < p.heads && i < walk.bundle
                            ? p.weights[int64_t{walk.row + i} * p.heads + head]
                            : 0.0f;
      }
    }
    const int last = walk.Last();
    WaitBarrier(SharedAddress(&memory.query_full[buffer]), part / 2 % 2);
    const uint64_t queries = TileDescriptor(SharedAddress(memory.queries[buffer][0]));
    for (int at = walk.tile; at < last; ++at, ++tile) {
      if (tile % kGroups != group) continue;
      const Stage stage(tile);
      WaitBarrier(SharedAddress(&memory.keys_full[stage.index]), stage.phase);
      const uint64_t keys = TileDescriptor(SharedAddress(memory.keys[stage.index]));
      const float scales[2] = {memory.scales[stage.index][upper],
                               memory.scales[stage.index][upper + 8]};
      const int token = at * kTokens + upper;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (kRows > 1 && i >= walk.bundle) break;
        const uint64_t query = queries + static_cast<uint64_t>(i * kQueryBytes / 16);
        float products[32] = {};
        BeginProducts();
#pragma unroll
        for (int step = 0; step < kIndexDim / 32; ++step) {
          MultiplyE4M3(products, keys + 2 * step, query + 2 * step, step > 0);
        }
        CommitProducts();
        WaitForProducts<0>();
        if (i + 1 == walk.bundle) {
          __syncwarp();
          if (lane == 0) Arrive(SharedAddress(&memory.keys_empty[stage.index]));
        }
        const float2 sums = SumHeads(products, weights[i]);
        float* const scores = p.scores + (walk.row + i) * p.score_stride;
        const int position = walk.position - (walk.bundle - 1 - i);
        if (lane % 4 == 0 && token <= position) scores[token] = sums.x * scales[0];
        if (lane % 4 == 1 && token + 8 <= position) scores[token + 8] = sums.y * scales[1];
      }
    }
    __syncwarp();
    if (lane == 0) Arrive(SharedAddress(&memory.query_empty[buffer]));
    if (walk.left == last - walk.tile) return;
    walk.NextList();
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    IndexTilesKernel(const __grid_constant__ IndexLogitsParams p,
                     const __grid_constant__ CUtensorMap keys,
                     const __grid_constant__ CUtensorMap queries) {
  extern __shared__ unsigned char shared[];
  auto& memory =
      *reinterpret_cast<Memory<kRows>*>(shared + (1024 - SharedAddress(shared) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(SharedAddress(&memory.keys_full[i]), 1);
      InitBarrier(SharedAddress(&memory.keys_empty[i]), 4);  // the warps of one group
    }
    for (int i = 0; i < 2; ++i) {
      InitBarrier(SharedAddress(&memory.query_full[i]), 1);
      InitBarrier(SharedAddress(&memory.query_empty[i]), 4 * kGroups + kLoaders);
    }
    PublishBarriers();
    PrefetchMap(&keys);
    PrefetchMap(&queries);
  }
  __syncthreads();
  WaitForPriorKernels();
  LetNextKernelStart();
  Walk<kRows> walk(p, 1, Tiles{});
  walk.Start();
  if (walk.left == 0) return;
  if (threadIdx.x < 128 * kGroups) {
    ScoreTiles(p, walk, memory);
  } else {
    LoadTiles(p, &keys, &queries, walk, memory);
  }
}

template <int kRows>
cudaError_t Launch(const IndexLogitsParams& p, unsigned blocks, const CUtensorMap& keys,
                   const CUtensorMap& queries, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(Memory<kRows>) + 1024;
  static const cudaError_t roomy = cudaFuncSetAttribute(
      IndexTilesKernel<kRows>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (roomy != cudaSuccess) return roomy;
  return LaunchKernel(IndexTilesKernel<kRows>, dim3(blocks), dim3(kThreads), kSharedBytes, stream,
                      p, keys, queries);
}

}  // namespace

bool FitsIndexTiles(const IndexLogitsParams& p) {
  const PagedIndexKeys& c = p.cache;
  return c.type == DType::kFloat8E4M3 && p.heads <= kHeads &&
         (c.block_tokens % kTokens == 0 ||
          (kTokens % c.block_tokens == 0 && c.block_tokens >= 8)) &&
         reinterpret_cast<uintptr_t>(c.base) % 16 == 0 && c.page_bytes % 16 == 0 &&
         reinterpret_cast<uintptr_t>(p.q) % 16 == 0;
}

cudaError_t LaunchIndexTiles(const IndexLogitsParams& p, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  CUtensorMap keys, queries;
  // Page numbers are trusted: the host does not know how many pages there are.
  constexpr int64_t kAnyPages = INT32_MAX;
  if (error == cudaSuccess) {
    error = MakeByteTileMap(p.cache.base, kAnyPages, p.cache.page_bytes, p.cache.block_tokens,
                            min(p.cache.block_tokens, kTokens), &keys);
  }
  if (error == cudaSuccess) {
    error = MakeByteTileMap(p.q, p.rows, int64_t{p.heads} * kIndexDim, p.heads, kHeads, &queries);
  }
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>(max(1, processors - p.spare_processors));
  return p.sequence_rows > 1 && p.rows >= kLeastBundledRows
             ? Launch<kDraftRows>(p, blocks, keys, queries, stream)
             : Launch<1>(p, blocks, keys, queries, stream);
}

}  // namespace sluice::kernels::cuda
