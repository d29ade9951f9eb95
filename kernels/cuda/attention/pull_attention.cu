// PullAttention: clusters of two blocks of four warps attend to parts of lists that an arbiter on
// the host grants them, one after the other, as list_attention.cuh says. The K and V are read over
// the link. Floor: the bytes of the granted parts, 4 * head_dim a (token, KV head) with a bf16
// cache, over the link's rate.
//
// Lists of whole slices of 16 tokens take this way; the plain kernel (attention_plain.cu) takes
// every other shape.
#include "kernels/cuda/attention/list_attention.cuh"
#include "kernels/cuda/attention/pull_dialogue.cuh"
#include "kernels/list_parts.h"
#include "kernels/pull_part.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kBlocks = 2;  // blocks of a cluster, which is a puller

template <int dim>
struct PullShared {
  ListShared<dim> list;
  int2 part;  // the PulledPart of this turn
};

// The memory of both blocks passes from part to part. One turn has two barriers of the cluster, A
// and B, both with release and acquire:
// - `part` is written by the speaker before A, and read by all between A and B. So the speaker,
//   which writes it again behind B, does not overtake a reader.
// - The rings are the copy engine's between A and B; every warp has waited for all copies into its
//   own ring when it hands its sums over there (AttendToList). Between B and the next A both blocks
//   read the sums of both, and behind that A the copy engine writes the rings again. Its writes are
//   of another proxy than the sums, which are written and read as ordinary memory. So every thread
//   ends its reads with a proxy fence, which also covers its sums, and the fence and A together put
//   both before the next copies.
// - `states` is ordinary memory: written between A and B, read between B and the next A.
// - The barriers of the rings are never made again: their phases go on from part to part.
// - A part's results are complete in both blocks at the next A, behind which its bit is set. No
//   block leaves while another may touch its memory, because nothing touches it behind the last A.
//
// The next kernel may start when this one ends. To let it start before would only give it
// multiprocessors to wait on, while other branches could use them.
template <int dim, int tiles>
__global__ void __launch_bounds__(32 * kListWarps, kListBlocksPerSm)
    PullKernel(const __grid_constant__ PullAttentionParams p,
               const __grid_constant__ CUtensorMap map, ListShape shape) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<PullShared<dim>*>(memory);
  const SparseAttentionParams& a = p.attention;
  const int block = static_cast<int>(blockIdx.x) % kBlocks;
  const bool speaks = block == 0 && threadIdx.x == 0;
  InitRing(shared.list, map, static_cast<int>(threadIdx.x) / 32,
           static_cast<int>(threadIdx.x) % 32);
  WaitForPriorKernels();
  SyncCluster();  // the other block has begun, so that its memory may be written
  PullDialogue dialogue(p, static_cast<int>(blockIdx.x) / kBlocks);
  if (speaks) dialogue.Begin();
  PulledPart before = {-1, -1};
  uint32_t phases = 0;
  while (true) {
    if (speaks) {
      const PulledPart next = dialogue.Next();
#pragma unroll
      for (int rank = 0; rank < kBlocks; ++rank) {
        StoreToBlock(SharedAddress(&shared.part), rank, {next.list, next.part});
      }
    }
    __syncwarp();
    SyncCluster();  // A
    if (speaks && before.list >= 0) TakePart(p, before);
    const PulledPart now = {shared.part.x, shared.part.y};
    if (now.list < 0) return;
    __syncwarp();

    const PartUnits units = UnitsOfPart(p, now.list, now.part);
    const int32_t* const listed = a.units + int64_t{now.list} * a.capacity + units.first;
    const ListView view = {now.list / a.cache.kv_heads,
                           now.list % a.cache.kv_heads,
                           listed,
                           nullptr,
                           units.count,
                           units.count};
    AttendToList<dim, tiles, true, kBlocks>(a, map, shape, view, shared.list, block, phases);
    __syncwarp();
    SyncCluster();  // B
    WriteList<dim, kBlocks>(shared.list, a.heads / a.cache.kv_heads, block, p.part_o, p.part_lse,
                            PartItem(p, now.list, now.part));
    PublishClusterToAsyncProxy();
    before = now;
  }
}

template <int dim, int tiles>
cudaError_t Launch(const PullAttentionParams& p, cudaStream_t stream) {
  constexpr auto kKernel = PullKernel<dim, tiles>;
  constexpr int kBytes = sizeof(PullShared<dim>);
  cudaError_t error = AllowRings(kKernel, kBytes);
  if (error != cudaSuccess) return error;
  CUtensorMap map{};
  error = MakeListMap(p.attention.cache, &map);
  if (error != cudaSuccess) return error;
  return LaunchClusters(kKernel, dim3(static_cast<unsigned>(kBlocks * p.pullers)),
                        dim3(32 * kListWarps), dim3(kBlocks), kBytes, stream, p, map,
                        ListShapeOf(p.attention));
}

}  // namespace

cudaError_t LaunchPullAttention(const PullAttentionParams& p, cudaStream_t stream) {
  const SparseAttentionParams& a = p.attention;
  if (!IsSparseAttention(a) || a.units == nullptr || a.kv_head_begin != 0 ||
      a.kv_head_end != a.cache.kv_heads || p.least_units < 1 || p.most_parts < 1 ||
      p.most_parts > kMostListParts || p.pullers < 0 || p.pullers > kMostPullers) {
    return cudaErrorInvalidValue;
  }
  if (p.pullers == 0) return cudaSuccess;
  if (!TakesLists(a, p.part_o) || a.unit_tokens % kSliceTokens != 0) {
    return LaunchPlainPullAttention(p, stream);
  }
  const bool two_tiles = a.heads / a.cache.kv_heads > kTileHeads;
  if (a.cache.head_dim == 128) {
    return two_tiles ? Launch<128, 2>(p, stream) : Launch<128, 1>(p, stream);
  }
  return two_tiles ? Launch<64, 2>(p, stream) : Launch<64, 1>(p, stream);
}

}  // namespace sluice::kernels::cuda
