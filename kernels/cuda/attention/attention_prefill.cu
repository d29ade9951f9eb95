// Prefill attention: rows of prompts in chunks, over a paged bf16 cache, on the tensor cores.
//
// A block computes one KV head for a tile of 128 (token, query head) pairs. The tokens are
// neighbouring rows of the step, each with all query heads of the KV head, so that K and V are
// read once per group. Rows of a tile that are consecutive tokens of one sequence form a run. A
// tile's runs are computed one after the other; a chunk of one prompt is one run, and ends of
// prompts meet in a few tiles. Two warpgroups take 64 pairs each over tiles of 64 keys, which are
// cut at multiples of 64 by token number and taken in order. Keys past a row's position have
// weight 0 and change nothing. So a row's bits depend neither on its neighbours nor on how its
// prompt was cut.
//
// Queries and weights are rounded to bf16 once; scores, sums and the softmax are float32.
// Operations: 4 head_dim per (row, query head, key up to the row's position). Measured on an
// H100, 32/8 heads of 128, beside 803 TFLOP/s of cuBLAS's bf16 products of 8192^3: 405 TFLOP/s
// for 8,192 rows of a prompt, 300 / 328 / 340 for its last 512 rows at a context of 8K / 32K /
// 128K (half of the blocks that the GPU holds).
#include "kernels/cuda/attention/attention_internal.h"
#include "kernels/cuda/attention/attention_plan.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/wgmma.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 2;
constexpr int kTileRows = 128;  // (token, query head) pairs of a block
constexpr int kTileKeys = 64;
constexpr int kStages = 2;
constexpr int kRowBytes = 128;  // row of one half of a head of 128, or of a head of 64
constexpr int kKeyHalfBytes = kTileKeys * kRowBytes;
constexpr int kQueryHalfBytes = kTileRows * kRowBytes;

template <int dim>
struct PrefillShared {
  static constexpr int kHalves = dim / 64;
  // [half of the head][row][64] bf16, swizzled as wgmma reads them.
  unsigned char query[kHalves * kQueryHalfBytes];
  unsigned char keys[kStages][kHalves * kKeyHalfBytes];
  unsigned char values[kStages][kHalves * kKeyHalfBytes];
  int slots[kTileRows];
  int positions[kTileRows];

  // Returns the offset of 16-byte piece `piece` of a row in halves of `half_bytes` bytes.
  __device__ static uint32_t Offset(int row, int piece, int half_bytes) {
    return static_cast<uint32_t>(piece / 8 * half_bytes + row * kRowBytes +
                                 ((piece % 8) ^ (row % 8)) * 16);
  }
};

// Consecutive tokens of one sequence: rows [begin, end) of a tile.
struct Run {
  int begin;
  int end;
  int slot;
  int first_position;
  int last_position;
};

template <int dim>
__device__ Run RunFrom(const PrefillShared<dim>& shared, int begin, int tokens) {
  Run run = {begin, begin + 1, shared.slots[begin], shared.positions[begin], 0};
  while (run.end < tokens && shared.slots[run.end] == run.slot &&
         shared.positions[run.end] == run.first_position + (run.end - begin)) {
    ++run.end;
  }
  run.last_position = run.first_position + (run.end - begin) - 1;
  return run;
}

// Loads the queries of the tile as bf16, with zeros past its rows.
template <int dim>
__device__ void LoadQueries(const AttentionParams& p, int first_row, int tokens, int kv_head,
                            PrefillShared<dim>& shared) {
  constexpr int kPieces = dim / 8;
  const int group = p.heads / p.cache.kv_heads;
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces, token = row / group;
    uint4 bits = {0, 0, 0, 0};
    if (token < tokens) {
      const float* q = p.q + (first_row + token) * p.q_stride +
                       int64_t{kv_head * group + row % group} * dim + piece * 8;
      bits = {PackBf16(q[0], q[1]), PackBf16(q[2], q[3]), PackBf16(q[4], q[5]),
              PackBf16(q[6], q[7])};
    }
    *reinterpret_cast<uint4*>(shared.query + shared.Offset(row, piece, kQueryHalfBytes)) = bits;
  }
}

// Starts the copies of keys [first, first + kTileKeys) and their values, with zeros past the run.
template <int dim>
__device__ void CopyTile(const AttentionParams& p, const Run& run, int kv_head, int first,
                         uint32_t keys, uint32_t values) {
  constexpr int kPieces = dim / 8, kRowsAtOnce = kThreads / kPieces;
  const PagedCache& c = p.cache;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll
  for (int i = 0; i < kTileKeys / kRowsAtOnce; ++i) {
    const int row = i * kRowsAtOnce + static_cast<int>(threadIdx.x) / kPieces;
    const bool valid = first + row <= run.last_position;
    const int token = valid ? first + row : 0, block = token / c.block_tokens;
    const int64_t page = c.block_table[run.slot * c.table_stride + block];
    const char* from =
        static_cast<const char*>(c.base) + page * c.page_bytes +
        (int64_t{2} * kv_head * c.block_tokens + token - block * c.block_tokens) * (dim * 2) +
        piece * 16;
    const uint32_t offset = PrefillShared<dim>::Offset(row, piece, kKeyHalfBytes);
    CopyAsync16(keys + offset, from, valid);
    CopyAsync16(values + offset, from + int64_t{c.block_tokens} * (dim * 2), valid);
  }
}

// A thread's part of the result: rows lane / 4 and 8 further of its warp's 16.
template <int dim>
struct PrefillState {
  float o[dim / 2];
  Softmax softmax[2];
};

// Turns the scores of 64 keys from `first_key` on into weights, in place, and rescales o.
// `last_key[i]` is the last key that counts for row i.
template <int dim>
__device__ __forceinline__ void Weigh(float (&score)[kTileKeys / 2], PrefillState<dim>& state,
                                      float scale, bool masked, int first_key,
                                      const int (&last_key)[2]) {
  const int column = first_key + static_cast<int>(threadIdx.x) % 4 * 2;
  if (masked) {
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      const int key = column + i / 4 * 8 + i % 2;
      if (key > last_key[i / 2 % 2]) score[i] = NegativeInfinity();
    }
  }
  float keep[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = NegativeInfinity();
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      if (i / 2 % 2 == r) m = fmaxf(m, score[i]);
    }
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    m = fmaxf(state.softmax[r].m, m * scale);
    keep[r] = Exp2(state.softmax[r].m - m);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      if (i / 2 % 2 != r) continue;
      score[i] = Exp2(fmaf(score[i], scale, -m));
      sum += score[i];
    }
    state.softmax[r] = {m, fmaf(state.softmax[r].l, keep[r], sum)};
  }
  if (!__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < dim / 2; ++i) state.o[i] *= keep[i / 2 % 2];
}

template <typename Out, int dim>
__device__ void WriteRow(const AttentionParams& p, int64_t item, const PrefillState<dim>& state,
                         int r, float l) {
  Out* to = static_cast<Out*>(p.out) + item * dim + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < dim / 2; ++i) {
    if (i / 2 % 2 == r) StoreAs(to + i / 4 * 8 + i % 2, state.o[i] / l);
  }
}

template <int dim>
__device__ void WriteZeros(const AttentionParams& p, int row, int kv_head) {
  const int group = p.heads / p.cache.kv_heads;
  const int64_t item = int64_t{row} * p.heads + kv_head * group;
  for (int i = static_cast<int>(threadIdx.x); i < group * dim; i += kThreads) {
    if (p.out_type == DType::kFloat32) {
      static_cast<float*>(p.out)[item * dim + i] = 0.0f;
    } else {
      StoreAs(static_cast<__nv_bfloat16*>(p.out) + item * dim + i, 0.0f);
    }
    if (p.lse != nullptr && i < group) p.lse[item + i] = NegativeInfinity();
  }
}

template <int dim>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    PrefillKernel(const __grid_constant__ AttentionParams p) {
  using Shared = PrefillShared<dim>;
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int group = p.heads / p.cache.kv_heads, tile_tokens = kTileRows / group;
  const int kv_head = static_cast<int>(blockIdx.x);
  // Later tokens see more keys, so the longest work comes first.
  const int first_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * tile_tokens;
  const int tokens = min(tile_tokens, p.rows - first_row);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int pair = warp * 16 + lane / 4;  // and pair + 8
  WaitForPriorKernels();
  LetNextKernelStart();
  if (threadIdx.x < tokens) {
    shared.slots[threadIdx.x] = p.slots[first_row + threadIdx.x];
    shared.positions[threadIdx.x] = p.positions[first_row + threadIdx.x];
  }
  LoadQueries<dim>(p, first_row, tokens, kv_head, shared);
  __syncthreads();

  const float scale = p.scale * kLog2E;
  const uint32_t query =
      SharedAddress(shared.query) + static_cast<uint32_t>(warp / 4 * 64 * kRowBytes);
  for (int begin = 0; begin < tokens;) {
    const Run run = RunFrom(shared, begin, tokens);
    begin = run.end;
    if (run.slot < 0) {
      for (int t = run.begin; t < run.end; ++t) WriteZeros<dim>(p, first_row + t, kv_head);
      continue;
    }
    int last_key[2];
    bool mine[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = (pair + 8 * r) / group;
      mine[r] = token >= run.begin && token < run.end;
      // Rows of other runs are computed unmasked, and dropped.
      last_key[r] = mine[r] ? run.first_position + token - run.begin : run.last_position;
    }
    PrefillState<dim> state;
    state.softmax[0] = state.softmax[1] = {NegativeInfinity(), 0.0f};
#pragma unroll
    for (int i = 0; i < dim / 2; ++i) state.o[i] = 0.0f;

    const int tiles = run.last_position / kTileKeys + 1;
    __syncthreads();  // the last run's tiles are free
    CopyTile<dim>(p, run, kv_head, 0, SharedAddress(shared.keys[0]),
                  SharedAddress(shared.values[0]));
    CommitCopies();
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % kStages;
      WaitForCopies<0>();
      PublishToAsyncProxy();
      __syncthreads();  // tile `tile` has arrived, and the one before it is free
      if (tile + 1 < tiles) {
        CopyTile<dim>(p, run, kv_head, (tile + 1) * kTileKeys,
                      SharedAddress(shared.keys[stage ^ 1]),
                      SharedAddress(shared.values[stage ^ 1]));
        CommitCopies();
      }
      const uint32_t keys = SharedAddress(shared.keys[stage]);
      const uint32_t values = SharedAddress(shared.values[stage]);
      float score[kTileKeys / 2];
      BeginProducts();
#pragma unroll
      for (int step = 0; step < dim / 16; ++step) {
        const uint32_t within = static_cast<uint32_t>(step % 4 * 32);
        MultiplyTiles(
            score,
            TileDescriptor(query + within + static_cast<uint32_t>(step / 4) * kQueryHalfBytes, 16),
            TileDescriptor(keys + within + static_cast<uint32_t>(step / 4) * kKeyHalfBytes, 16),
            step > 0);
      }
      CommitProducts();
      WaitForProducts<0>();
      const int first_key = tile * kTileKeys;
      Weigh<dim>(score, state, scale, first_key + kTileKeys - 1 > run.first_position, first_key,
                 last_key);
      uint32_t weights[kTileKeys / 16][4];
#pragma unroll
      for (int i = 0; i < kTileKeys / 4; ++i) {
        weights[i / 4][i % 4] = PackBf16(score[2 * i], score[2 * i + 1]);
      }
      BeginProducts();
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; ++step) {
        MultiplyRows(
            state.o, weights[step],
            TileDescriptor(values + static_cast<uint32_t>(step * 16 * kRowBytes), kKeyHalfBytes));
      }
      CommitProducts();
      WaitForProducts<0>();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = state.softmax[r].l;
      l += __shfl_xor_sync(0xffffffffu, l, 1);
      l += __shfl_xor_sync(0xffffffffu, l, 2);
      if (!mine[r]) continue;
      const int row = first_row + (pair + 8 * r) / group;
      const int64_t item = int64_t{row} * p.heads + kv_head * group + (pair + 8 * r) % group;
      p.out_type == DType::kFloat32 ? WriteRow<float, dim>(p, item, state, r, l)
                                    : WriteRow<__nv_bfloat16, dim>(p, item, state, r, l);
      if (lane % 4 == 0 && p.lse != nullptr) p.lse[item] = NaturalLse({state.softmax[r].m, l});
    }
  }
}

template <int dim>
cudaError_t Launch(const AttentionParams& p, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(PrefillKernel<dim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(sizeof(PrefillShared<dim>)));
  if (error != cudaSuccess) return error;
  const int tile_tokens = kTileRows / (p.heads / p.cache.kv_heads);
  const dim3 blocks(p.cache.kv_heads, (p.rows + tile_tokens - 1) / tile_tokens);
  return LaunchKernel(PrefillKernel<dim>, blocks, dim3(kThreads), sizeof(PrefillShared<dim>),
                      stream, p);
}

}  // namespace

cudaError_t LaunchPrefillAttention(const AttentionParams& p, cudaStream_t stream) {
  return p.cache.head_dim == 128 ? Launch<128>(p, stream) : Launch<64>(p, stream);
}

}  // namespace sluice::kernels::cuda
