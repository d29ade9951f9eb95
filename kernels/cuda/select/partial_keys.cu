// InfiniGen's partial keys: keys times a projection of few columns, for a step's new token or,
// once per sequence, for all tokens that its home has.
//
// Bytes, in bulk: the keys once, over the link where the home is (134 MB a layer for 64K tokens
// of 8 KV heads of 128: 2.4 ms at 55 GB/s, 96 ms for 40 layers), and 0.3 of it to HBM for a rank
// of 38. The arithmetic, 2.5 G multiplications a layer, is hidden beneath that by 32 blocks. A
// step's row moves very little; the projection, 19 KB a head, is read before the row is there.
//
// A block has a KV head and up to 64 columns of its projection, in shared memory, and takes every
// n-th tile of 32 tokens of a row. The next tile's keys are on their way while it multiplies. An
// element is one chain over the elements of the key, wherever its token is.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/paged_rows.cuh"
#include "kernels/cuda/common/vectors.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTileTokens = 32;
constexpr int kMaxColumns = 64;  // columns of a block; a thread has 2 tokens and 4 columns
constexpr int kMaxKeyDim = 256;
constexpr int kBulkParts = 4;  // blocks that share a (row, head, columns)
constexpr int kPad = 4;        // floats between keys in shared memory

struct Shape {
  int tile_tokens;  // tokens of a tile: a block's or a divisor of it
  int columns;      // columns of a block, a multiple of 4
  int chunks;       // chunks into which the rank is cut
  bool pairs;       // partial rows are written two bf16 at a time
};

__device__ __forceinline__ void Unpack(const uint4& word, float (&to)[8], __nv_bfloat16) {
  const uint32_t pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(pairs[i] << 16);
    to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void Unpack(const uint4& word, float (&to)[4], float) {
  to[0] = __uint_as_float(word.x);
  to[1] = __uint_as_float(word.y);
  to[2] = __uint_as_float(word.z);
  to[3] = __uint_as_float(word.w);
}

// The tokens of a row that a block takes, tile by tile. `kWords` is the maximum number of 16-byte
// words of a tile that a thread moves.
template <typename T, int kWords>
struct KeyTiles {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));

  const PagedCache& c;
  const Shape& shape;
  int slot, head, first, last;  // positions, the last included
  int words_per_key;
  uint4 words[kWords];  // loads under way

  __device__ const uint4* Start(int tile) const {
    const int token = tile * shape.tile_tokens, block = token / c.block_tokens;
    return reinterpret_cast<const uint4*>(BlockKeys<T>(c, slot, block, head) +
                                          (token - block * c.block_tokens) * c.head_dim);
  }
  __device__ bool Wanted(int tile, int word) const {
    const int begin = max(first - tile * shape.tile_tokens, 0);
    const int end = min(last + 1 - tile * shape.tile_tokens, shape.tile_tokens);
    return word >= begin * words_per_key && word < end * words_per_key;
  }
  __device__ void Load(int tile, const uint4* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int word = i * kThreads + static_cast<int>(threadIdx.x);
      if (Wanted(tile, word)) words[i] = from[word];
    }
  }
  // Stores the keys as float32, kPad floats apart.
  __device__ void Put(int tile, float* keys) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int word = i * kThreads + static_cast<int>(threadIdx.x);
      if (!Wanted(tile, word)) continue;
      float values[kElements];
      Unpack(words[i], values, T());
      const int token = word / words_per_key;
      float4* to = reinterpret_cast<float4*>(keys + token * (c.head_dim + kPad) +
                                             (word - token * words_per_key) * kElements);
#pragma unroll
      for (int v = 0; v < kElements / 4; ++v) {
        to[v] = {values[4 * v], values[4 * v + 1], values[4 * v + 2], values[4 * v + 3]};
      }
    }
  }
};

// Stores four columns of a token's partial key, from column `column` on.
__device__ __forceinline__ void PutColumns(const PagedRows& rows, int slot, int token, int head,
                                           int column, bool pairs, const float (&v)[4]) {
  const int count = min(4, rows.dim - column);
  if (rows.type == DType::kFloat32) {
    float* to = RowAt<float>(rows, slot, token, head) + column;
    for (int i = 0; i < count; ++i) to[i] = v[i];
    return;
  }
  __nv_bfloat16* to = RowAt<__nv_bfloat16>(rows, slot, token, head) + column;
  if (pairs) {
    reinterpret_cast<uint32_t*>(to)[0] = PackBf16(v[0], v[1]);
    if (count > 2) reinterpret_cast<uint32_t*>(to)[1] = PackBf16(v[2], v[3]);
    return;
  }
  for (int i = 0; i < count; ++i) to[i] = __float2bfloat16_rn(v[i]);
}

// Computes sums[t][j] += keys[t] times columns j of `projection`, for two neighbouring keys and 4
// columns.
__device__ __forceinline__ void Multiply(const float* keys, int key_pitch, const float* projection,
                                         int columns, int dim, float (&sums)[2][4]) {
  for (int d = 0; d < dim; d += 4) {
    const float4 key[2] = {*reinterpret_cast<const float4*>(keys + d),
                           *reinterpret_cast<const float4*>(keys + key_pitch + d)};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float4 w = *reinterpret_cast<const float4*>(projection + (d + e) * columns);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float x = e == 0 ? key[t].x : e == 1 ? key[t].y : e == 2 ? key[t].z : key[t].w;
        sums[t][0] = fmaf(x, w.x, sums[t][0]);
        sums[t][1] = fmaf(x, w.y, sums[t][1]);
        sums[t][2] = fmaf(x, w.z, sums[t][2]);
        sums[t][3] = fmaf(x, w.w, sums[t][3]);
      }
    }
  }
}

// Grid: (KV heads x chunks of columns, rows, parts of a row).
template <typename T, int kWords>
__global__ void __launch_bounds__(kThreads)
    PartialKeysKernel(const __grid_constant__ PartialKeysParams p, const Shape shape) {
  extern __shared__ __align__(16) float shared[];
  LetNextKernelStart();
  const PagedCache& c = p.cache;
  const int dim = c.head_dim, thread = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.x) / shape.chunks;
  const int first_column = static_cast<int>(blockIdx.x) % shape.chunks * shape.columns;
  float* const projection = shared;  // [dim][columns]
  float* const keys = shared + dim * shape.columns;
  for (int i = thread; i < dim * shape.columns; i += kThreads) {
    const int d = i / shape.columns, column = first_column + i - d * shape.columns;
    projection[i] = column < p.partial.dim
                        ? p.projection[(int64_t{head} * dim + d) * p.partial.dim + column]
                        : 0.0f;
  }
  const int row = static_cast<int>(blockIdx.y), slot = p.slots[row];
  const int last = p.positions[row];
  const int first = p.first_positions != nullptr ? p.first_positions[row] : last;
  WaitForPriorKernels();
  if (slot < 0) return;

  KeyTiles<T, kWords> tiles{
      c, shape, slot, head, first, last, dim * static_cast<int>(sizeof(T)) / 16};
  const int step = static_cast<int>(gridDim.z);
  const int end = last / shape.tile_tokens + 1;
  int tile = first / shape.tile_tokens + static_cast<int>(blockIdx.z);
  if (tile >= end) return;
  tiles.Load(tile, tiles.Start(tile));
  // Starts the loads of the next tile, one tile ahead.
  const uint4* next = tile + step < end ? tiles.Start(tile + step) : nullptr;
  const int groups = shape.columns / 4;
  for (; tile < end; tile += step) {
    __syncthreads();  // the last tile's keys are free, and the projection has arrived
    tiles.Put(tile, keys);
    __syncthreads();
    if (tile + step < end) tiles.Load(tile + step, next);
    if (tile + 2 * step < end) next = tiles.Start(tile + 2 * step);
    const int pair = thread / groups, column = thread % groups * 4;
    const int token = tile * shape.tile_tokens + 2 * pair;
    if (2 * pair >= shape.tile_tokens || token > last || token + 1 < first) continue;
    float sums[2][4] = {};
    Multiply(keys + 2 * pair * (dim + kPad), dim + kPad, projection + column, shape.columns, dim,
             sums);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (token + t < first || token + t > last || first_column + column >= p.partial.dim) continue;
      PutColumns(p.partial, slot, token + t, head, first_column + column, shape.pairs, sums[t]);
    }
  }
}

template <typename T, int kWords>
cudaError_t Launch(const PartialKeysParams& p, const Shape& shape, cudaStream_t stream) {
  const PagedCache& c = p.cache;
  const auto bytes = [](int dim, int columns) {
    return static_cast<int>(sizeof(float)) * (dim * columns + kTileTokens * (dim + kPad));
  };
  const cudaError_t error = cudaFuncSetAttribute(PartialKeysKernel<T, kWords>,
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 bytes(kMaxKeyDim, kMaxColumns));
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(c.kv_heads * shape.chunks), static_cast<unsigned>(p.rows),
                  p.first_positions != nullptr ? kBulkParts : 1);
  return LaunchKernel(PartialKeysKernel<T, kWords>, grid, dim3(kThreads),
                      static_cast<size_t>(bytes(c.head_dim, shape.columns)), stream, p, shape);
}

}  // namespace

cudaError_t LaunchPartialKeys(const PartialKeysParams& p, cudaStream_t stream) {
  const PagedCache& c = p.cache;
  if (p.rows < 0 || p.rows > 65535 || c.kv_heads < 1 || c.head_dim < 16 || c.head_dim % 16 != 0 ||
      c.head_dim > kMaxKeyDim || c.block_tokens % kBlockTokensStep != 0 || c.block_tokens < 1 ||
      p.partial.dim < 1 || p.partial.rows_per_page < 1 || !HasAlignedKeys(c)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  Shape shape;
  shape.tile_tokens = c.block_tokens % kTileTokens == 0 ? kTileTokens : kBlockTokensStep;
  shape.chunks = (p.partial.dim + kMaxColumns - 1) / kMaxColumns;
  shape.columns = ((p.partial.dim + shape.chunks - 1) / shape.chunks + 3) / 4 * 4;
  const int64_t pitch = p.partial.dim * SizeOf(p.partial.type);
  shape.pairs = p.partial.type == DType::kBFloat16 && pitch % 4 == 0 &&
                reinterpret_cast<uintptr_t>(p.partial.base) % 4 == 0 &&
                p.partial.page_bytes % 4 == 0 && p.partial.head_bytes % 4 == 0;
  if (c.type == DType::kFloat32) return Launch<float, 8>(p, shape, stream);
  return c.head_dim <= 128 ? Launch<__nv_bfloat16, 2>(p, shape, stream)
                           : Launch<__nv_bfloat16, 4>(p, shape, stream);
}

}  // namespace sluice::kernels::cuda
