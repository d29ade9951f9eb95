// Attention of a cluster of blocks of four warps over one list of units, or a part of one, which
// SparseAttention and PullAttention share.
//
// Each of a cluster's warps takes every so many slices of 16 tokens with an online softmax of its
// own, as in decode attention (attention_decode.cuh, whose tiles these are), and streams them
// through a ring of its own in shared memory. The warps meet once, at the list's end: all blocks
// read all results out of each other's shared memory, add them in the order of the warps, and write
// an equal share of the elements each. So there is no scratch and no second kernel, and the
// arithmetic depends on nothing but the list.
//
// If units are whole slices, a slice is one tile of the copy engine. In other lists every token's
// rows are copied by their own address, 16 bytes a lane.
#pragma once

#include <bit>
#include <limits>

#include "kernels/cuda/attention/attention_decode.cuh"
#include "kernels/cuda/attention/attention_internal.h"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/sparse_params.h"

namespace sluice::kernels::cuda {

inline constexpr int kListWarps = 4;  // warps of a block
inline constexpr int kListMaxGroup = 16;
inline constexpr int kListBlocksPerSm = 2;

// Fields that a launch adds to SparseAttentionParams. The sizes of units and blocks in tokens are
// powers of two.
struct ListShape {
  int32_t unit_shift;
  int32_t block_shift;
  int32_t page_rows;  // rows of head_dim elements
};

// A list, or a part of one, of a row and KV head. `units` and `places` are as in
// SparseAttentionParams, but begin with the list's or the part's.
struct ListView {
  int row;
  int kv_head;
  const int32_t* units;
  const int32_t* places;
  int32_t capacity;  // entries that may be read
  int32_t count;     // entries that are listed; outside [0, capacity] it is clamped
};

template <int dim>
struct ListShared {
  static constexpr int kSliceBytes = 2 * DecodeShared<dim>::kHalfSlice;
  static constexpr int kStages = kRingBytes / kSliceBytes;

  // [warp][stage]: slices in the layout of DecodeShared::Offset. At the list's end the front of a
  // warp's ring holds its sums, [heads of the group][dim], columns permuted by
  // DecodeShared::Column.
  unsigned char ring[kListWarps][kRingBytes];
  Softmax states[kListWarps][kListMaxGroup];
  uint64_t landed[kListWarps][kStages];  // barriers for the copies of a stage
};

// The addresses of a list's tokens. There are two lookups, the place of a token's unit and the
// page of that place. The warp that copies slices asks for each long before it needs the answer,
// so both are bare loads: no value is computed from an answer before it is used.
class Addresses {
 public:
  __device__ Addresses(const SparseAttentionParams& p, const ListShape& shape, const ListView& list,
                       int slot)
      : shape_(shape),
        ring_blocks_(p.cache.ring_blocks),
        capacity_(list.capacity),
        page_rows_(p.cache.head_tables == nullptr ? shape.page_rows : 2 << shape.block_shift),
        head_row_(p.cache.head_tables == nullptr ? list.kv_head << (shape.block_shift + 1) : 0),
        table_(p.cache.block_table + max(slot, 0) * p.cache.table_stride +
               (p.cache.head_tables == nullptr ? 0 : p.cache.head_tables[list.kv_head])),
        places_(list.places != nullptr ? list.places : list.units) {}

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
  const int32_t* const places_;
};

// Returns how many tokens of a list's `count` units lie in the row's context. Units are in
// ascending order.
__device__ inline int TokensOf(const ListView& list, const ListShape& shape, int count,
                               int position) {
  if (list.units == nullptr) return count << shape.unit_shift;
  for (; count > 0; --count) {
    const int left = position + 1 - (list.units[count - 1] << shape.unit_shift);
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
// result, four elements a thread, to items [first_item, first_item + group) of all_o [][dim] and
// all_lse.
template <int dim, int blocks>
__device__ void WriteList(ListShared<dim>& shared, int group, int block, float* all_o,
                          float* all_lse, int64_t first_item) {
  constexpr int kWarps = blocks * kListWarps, kStep = kWarps * 32;
  for (int i = block * kListWarps * 32 + static_cast<int>(threadIdx.x); i < group * dim / 4;
       i += kStep) {
    const int head = i / (dim / 4), d = i % (dim / 4) * 4;
    Softmax state[kWarps];
    float4 sum[kWarps];
    float m = NegativeInfinity();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 pair =
          LoadFromBlock(SharedAddress(&shared.states[w % kListWarps][head & ~1]), w / kListWarps);
      state[w] = head % 2 == 0 ? Softmax{pair.x, pair.y} : Softmax{pair.z, pair.w};
      const auto* const sums = reinterpret_cast<const float*>(shared.ring[w % kListWarps]);
      sum[w] = LoadFromBlock(
          SharedAddress(sums + head * dim + DecodeShared<dim>::Column(head % kTileHeads, d)),
          w / kListWarps);
      m = fmaxf(m, state[w].m);
    }
    Softmax total = {m, 0.0f};
    float4 o = {0, 0, 0, 0};
    const bool empty = m == NegativeInfinity();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = empty ? 0.0f : Exp2(state[w].m - m);
      total.l = fmaf(state[w].l, weight, total.l);
      o.x = fmaf(sum[w].x, weight, o.x);
      o.y = fmaf(sum[w].y, weight, o.y);
      o.z = fmaf(sum[w].z, weight, o.z);
      o.w = fmaf(sum[w].w, weight, o.w);
    }
    const float l = empty ? 1.0f : total.l;
    const int64_t item = first_item + head;
    *reinterpret_cast<float4*>(all_o + item * dim + d) = {o.x / l, o.y / l, o.z / l, o.w / l};
    if (d == 0) all_lse[item] = empty ? NegativeInfinity() : NaturalLse(total);
  }
}

// Makes the barriers of this warp's ring, for lists of whole slices.
template <int dim>
__device__ __forceinline__ void InitRing(ListShared<dim>& shared, const CUtensorMap& map, int warp,
                                         int lane) {
  if (threadIdx.x == 0) PrefetchMap(&map);
  if (lane < ListShared<dim>::kStages) {
    InitBarrier(SharedAddress(&shared.landed[warp][lane]), 1);
  }
  PublishBarriers();
  __syncwarp();
}

// Computes this warp's share of a list and hands its sums over for WriteList(), which the caller
// puts behind a barrier of the cluster. `block` is this block's rank. If `whole`, a slice lies in
// one block of the cache and the copy engine brings it as tiles; then `phases` has the parity of
// the ring's barriers, one bit per stage, which is 0 before the first list. Every copy has landed
// when the function returns, so that the next list may begin with the first stage.
template <int dim, int tiles, bool whole, int blocks>
__device__ __forceinline__ void AttendToList(const SparseAttentionParams& p, const CUtensorMap& map,
                                             const ListShape& shape, const ListView& list,
                                             ListShared<dim>& shared, int block, uint32_t& phases) {
  using Shared = ListShared<dim>;
  constexpr int kStages = Shared::kStages;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = p.heads / p.cache.kv_heads;
  const uint32_t ring = SharedAddress(shared.ring[warp]);
  const uint32_t landed = SharedAddress(shared.landed[warp]);

  // Slice i of this warp begins with list token first + i * kStep. This lane looks up token lane
  // % 16 of each slice. Loads that depend on nothing come first, then the loads that depend on
  // those.
  const int slot = p.slots[list.row], position = p.positions[list.row];
  const Addresses addresses(p, shape, list, slot);
  constexpr int kStep = blocks * kListWarps * kSliceTokens;
  const int first = (block * kListWarps + warp) * kSliceTokens;
  int v = first + lane % kSliceTokens;
  int place[kStages + 2], page[kStages + 1] = {};
#pragma unroll
  for (int i = 0; i < kStages + 2; ++i) place[i] = addresses.PlaceOf(v + i * kStep);
  const int count = slot < 0 ? 0 : min(max(list.count, 0), list.capacity);
#pragma unroll
  for (int i = 0; i < kStages + 1; ++i) {
    if (v + i * kStep < count << shape.unit_shift) {
      page[i] = addresses.PageOf(v + i * kStep, place[i]);
    }
  }
  const int tokens = TokensOf(list, shape, count, position);

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
    attention.LoadQuery(p.q + list.row * p.q_stride + int64_t{list.kv_head} * group * dim,
                        p.q_stride,
                        /*rows=*/1, group, p.scale * kLog2E, lane);
  }
  int stage = 0;
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
}

// Host side.

// Returns true if the shapes are within the contract and the limits of the GPU's operators.
inline bool IsSparseAttention(const SparseAttentionParams& p) {
  const PagedCache& c = p.cache;
  return p.rows >= 0 && c.kv_heads > 0 && p.heads > 0 && p.heads % c.kv_heads == 0 &&
         c.head_dim > 0 && c.head_dim <= 256 && c.head_dim % 16 == 0 && c.block_tokens > 0 &&
         c.block_tokens % kBlockTokensStep == 0 && p.unit_tokens > 0 && p.capacity >= 0 &&
         0 <= p.kv_head_begin && p.kv_head_begin <= p.kv_head_end && p.kv_head_end <= c.kv_heads;
}

// Returns true for shapes that AttendToList() computes, with results at `o`; the plain kernels take
// the rest. The choice depends on the model and the unit alone, so that a row's bits do not depend
// on its batch.
inline bool TakesLists(const SparseAttentionParams& p, const float* o) {
  const PagedCache& c = p.cache;
  return c.type == DType::kBFloat16 && HasFastShape(p.heads / c.kv_heads, c.head_dim) &&
         std::has_single_bit(static_cast<uint32_t>(p.unit_tokens)) &&
         std::has_single_bit(static_cast<uint32_t>(c.block_tokens)) && p.q_stride % 2 == 0 &&
         AreAligned(8, p.q) && AreAligned(16, o, c.base);
}

inline ListShape ListShapeOf(const SparseAttentionParams& p) {
  return {std::countr_zero(static_cast<uint32_t>(p.unit_tokens)),
          std::countr_zero(static_cast<uint32_t>(p.cache.block_tokens)),
          static_cast<int32_t>(p.cache.page_bytes / (2 * p.cache.head_dim))};
}

// Describes the cache as rows of head_dim elements, as far as the block tables reach.
inline cudaError_t MakeListMap(const PagedCache& c, CUtensorMap* map) {
  return MakeTileMap(c.base, std::numeric_limits<int32_t>::max(), c.head_dim, kSliceTokens, map);
}

// Lets a kernel have `bytes` of shared memory.
template <typename Kernel>
cudaError_t AllowRings(Kernel kernel, int bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

}  // namespace sluice::kernels::cuda
