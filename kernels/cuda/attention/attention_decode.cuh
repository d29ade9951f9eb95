// Decode attention over a paged bf16 cache: the body of the kernel. attention_plan.cuh says which
// block computes what, and why a row's bits do not depend on its batch.
//
// A block of 8 warps works on one split at a time. Each warp takes every eighth slice of 16
// tokens with an online softmax of its own, and streams its slices through a ring of its own in
// shared memory. So the warps meet only at the end of a split, and copies run ahead across
// splits, heads and rows: 192 KiB of copies are in flight per block (128 KiB with two tiles of
// heads of 128, see attention_kept.cuh), with one block per SM. The copy engine brings the slices
// as tiles of 16 tokens by 64 columns, permuted so that ldmatrix reads them without bank conflicts.
//
// The scores of up to 8 query heads are one tensor-core tile of 16 rows. Rows 0-7 hold the upper
// 8 bits of the queries' mantissas and rows 8-15 the next 8. The sum of both products, which one
// thread holds, is the score to about 2^-17 of |q||k|. The softmax weights are split likewise
// before they are multiplied by V. So bf16 tensor cores give nearly float32 results, with rows
// that would be idle otherwise. The query heads of a bundle's rows (attention_plan.cuh) are heads
// of its tiles alike, each with the tokens up to its row's position.
#pragma once

#include "kernels/cuda/attention/attention_kept.cuh"
#include "kernels/cuda/attention/attention_plan.cuh"
#include "kernels/cuda/common/launch.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kSliceTokens = 16;
// slices of a split
inline constexpr int kWarpSlices = kSplitTokens / (kSliceTokens * kDecodeWarps);
inline constexpr int kRingBytes = 24 << 10;  // ring of one warp

// The shared memory of a block. The layout of a slice does not depend on `tiles`.
template <int dim, int tiles = 1>
struct DecodeShared {
  static constexpr bool kKept = kKeptInShared<dim, tiles>;
  static constexpr int kTileBytes = kSliceTokens * 128;       // 64 columns
  static constexpr int kHalfSlice = kTileBytes * (dim / 64);  // K, or V
  static constexpr int kStages = (kKept ? 16 << 10 : kRingBytes) / (2 * kHalfSlice);
  static constexpr int kHeads = tiles * kTileHeads;

  // [warp][stage]{K, V}[64 columns][16 rows][64] bf16; rows are swizzled by the copy engine.
  unsigned char ring[kDecodeWarps][kStages * 2 * kHalfSlice];
  uint64_t landed[kDecodeWarps][kStages];  // barriers for the copies of a stage
  Softmax states[kDecodeWarps][kHeads];
  DecodePlan plan;
  // Sums that warps hand over at the end of a split: [tile][warp][heads of the tile][dim], columns
  // permuted by Column(). The launch asks for as many bytes as they need.
  __align__(16) float sums[1];

  // Lies behind the sums of kHeads heads, if kKept.
  struct Kept {
    QueryOperand queries[tiles][dim / 16][32];
    KeptStates<dim, tiles> states;
  };

  // `heads` are those of a bundle and a KV head, at most kHeads.
  static constexpr size_t Bytes(int heads) {
    return offsetof(DecodeShared, sums) +
           sizeof(float) * kDecodeWarps * dim * (kKept ? kHeads : heads) +
           (kKept ? sizeof(Kept) : 0);
  }
  __device__ float* Sums(int tile) { return sums + tile * kTileHeads * kDecodeWarps * dim; }
  __device__ Kept& kept() { return *reinterpret_cast<Kept*>(Sums(tiles)); }

  // Returns the offset of 16-byte piece `piece` of a row.
  __device__ static uint32_t Offset(int row, int piece) {
    return static_cast<uint32_t>(piece / 8 * kTileBytes + row * 128 +
                                 ((piece % 8) ^ (row % 8)) * 16);
  }
  // Returns the permuted column. Rows of `sums` start in the same bank, and the permutation
  // spreads neighbouring rows over the banks.
  __device__ static int Column(int row, int column) { return column ^ ((row & 3) << 3); }
};

// Walks the slices of one warp in a block's range, kWarpSlices per split.
struct SliceCursor {
  int row, rows;  // the bundle: its first row, and how many
  int head, split, splits, slice;
  int slot, position;  // of the bundle's last row
  int left;            // splits left, including this one
  int32_t page;        // page of the slice; used by the cursor that copies

  __device__ void Enter(const AttentionParams& p, const WorkRange& range, int new_row) {
    row = new_row;
    rows = range.Rows(row);
    splits = range.Splits(row);
    slot = p.slots[row];
    position = p.positions[row + rows - 1];
  }
  __device__ void Start(const AttentionParams& p, const WorkRange& range, int begin, int end) {
    left = end - begin;
    slice = 0;
    if (left <= 0) return;
    Enter(p, range, range.RowOf(begin));
    const int unit = begin - range.FirstUnit(row);
    head = unit / splits;
    split = unit % splits;
  }
  __device__ void NextSplit(const AttentionParams& p, const WorkRange& range) {
    --left;
    if (++split < splits) return;
    split = 0;
    if (++head < p.cache.kv_heads) return;
    head = 0;
    if (left > 0) Enter(p, range, range.RowOf(range.End(row)));
  }
  __device__ int Token(int warp) const {
    return split * kSplitTokens + (slice * kDecodeWarps + warp) * kSliceTokens;
  }
};

// The part of the kernel that one warp does alone: tiles of scores and their weighted values. With
// `bundles`, heads may be those of several rows.
template <int dim, int tiles, bool bundles = false,
          typename Queries = QueriesInRegisters<dim, tiles>>
struct WarpAttention {
  using Shared = DecodeShared<dim>;
  static constexpr int kSteps = dim / 16;

  Queries queries;
  float o[tiles][dim / 8][4];
  Softmax state[tiles];  // state of query head lane / 4; l is this lane's share
  int behind[tiles];     // tokens by which that head's row ends before the bundle's last one

  // Loads the queries of a bundle of `rows` rows of `group` heads, times scale and log2(e), with
  // zeros for the tile's other rows. `q` are those of the first row, and the next row's lie
  // `stride` behind.
  __device__ void LoadQuery(const float* q, int64_t stride, int rows, int group, float scale,
                            int lane) {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int head = tile * kTileHeads + lane / 4, known = min(head, rows * group - 1);
      const int row = bundles ? known / group : 0;
      behind[tile] = rows - 1 - row;
      const float* from = q + row * stride + (known - row * group) * dim + 2 * (lane % 4);
      queries.Take(tile, from, head < rows * group ? scale : 0.0f);
    }
  }

  __device__ void Clear() {
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      state[tile] = {NegativeInfinity(), 0.0f};
#pragma unroll
      for (int n = 0; n < dim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[tile][n][i] = 0.0f;
      }
    }
  }

  // Adds the slice at `keys` (a shared address). Tokens from `valid` on do not count for the
  // bundle's last row; an earlier row has fewer.
  __device__ void AddSlice(uint32_t keys, int valid, int lane) {
    const uint32_t values = keys + Shared::kHalfSlice;
    float even[tiles][2][4] = {}, odd[tiles][2][4] = {};  // two chains each, for half the latency
    {
      const int row = lane / 16 * 8 + lane % 8;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t k[4];
        LoadMatrices(k, Piece(keys, row, step, lane / 8 % 2));
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
          auto& sum = step % 2 == 0 ? even[tile] : odd[tile];
          const QueryOperand& query = queries.At(tile, step);
          MultiplyAdd(sum[0], query.part, k[0], k[1]);
          MultiplyAdd(sum[1], query.part, k[2], k[3]);
        }
      }
    }
    uint32_t weights[tiles][4];
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const int of_head = bundles ? valid - behind[tile] : valid;
      Weigh(tile, even[tile], odd[tile], of_head, lane, weights[tile]);
    }
    const int row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int pair = 0; pair < dim / 16; ++pair) {
      uint32_t v[4];
      LoadMatricesTransposed(v, Piece(values, row, pair, lane / 16));
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        MultiplyAdd(o[tile][2 * pair], weights[tile], v[0], v[1]);
        MultiplyAdd(o[tile][2 * pair + 1], weights[tile], v[2], v[3]);
      }
    }
  }

  // Stores this warp's sums of `heads` heads of one tile for the other warps.
  __device__ void HandOver(int tile, float* sums, Softmax* states, int heads, int lane) {
    float l = state[tile].l;
    l += __shfl_xor_sync(0xffffffffu, l, 1);
    l += __shfl_xor_sync(0xffffffffu, l, 2);
    const int head = lane / 4;
    if (head >= heads) return;
    if (lane % 4 == 0) states[head] = {state[tile].m, l};
#pragma unroll
    for (int n = 0; n < dim / 8; ++n) {
      float2* to = reinterpret_cast<float2*>(sums + head * dim +
                                             Shared::Column(head, n * 8 + 2 * (lane % 4)));
      *to = {o[tile][n][0] + o[tile][n][2], o[tile][n][1] + o[tile][n][3]};
    }
  }

 private:
  // Returns the address of 16-byte piece 2 * step + half of a row of the keys or values at `from`.
  __device__ static uint32_t Piece(uint32_t from, int row, int step, int half) {
    if constexpr (Queries::kInShared) {
      // This is the same, and a lane keeps one offset rather than one for each step.
      const auto flip = static_cast<uint32_t>(step % 4 * 32);
      return ((from + Shared::Offset(row, half)) ^ flip) +
             static_cast<uint32_t>(step / 4 * Shared::kTileBytes);
    }
    return from + Shared::Offset(row, step * 2 + half);
  }

  // Turns scores into weights: the online softmax of one tile, and the A operand of the second
  // product.
  __device__ void Weigh(int tile, const float (&even)[2][4], const float (&odd)[2][4], int valid,
                        int lane, uint32_t (&weights)[4]) {
    float score[2][2];
    float largest = NegativeInfinity();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        score[j][i] = (even[j][i] + odd[j][i]) + (even[j][i + 2] + odd[j][i + 2]);
        if (8 * j + 2 * (lane % 4) + i >= valid) score[j][i] = NegativeInfinity();
        largest = fmaxf(largest, score[j][i]);
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const float m = fmaxf(state[tile].m, largest);
    const float base = bundles ? FiniteBase(m) : m;
    const float keep = Exp2(state[tile].m - base);
    state[tile].m = m;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) score[j][i] = Exp2(score[j][i] - base);
    }
    const float sum = (score[0][0] + score[0][1]) + (score[1][0] + score[1][1]);
    state[tile].l = fmaf(state[tile].l, keep, sum);
    SplitBf16(score[0][0], score[0][1], weights[0], weights[1]);
    SplitBf16(score[1][0], score[1][1], weights[2], weights[3]);
    if (!__any_sync(0xffffffffu, keep != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < dim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[tile][n][i] *= keep;
    }
  }
};

// Looks up the page of the slice at the cursor, one slice before its copies start.
__device__ inline void FindPage(const AttentionParams& p, const DecodeShape& shape, SliceCursor& at,
                                int warp) {
  const int token = at.Token(warp);
  if (at.left <= 0 || token > at.position) return;
  const int block =
      static_cast<int>(__umulhi(static_cast<uint32_t>(token), shape.block_reciprocal));
  at.page = p.cache.block_table[at.slot * p.cache.table_stride + block];
}

// Starts the copies of a slice into `to`. Its keys begin at row `row` of the cache,
// `block_tokens` rows before its values. The copies report to barrier `landed`. One lane alone
// calls it.
template <int dim>
__device__ __forceinline__ void CopyTiles(const CUtensorMap& cache, int row, int block_tokens,
                                          uint32_t to, uint32_t landed) {
  using Shared = DecodeShared<dim>;
  ArriveExpecting(landed, 2 * Shared::kHalfSlice);
#pragma unroll
  for (int half = 0; half < dim / 64; ++half) {
    CopyTile(to + static_cast<uint32_t>(half * Shared::kTileBytes), &cache, half * 64, row, landed,
             kEvictFirst);
    CopyTile(to + static_cast<uint32_t>(Shared::kHalfSlice + half * Shared::kTileBytes), &cache,
             half * 64, row + block_tokens, landed, kEvictFirst);
  }
}

// As above, for the slice at the cursor.
template <int dim>
__device__ void CopySlice(const CUtensorMap& cache, const PagedCache& c, const DecodeShape& shape,
                          const SliceCursor& at, int token, uint32_t to, uint32_t landed) {
  const int block =
      static_cast<int>(__umulhi(static_cast<uint32_t>(token), shape.block_reciprocal));
  const int row =
      static_cast<int>(at.page) * shape.page_rows + (2 * at.head - block) * c.block_tokens + token;
  CopyTiles<dim>(cache, row, c.block_tokens, to, landed);
}

// Zeroes the values of a slice's tokens from `valid` on: stale values must not be multiplied even
// by a weight of 0. The copy engine may write there again afterwards.
template <int dim>
__device__ void ClearValues(unsigned char* slice, int valid, int lane) {
  using Shared = DecodeShared<dim>;
  for (int i = lane; i < kSliceTokens * (dim / 8); i += 32) {
    const int row = i / (dim / 8), piece = i % (dim / 8);
    if (row < valid) continue;
    *reinterpret_cast<uint4*>(slice + Shared::kHalfSlice + Shared::Offset(row, piece)) = {0, 0, 0,
                                                                                          0};
  }
  PublishToAsyncProxy();
  __syncwarp();
}

}  // namespace sluice::kernels::cuda
