// Attention of rows over lists of units. It reads the K and V bytes of the lists' tokens once, 4
// * head_dim bytes a (token, KV head) with a bf16 cache, wherever each lies. Floor: those bytes
// over the GPU's read rate.
//
// Two blocks of four warps, a cluster, compute one list (eight blocks where lists of single tokens
// may be long). Each of the eight warps takes every eighth slice of 16 tokens with an online
// softmax of its own, as in decode attention (attention_decode.cuh, whose tiles these are), and
// streams them through a ring of its own in shared memory. The warps meet once, at the list's end:
// both blocks read all eight results out of each other's shared memory, add them in the order of
// the warps, and write half of the elements each. So there is no scratch and no second kernel, and
// the arithmetic depends on nothing but the list.
//
// If units are whole slices, a slice is one tile of the copy engine. In other lists every token's
// rows are copied by their own address, 16 bytes a lane.
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
#include <bit>
#include <limits>

#include "kernels/cuda/attention/attention_decode.cuh"
#include "kernels/cuda/attention/attention_internal.h"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/tensor_map.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarps = 4;  // warps of a block
// Blocks of a cluster. Long lists of single tokens are few lists: wide clusters spread them over
// more multiprocessors.
constexpr int kNarrow = 2, kWide = 8;
constexpr int64_t kLongTokens = 8192;  // capacity from which on a list is long
constexpr int kBlocksPerSm = 2;
constexpr int kMaxGroup = 16;

// Fields that a launch adds to SparseAttentionParams. The sizes of units and blocks in tokens are
// powers of two.
struct ListShape {
  int32_t unit_shift;
  int32_t block_shift;
  int32_t page_rows;  // rows of head_dim elements
};

template <int dim>
struct ListShared {
  static constexpr int kSliceBytes = 2 * DecodeShared<dim>::kHalfSlice;
  static constexpr int kStages = kRingBytes / kSliceBytes;

  // [warp][stage]: slices in the layout of DecodeShared::Offset. At the list's end the front of a
  // warp's ring holds its sums, [heads of the group][dim], columns permuted by
  // DecodeShared::Column.
  unsigned char ring[kWarps][kRingBytes];
  Softmax states[kWarps][kMaxGroup];
  uint64_t landed[kWarps][kStages];  // barriers for the copies of a stage
};

// The addresses of a list's tokens. There are two lookups, the place of a token's unit and the
// page of that place. The warp that copies slices asks for each long before it needs the answer,
// so both are bare loads: no value is computed from an answer before it is used.
class Addresses {
 public:
  __device__ Addresses(const SparseAttentionParams& p, const ListShape& shape, int64_t list,
                       int slot, int kv_head)
      : shape_(shape),
        ring_blocks_(p.cache.ring_blocks),
        capacity_(p.capacity),
        page_rows_(p.cache.head_tables == nullptr ? shape.page_rows : 2 << shape.block_shift),
        head_row_(p.cache.head_tables == nullptr ? kv_head << (shape.block_shift + 1) : 0),
        table_(p.cache.block_table + max(slot, 0) * p.cache.table_stride +
               (p.cache.head_tables == nullptr ? 0 : p.cache.head_tables[kv_head])) {
    const int32_t* const places = p.places != nullptr ? p.places : p.units;
    places_ = places == nullptr ? nullptr : places + list * p.capacity;
  }

  // Returns the place of list token v's unit. v is arbitrary; past the list's end the result
  // means nothing.
  __device__ int PlaceOf(int v) const {
    int place = v >> shape_.unit_shift;
    if (places_ != nullptr && place < capacity_) place = places_[place];
    return place;
  }

  // Returns the page of that place, or its head's block. REQUIRES: v is in a unit of the list.
  __device__ int PageOf(int v, int place) const {
    int block = TokenOf(v, place) >> shape_.block_shift;
    if (ring_blocks_ > 0) block %= ring_blocks_;
    return table_[block];
  }

  // Returns the token's row of K, in rows of head_dim elements of the cache.
  __device__ int RowOf(int v, int place, int page) const {
    return page * page_rows_ + head_row_ + (TokenOf(v, place) & ((1 << shape_.block_shift) - 1));
  }

 private:
  __device__ int TokenOf(int v, int place) const {
    return (place << shape_.unit_shift) + (v & ((1 << shape_.unit_shift) - 1));
  }

  const ListShape shape_;
  const int ring_blocks_;
  const int capacity_;
  const int page_rows_, head_row_;
  const int32_t* const table_;
  const int32_t* places_;
};

// Returns how many tokens of a list's `count` units lie in the row's context. Units are in
// ascending order.
__device__ int TokensOf(const SparseAttentionParams& p, const ListShape& shape, int64_t list,
                        int count, int position) {
  if (p.units == nullptr) return count << shape.unit_shift;
  const int32_t* const units = p.units + list * p.capacity;
  for (; count > 0; --count) {
    const int left = position + 1 - (units[count - 1] << shape.unit_shift);
    if (left > 0) return ((count - 1) << shape.unit_shift) + min(left, 1 << shape.unit_shift);
  }
  return 0;
}

// Starts the copies of a slice's tokens one by one. Lane t of each half of the warp says in which
// row token t lies. Rows of -1 become zeros: stale values must not be multiplied even by a weight
// of 0.
template <int dim>
__device__ void CopyRows(const PagedCache& c, int row, uint32_t to, int lane) {
  using Shared = DecodeShared<dim>;
  constexpr int kPieces = dim / 8;  // pieces of a row, 16 bytes each
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

// Adds the sums that the cluster's warps have handed over, and writes this block's share of the
// result, four elements a thread.
template <int dim, int blocks>
__device__ void WriteList(const SparseAttentionParams& p, ListShared<dim>& shared, int group,
                          int64_t first_item, int block) {
  constexpr int kListWarps = blocks * kWarps, kStep = kListWarps * 32;
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

// If `whole`, a slice lies in one block and the copy engine brings it as tiles.
template <int dim, int tiles, bool whole, int blocks>
__global__ void __launch_bounds__(32 * kWarps, kBlocksPerSm)
    ListKernel(const __grid_constant__ SparseAttentionParams p,
               const __grid_constant__ CUtensorMap map, ListShape shape) {
  using Shared = ListShared<dim>;
  constexpr int kStages = Shared::kStages;
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int block = static_cast<int>(blockIdx.x) % blocks;
  const int heads = p.kv_head_end - p.kv_head_begin, group = p.heads / p.cache.kv_heads;
  const int row = static_cast<int>(blockIdx.x) / blocks / heads;
  const int kv_head = p.kv_head_begin + static_cast<int>(blockIdx.x) / blocks % heads;
  const int64_t list = int64_t{row} * p.cache.kv_heads + kv_head;
  const uint32_t ring = SharedAddress(shared.ring[warp]);
  const uint32_t landed = SharedAddress(shared.landed[warp]);
  LetNextKernelStart();
  if constexpr (whole) {
    if (threadIdx.x == 0) PrefetchMap(&map);
    if (lane < kStages) InitBarrier(landed + static_cast<uint32_t>(lane * 8), 1);
    PublishBarriers();
    __syncwarp();
  }
  WaitForPriorKernels();                                   // kernels write the lists
  if (p.wanted != nullptr && p.wanted[list] == 0) return;  // so does every block of the cluster

  // Slice i of this warp begins with list token first + i * kStep. This lane looks up token lane
  // % 16 of each slice. Loads that depend on nothing come first, then the loads that depend on
  // those.
  const int slot = p.slots[row], position = p.positions[row];
  const int listed = p.counts[list];
  const Addresses addresses(p, shape, list, slot, kv_head);
  constexpr int kStep = blocks * kWarps * kSliceTokens;
  const int first = (block * kWarps + warp) * kSliceTokens;
  int v = first + lane % kSliceTokens;
  int place[kStages + 2], page[kStages + 1] = {};
#pragma unroll
  for (int i = 0; i < kStages + 2; ++i) place[i] = addresses.PlaceOf(v + i * kStep);
  const int count = slot < 0 ? 0 : min(max(listed, 0), p.capacity);
#pragma unroll
  for (int i = 0; i < kStages + 1; ++i) {
    if (v + i * kStep < count << shape.unit_shift) {
      page[i] = addresses.PageOf(v + i * kStep, place[i]);
    }
  }
  const int tokens = TokensOf(p, shape, list, count, position);

  const auto copy = [&](int begin, int of, int of_place, int of_page, int stage) {
    if (begin >= tokens) return;
    const uint32_t to = ring + static_cast<uint32_t>(stage * Shared::kSliceBytes);
    const int from = addresses.RowOf(of, of_place, of_page);
    if constexpr (whole) {
      if (lane == 0) {
        CopyTiles<dim>(map, from, p.cache.block_tokens, to,
                       landed + static_cast<uint32_t>(stage * 8));
      }
    } else {
      CopyRows<dim>(p.cache, of < tokens ? from : -1, to, lane);
    }
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    copy(first + i * kStep, v + i * kStep, place[i], page[i], i);
    if constexpr (!whole) CommitCopies();
  }
  // Place and page of the slice that is copied next, and the place of the one after it.
  int next_place = place[kStages], next_page = page[kStages], place_after = place[kStages + 1];
  v += kStages * kStep;

  WarpAttention<dim, tiles> attention;
  attention.Clear();
  if (first < tokens) {
    attention.LoadQuery(p.q + row * p.q_stride + int64_t{kv_head} * group * dim, group,
                        p.scale * kLog2E, lane);
  }
  int stage = 0;
  uint32_t phases = 0;  // parity of the barriers, one bit per stage
  for (int at = first; at < tokens; at += kStep) {
    const auto offset = static_cast<uint32_t>(stage * Shared::kSliceBytes);
    if constexpr (whole) {
      WaitBarrier(landed + static_cast<uint32_t>(stage * 8), phases >> stage & 1);
      phases ^= 1u << stage;
      if (tokens - at < kSliceTokens) {
        ClearValues<dim>(shared.ring[warp] + offset, tokens - at, lane);
      }
    } else {
      WaitForCopies<kStages - 1>();
      __syncwarp();  // every lane's copies have landed
    }
    attention.AddSlice(ring + offset, tokens - at, lane);
    __syncwarp();  // every lane has read
    copy(at + kStages * kStep, v, next_place, next_page, stage);
    if constexpr (!whole) CommitCopies();
    v += kStep;
    next_place = place_after;
    if (v < tokens) next_page = addresses.PageOf(v, next_place);
    place_after = addresses.PlaceOf(v + kStep);
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
  WriteList<dim, blocks>(p, shared, group, int64_t{row} * p.heads + kv_head * group, block);
  LeaveCluster();
  AwaitCluster();  // the other blocks have read this one's memory
}

template <int dim, int tiles, bool whole, int blocks>
cudaError_t Launch(const SparseAttentionParams& p, cudaStream_t stream) {
  constexpr auto kKernel = ListKernel<dim, tiles, whole, blocks>;
  constexpr int kBytes = sizeof(ListShared<dim>);
  cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  CUtensorMap map{};
  if (whole) {
    const int32_t rows = std::numeric_limits<int32_t>::max();  // as far as the block tables reach
    error = MakeTileMap(p.cache.base, rows, dim, kSliceTokens, &map);
    if (error != cudaSuccess) return error;
  }
  const ListShape shape = {std::countr_zero(static_cast<uint32_t>(p.unit_tokens)),
                           std::countr_zero(static_cast<uint32_t>(p.cache.block_tokens)),
                           static_cast<int32_t>(p.cache.page_bytes / (2 * dim))};
  const int lists = p.rows * (p.kv_head_end - p.kv_head_begin);
  return LaunchClusters(kKernel, dim3(blocks * lists), dim3(32 * kWarps), dim3(blocks), kBytes,
                        stream, p, map, shape);
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

bool IsValid(const SparseAttentionParams& p) {
  const PagedCache& c = p.cache;
  return p.rows >= 0 && c.kv_heads > 0 && p.heads > 0 && p.heads % c.kv_heads == 0 &&
         c.head_dim > 0 && c.head_dim <= 256 && c.head_dim % 16 == 0 && c.block_tokens > 0 &&
         c.block_tokens % kBlockTokensStep == 0 && p.unit_tokens > 0 && p.capacity >= 0 &&
         0 <= p.kv_head_begin && p.kv_head_begin <= p.kv_head_end && p.kv_head_end <= c.kv_heads;
}

// Returns true for shapes that the tensor-core kernel computes; the plain kernel takes the rest.
// The choice depends on the model and the unit alone, so that a row's bits do not depend on its
// batch.
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
  if (p.unit_tokens % kSliceTokens == 0) return LaunchLists<true, kNarrow>(p, stream);
  // The lists' capacity decides, and not their lengths, so that a row's bits do not depend on its
  // batch.
  return int64_t{p.capacity} * p.unit_tokens > kLongTokens ? LaunchLists<false, kWide>(p, stream)
                                                           : LaunchLists<false, kNarrow>(p, stream);
}

}  // namespace sluice::kernels::cuda
