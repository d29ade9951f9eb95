// Attention of rows over lists of units. It reads the K and V bytes of the lists' tokens once, 4
// * head_dim bytes a (token, KV head) with a bf16 cache, wherever each lies. Floor: those bytes
// over the GPU's read rate.
//
// Two blocks of four warps, a cluster, compute one list (eight blocks where lists of single tokens
// may be long), as list_attention.cuh says.
//
// Measured on an H200, 40/8 heads of 128, blocks of 32, back to back in a graph, pages in any
// order (sluice-sparse-attention-bench), as the share of the rate at which a plain kernel reads
// the same number of bytes: 10 rows x 1,900 tokens of slots 60 % (31.5 us), 8 rows 74 % (21.2
// us), 20 rows 75 % (48.3 us), one row 24 % (14.7 us); 10 rows x 512 tokens 54 % (12.0 us); 10
// rows x 2,048 single tokens 61 % (33.5 us). 64 blocks, each alone on its SM, read 43 GB/s each
// (4 rows x 16,384 tokens, 63 %). Why 10 rows take 1.5 times as long as 8 is not measured; 80
// lists are more than the 66 pairs of SMs. With clusters of eight blocks a decode step with one row
// of 129,024 tokens, of which each of 8 KV heads attends to 12,902 in 32 layers, took 8.3 ms
// instead of 10.1 (policy hata, two H200).
#include "kernels/cuda/attention/attention_internal.h"
#include "kernels/cuda/attention/list_attention.cuh"
#include "kernels/cuda/common/launch.h"

namespace sluice::kernels::cuda {
namespace {

// Blocks of a cluster. Long lists of single tokens are few lists: wide clusters spread them over
// more multiprocessors.
constexpr int kNarrow = 2, kWide = 8;
constexpr int64_t kLongTokens = 8192;  // capacity from which on a list is long

// If `whole`, a slice lies in one block and the copy engine brings it as tiles.
template <int dim, int tiles, bool whole, int blocks>
__global__ void __launch_bounds__(32 * kListWarps, kListBlocksPerSm)
    ListKernel(const __grid_constant__ SparseAttentionParams p,
               const __grid_constant__ CUtensorMap map, ListShape shape) {
  using Shared = ListShared<dim>;
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int block = static_cast<int>(blockIdx.x) % blocks;
  const int heads = p.kv_head_end - p.kv_head_begin, group = p.heads / p.cache.kv_heads;
  const int row = static_cast<int>(blockIdx.x) / blocks / heads;
  const int kv_head = p.kv_head_begin + static_cast<int>(blockIdx.x) / blocks % heads;
  const int64_t list = int64_t{row} * p.cache.kv_heads + kv_head;
  LetNextKernelStart();
  if constexpr (whole) InitRing(shared, map, warp, lane);
  WaitForPriorKernels();                                   // kernels write the lists
  if (p.wanted != nullptr && p.wanted[list] == 0) return;  // so does every block of the cluster
  const auto from = [&](const int32_t* lists) {
    return lists == nullptr ? nullptr : lists + list * p.capacity;
  };
  const ListView view = {row, kv_head, from(p.units), from(p.places), p.capacity, p.counts[list]};
  uint32_t phases = 0;
  AttendToList<dim, tiles, whole, blocks>(p, map, shape, view, shared, block, phases);
  SyncCluster();
  WriteList<dim, blocks>(shared, group, block, p.o, p.lse,
                         int64_t{row} * p.heads + kv_head * group);
  LeaveCluster();
  AwaitCluster();  // the other blocks have read this one's memory
}

template <int dim, int tiles, bool whole, int blocks>
cudaError_t Launch(const SparseAttentionParams& p, cudaStream_t stream) {
  constexpr auto kKernel = ListKernel<dim, tiles, whole, blocks>;
  constexpr int kBytes = sizeof(ListShared<dim>);
  cudaError_t error = AllowRings(kKernel, kBytes);
  if (error != cudaSuccess) return error;
  CUtensorMap map{};
  if (whole) {
    error = MakeListMap(p.cache, &map);
    if (error != cudaSuccess) return error;
  }
  const int lists = p.rows * (p.kv_head_end - p.kv_head_begin);
  return LaunchClusters(kKernel, dim3(blocks * lists), dim3(32 * kListWarps), dim3(blocks), kBytes,
                        stream, p, map, ListShapeOf(p));
}

template <bool whole, int blocks>
cudaError_t LaunchLists(const SparseAttentionParams& p, cudaStream_t stream) {
  const bool two_tiles = p.heads / p.cache.kv_heads > kTileHeads;
  if (p.cache.head_dim == 128) {
    return two_tiles ? Launch<128, 2, whole, blocks>(p, stream)
                     : Launch<128, 1, whole, blocks>(p, stream);
  }
  return two_tiles ? Launch<64, 2, whole, blocks>(p, stream)
                   : Launch<64, 1, whole, blocks>(p, stream);
}

}  // namespace

cudaError_t LaunchSparseAttention(const SparseAttentionParams& p, cudaStream_t stream) {
  if (!IsSparseAttention(p)) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.kv_head_begin == p.kv_head_end) return cudaSuccess;
  if (!TakesLists(p, p.o)) return LaunchPlainSparseAttention(p, stream);
  if (p.unit_tokens % kSliceTokens == 0) return LaunchLists<true, kNarrow>(p, stream);
  // The lists' capacity decides, and not their lengths, so that a row's bits do not depend on its
  // batch.
  return int64_t{p.capacity} * p.unit_tokens > kLongTokens ? LaunchLists<false, kWide>(p, stream)
                                                           : LaunchLists<false, kNarrow>(p, stream);
}

}  // namespace sluice::kernels::cuda
