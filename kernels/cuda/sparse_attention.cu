// Attention of rows over lists of units: reads the K and V bytes of the lists' tokens once, 4 *
// head_dim bytes a (token, KV head) with a bf16 cache, wherever each lies. Floor: those bytes over
// the GPU's read rate.
//
// A list belongs to two blocks of four warps, a cluster; each of its eight warps takes every eighth
// slice of 16 tokens with an online softmax of its own, as in decode attention
// (attention_decode.cuh, whose tiles these are), and streams them through a ring of its own in
// shared memory. The warps meet once, at the list's end: both blocks read all eight results out of
// each other's shared memory, add them in the order of the warps, and write half of the elements
// each. So there is no scratch and no second kernel, the arithmetic knows nothing but the list, and
// two blocks fit an SM: up to 132 lists run at once, none waits for the start of another.
//
// Units may be single tokens, so every row of K and V is copied by its own address, 16 bytes a
// lane; neighbouring tokens of a block are neighbouring rows.
#include <bit>

#include "kernels/cuda/attention_decode.cuh"
#include "kernels/cuda/attention_internal.h"
#include "kernels/cuda/launch.h"
#include "kernels/unit_list.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarps = 4;   // of a block
constexpr int kBlocks = 2;  // of a cluster
constexpr int kListWarps = kBlocks * kWarps;
constexpr int kBlocksPerSm = 2;
constexpr int kMaxGroup = 16;

// What a launch adds to SparseAttentionParams: units and blocks are powers of two of tokens.
struct ListShape {
  int32_t unit_shift;
  int32_t block_shift;
  int32_t page_rows;  // of head_dim elements
};

template <int dim>
struct ListShared {
  static constexpr int kSliceBytes = 2 * DecodeShared<dim>::kHalfSlice;
  static constexpr int kStages = kRingBytes / kSliceBytes;

  // [warp][stage]: slices as DecodeShared::Offset has them. At the list's end the front of a warp's
  // ring holds its sums, [heads of the group][dim], columns permuted by DecodeShared::Column.
  unsigned char ring[kWarps][kRingBytes];
  Softmax states[kWarps][kMaxGroup];
};

// Where the tokens of a list lie. Lane t, and lane t + 16, of a warp look up token t of a slice.
// There are two lookups, its unit's place and that place's page; whoever copies slices asks for
// each one slice before it needs the answer.
class Addresses {
 public:
  __device__ Addresses(const SparseAttentionParams& p, const ListShape& shape, const UnitList& list,
                       int slot, int kv_head)
      : cache_(p.cache), shape_(shape), list_(list), capacity_(p.capacity), head_(kv_head) {
    table_ = p.cache.block_table + (slot < 0 ? 0 : slot) * p.cache.table_stride;
  }

  // The place of list token v's unit. May be asked of any v: what lies past the list's end means
  // nothing, and RowOf() does not look at it.
  __device__ int PlaceOf(int v) const {
    const int entry = v >> shape_.unit_shift;
    if (list_.places == nullptr || entry >= capacity_) return entry;
    return list_.places[entry];
  }

  // Its row of head_dim elements of the cache, K; -1 past the list's end.
  __device__ int RowOf(int v, int place) const {
    if (v >= list_.tokens) return -1;
    const int token = (place << shape_.unit_shift) + (v & ((1 << shape_.unit_shift) - 1));
    int block = token >> shape_.block_shift;
    if (cache_.ring_blocks > 0) block %= cache_.ring_blocks;
    return table_[block] * shape_.page_rows + (head_ << (shape_.block_shift + 1)) +
           (token & (cache_.block_tokens - 1));
  }

 private:
  const PagedCache& cache_;
  const ListShape& shape_;
  const UnitList& list_;
  const int capacity_;
  const int head_;
  const int32_t* table_;
};

// Starts the copies of a slice to `to`; `row` as RowOf() gave it to each lane. Rows of -1 become
// zeros: whatever lay there must not meet a weight of 0.
template <int dim>
__device__ void CopyRows(const PagedCache& c, int row, uint32_t to, int lane) {
  using Shared = DecodeShared<dim>;
  constexpr int kPieces = dim / 8;  // of a row, 16 bytes each
  const int piece = lane % kPieces;
  const auto* const base = static_cast<const __nv_bfloat16*>(c.base) + piece * 8;
#pragma unroll
  for (int first = 0; first < kSliceTokens; first += 32 / kPieces) {
    const int token = first + lane / kPieces;
    const int from = __shfl_sync(0xffffffffu, row, token);
    const __nv_bfloat16* key = base + int64_t{max(from, 0)} * dim;
    const uint32_t at = to + Shared::Offset(token, piece);
    CopyAsync16(at, key, from >= 0);
    CopyAsync16(at + Shared::kHalfSlice, key + c.block_tokens * dim, from >= 0);
  }
}

// Adds what the cluster's warps have handed over, and writes this block's share of it: four
// elements a thread.
template <int dim>
__device__ void WriteList(const SparseAttentionParams& p, ListShared<dim>& shared, int group,
                          int64_t first_item, int block) {
  constexpr int kStep = kBlocks * kWarps * 32;
  for (int i = block * kWarps * 32 + static_cast<int>(threadIdx.x); i < group * dim / 4;
       i += kStep) {
    const int head = i / (dim / 4), d = i % (dim / 4) * 4;
    Softmax state[kListWarps];
    float4 sum[kListWarps];
    float m = NegativeInfinity();
#pragma unroll
    for (int w = 0; w < kListWarps; ++w) {
      const float4 pair =
          LoadFromBlock(SharedAddress(&shared.states[w % kWarps][head & ~1]), w / kWarps);
      state[w] = head % 2 == 0 ? Softmax{pair.x, pair.y} : Softmax{pair.z, pair.w};
      const auto* const sums = reinterpret_cast<const float*>(shared.ring[w % kWarps]);
      sum[w] = LoadFromBlock(
          SharedAddress(sums + head * dim + DecodeShared<dim>::Column(head % kTileHeads, d)),
          w / kWarps);
      m = fmaxf(m, state[w].m);
    }
    Softmax total = {m, 0.0f};
    float4 o = {0, 0, 0, 0};
    const bool empty = m == NegativeInfinity();
#pragma unroll
    for (int w = 0; w < kListWarps; ++w) {
      const float weight = empty ? 0.0f : Exp2(state[w].m - m);
      total.l = fmaf(state[w].l, weight, total.l);
      o.x = fmaf(sum[w].x, weight, o.x);
      o.y = fmaf(sum[w].y, weight, o.y);
      o.z = fmaf(sum[w].z, weight, o.z);
      o.w = fmaf(sum[w].w, weight, o.w);
    }
    const float l = empty ? 1.0f : total.l;
    const int64_t item = first_item + head;
    *reinterpret_cast<float4*>(p.o + item * dim + d) = {o.x / l, o.y / l, o.z / l, o.w / l};
    if (d == 0) p.lse[item] = empty ? NegativeInfinity() : NaturalLse(total);
  }
}

template <int dim, int tiles>
__global__ void __launch_bounds__(32 * kWarps, kBlocksPerSm)
    ListKernel(const __grid_constant__ SparseAttentionParams p, ListShape shape) {
  using Shared = ListShared<dim>;
  constexpr int kStages = Shared::kStages;
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int block = static_cast<int>(blockIdx.x) % kBlocks;
  const int heads = p.kv_head_end - p.kv_head_begin, group = p.heads / p.cache.kv_heads;
  const int row = static_cast<int>(blockIdx.x) / kBlocks / heads;
  const int kv_head = p.kv_head_begin + static_cast<int>(blockIdx.x) / kBlocks % heads;
  const int64_t first_item = int64_t{row} * p.heads + kv_head * group;
  LetNextKernelStart();
  WaitForPriorKernels();  // Kernels write the lists.

  const UnitList list = UnitListOf(p, row, kv_head);
  const int tokens = static_cast<int>(list.tokens);
  const Addresses addresses(p, shape, list, p.slots[row], kv_head);
  // Slice i of this warp is token 16 i * kListWarps and those that follow of what is left to it.
  const int first = (block * kWarps + warp) * kSliceTokens;
  constexpr int kStep = kListWarps * kSliceTokens;
  const uint32_t ring = SharedAddress(shared.ring[warp]);
  int token = first + lane % kSliceTokens;  // of the lookups: this lane's of the next slice
  int place[kStages + 1], ahead[kStages + 1];
#pragma unroll
  for (int i = 0; i <= kStages; ++i) place[i] = addresses.PlaceOf(token + i * kStep);
#pragma unroll
  for (int i = 0; i <= kStages; ++i) ahead[i] = addresses.RowOf(token + i * kStep, place[i]);
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    if (first + i * kStep < tokens) {
      CopyRows<dim>(p.cache, ahead[i], ring + static_cast<uint32_t>(i * Shared::kSliceBytes), lane);
    }
    CommitCopies();
  }
  int next_row = ahead[kStages];
  token += (kStages + 1) * kStep;
  int next_place = addresses.PlaceOf(token);

  WarpAttention<dim, tiles> attention;
  attention.Clear();
  if (first < tokens) {
    attention.LoadQuery(p.q + row * p.q_stride + int64_t{kv_head} * group * dim, group,
                        p.scale * kLog2E, lane);
  }
  int stage = 0;
  for (int at = first; at < tokens; at += kStep) {
    const uint32_t slice = ring + static_cast<uint32_t>(stage * Shared::kSliceBytes);
    WaitForCopies<kStages - 1>();
    __syncwarp();  // Every lane's have landed.
    attention.AddSlice(slice, tokens - at, lane);
    __syncwarp();  // Every lane has read.
    if (at + kStages * kStep < tokens) CopyRows<dim>(p.cache, next_row, slice, lane);
    CommitCopies();
    next_row = addresses.RowOf(token, next_place);
    token += kStep;
    next_place = addresses.PlaceOf(token);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  auto* const sums = reinterpret_cast<float*>(shared.ring[warp]);
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) {
    attention.HandOver(tile, sums + tile * kTileHeads * dim,
                       shared.states[warp] + tile * kTileHeads,
                       min(group - tile * kTileHeads, kTileHeads), lane);
  }
  SyncCluster();
  WriteList<dim>(p, shared, group, first_item, block);
  LeaveCluster();
  AwaitCluster();  // The other block has read this one's memory.
}

template <int dim, int tiles>
cudaError_t Launch(const SparseAttentionParams& p, cudaStream_t stream) {
  constexpr auto kKernel = ListKernel<dim, tiles>;
  constexpr int kBytes = sizeof(ListShared<dim>);
  cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  const ListShape shape = {std::countr_zero(static_cast<uint32_t>(p.unit_tokens)),
                           std::countr_zero(static_cast<uint32_t>(p.cache.block_tokens)),
                           static_cast<int32_t>(p.cache.page_bytes / (2 * dim))};
  const int lists = p.rows * (p.kv_head_end - p.kv_head_begin);
  return LaunchClusters(kKernel, dim3(kBlocks * lists), dim3(32 * kWarps), dim3(kBlocks), kBytes,
                        stream, p, shape);
}

bool IsValid(const SparseAttentionParams& p) {
  const PagedCache& c = p.cache;
  return p.rows >= 0 && c.kv_heads > 0 && p.heads > 0 && p.heads % c.kv_heads == 0 &&
         c.head_dim > 0 && c.head_dim <= 256 && c.head_dim % 16 == 0 && c.block_tokens > 0 &&
         c.block_tokens % kBlockTokensStep == 0 && p.unit_tokens > 0 && p.capacity >= 0 &&
         0 <= p.kv_head_begin && p.kv_head_begin <= p.kv_head_end && p.kv_head_end <= c.kv_heads;
}

// What the tensor-core kernel computes; the rest is left to the plain one. The choice depends on
// the model and the unit alone, so a row's bits do not.
bool HasFastKernel(const SparseAttentionParams& p) {
  const PagedCache& c = p.cache;
  return c.type == DType::kBFloat16 && HasFastShape(p.heads / c.kv_heads, c.head_dim) &&
         std::has_single_bit(static_cast<uint32_t>(p.unit_tokens)) &&
         std::has_single_bit(static_cast<uint32_t>(c.block_tokens)) && p.q_stride % 2 == 0 &&
         AreAligned(8, p.q) && AreAligned(16, p.o, c.base);
}

}  // namespace

cudaError_t LaunchSparseAttention(const SparseAttentionParams& p, cudaStream_t stream) {
  if (!IsValid(p)) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.kv_head_begin == p.kv_head_end) return cudaSuccess;
  if (!HasFastKernel(p)) return LaunchPlainSparseAttention(p, stream);
  const bool two_tiles = p.heads / p.cache.kv_heads > kTileHeads;
  if (p.cache.head_dim == 128) {
    return two_tiles ? Launch<128, 2>(p, stream) : Launch<128, 1>(p, stream);
  }
  return two_tiles ? Launch<64, 2>(p, stream) : Launch<64, 1>(p, stream);
}

}  // namespace sluice::kernels::cuda
