// Hash codes of keys and of queries (kernels/hash_params.h). A bit is the sign of one chain of
// fused products over the elements of a vector, so that codes are those of the CPU's paths.
//
// Bytes of keys, in bulk: the keys once, over the link where the home is (134 MB a layer for 64K
// tokens of 8 KV heads of 128: 2.4 ms at 55 GB/s), and an eighth of it to HBM. The arithmetic, 17 G
// fused products a layer at 256 bits, takes two reads of shared memory for four of them: 1.2 ms on
// 132 multiprocessors at 1.75 GHz, so the link is the floor. A step's queries read the hash
// matrices once for every sixteen of them: 1 MB for 8 KV heads, from L2.
//
// A block has a KV head and 64 bits of its hash matrix, in shared memory, and takes tiles of
// vectors. A thread has a bit and a quarter of the tile.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/paged_rows.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kBlockBits = 64;
constexpr int kParts = 4;  // threads that share a bit
constexpr int kThreads = kBlockBits * kParts;
constexpr int kTile = 16;  // vectors
constexpr int kEach = kTile / kParts;
constexpr int kMaxDim = 256;
constexpr int kPad = 4;         // floats between vectors in shared memory
constexpr int kBulkParts = 16;  // blocks that share a (row, head, bits)

int SharedBytes(int dim) {
  return static_cast<int>(sizeof(float)) * (dim * kBlockBits + kTile * (dim + kPad));
}

// Reads the block's columns of the matrix of a KV head. Columns behind the last one are 0.
__device__ void LoadHash(const float* of_head, int dim, int bits, int first_bit, float* hash) {
  for (int i = static_cast<int>(threadIdx.x); i < dim * kBlockBits; i += kThreads) {
    const int d = i / kBlockBits, bit = first_bit + i % kBlockBits;
    hash[i] = bit < bits ? of_head[int64_t{d} * bits + bit] : 0.0f;
  }
}

// Computes a word of each of this thread's four vectors: lane b has bit b. The result is the
// warp's.
__device__ void Words(const float* hash, const float* tile, int dim, uint32_t (&words)[kEach]) {
  const int bit = static_cast<int>(threadIdx.x) % kBlockBits;
  const int part = static_cast<int>(threadIdx.x) / kBlockBits;
  const float* const x = tile + part * kEach * (dim + kPad);
  float sums[kEach] = {};
  for (int d = 0; d < dim; d += 4) {
    float4 of_vector[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      of_vector[i] = *reinterpret_cast<const float4*>(x + i * (dim + kPad) + d);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float w = hash[(d + e) * kBlockBits + bit];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float4& v = of_vector[i];
        sums[i] = fmaf(e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w, w, sums[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) words[i] = __ballot_sync(0xFFFFFFFFu, sums[i] > 0);
}

__device__ __forceinline__ float AsFloat(float x) { return x; }
__device__ __forceinline__ float AsFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

// Grid: (KV heads x chunks of bits, rows, parts of a row).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    HashKeysKernel(const __grid_constant__ HashKeysParams p, int chunks) {
  extern __shared__ __align__(16) float shared[];
  LetNextKernelStart();
  const PagedCache& c = p.cache;
  const int dim = c.head_dim, words = p.codes.dim, thread = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.x) / chunks;
  const int first_bit = static_cast<int>(blockIdx.x) % chunks * kBlockBits;
  float* const hash = shared;  // [dim][kBlockBits]
  float* const keys = shared + dim * kBlockBits;
  LoadHash(p.hash + int64_t{head} * dim * words * 32, dim, words * 32, first_bit, hash);
  const int row = static_cast<int>(blockIdx.y), slot = p.slots[row];
  const int last = p.positions[row];
  const int first = p.first_positions != nullptr ? p.first_positions[row] : last;
  WaitForPriorKernels();
  if (slot < 0) return;
  const int step = static_cast<int>(gridDim.z) * kTile;
  for (int begin = (first / kTile + static_cast<int>(blockIdx.z)) * kTile; begin <= last;
       begin += step) {
    // A tile lies in one block of the cache.
    const T* const from =
        BlockKeys<T>(c, slot, begin / c.block_tokens, head) + begin % c.block_tokens * dim;
    __syncthreads();  // the last tile's keys are free, and the matrix has arrived
    for (int i = thread; i < kTile * dim; i += kThreads) {
      const int token = begin + i / dim;
      const bool known = token >= first && token <= last;
      keys[i / dim * (dim + kPad) + i % dim] = known ? AsFloat(from[i]) : 0.0f;
    }
    __syncthreads();
    uint32_t of_vector[kEach];
    Words(hash, keys, dim, of_vector);
    const int word = first_bit / 32 + thread / 32 % (kBlockBits / 32);
    const int part = thread / kBlockBits, lane = thread % 32;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int token = begin + part * kEach + i;
      if (token < first || token > last || word >= words || lane != i) continue;
      RowAt<uint32_t>(p.codes, slot, token, head)[word] = of_vector[i];
    }
    if (first_bit != 0) continue;
    for (int i = thread / 32; i < kTile; i += kThreads / 32) {
      const float* const key = keys + i * (dim + kPad);
      float sum = 0;
      for (int d = lane; d < dim; d += 32) sum = fmaf(key[d], key[d], sum);
      for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, s);
      if (lane != 0 || begin + i < first || begin + i > last) continue;
      const float length = sqrtf(sum);
      if (p.lengths.type == DType::kFloat32) {
        *RowAt<float>(p.lengths, slot, begin + i, head) = length;
      } else {
        *RowAt<__nv_bfloat16>(p.lengths, slot, begin + i, head) = __float2bfloat16_rn(length);
      }
    }
  }
}

// Grid: (KV heads x chunks of bits, tiles of the queries of a KV head in all rows).
__global__ void __launch_bounds__(kThreads)
    HashQueriesKernel(const __grid_constant__ HashQueriesParams p, int chunks) {
  extern __shared__ __align__(16) float shared[];
  const int dim = p.head_dim, group = p.heads / p.kv_heads, thread = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.x) / chunks;
  const int first_bit = static_cast<int>(blockIdx.x) % chunks * kBlockBits;
  float* const hash = shared;
  float* const queries = shared + dim * kBlockBits;
  LoadHash(p.hash + int64_t{head} * dim * p.words * 32, dim, p.words * 32, first_bit, hash);
  WaitForPriorKernels();
  LetNextKernelStart();
  const int begin = static_cast<int>(blockIdx.y) * kTile, all = p.rows * group;
  for (int i = thread; i < kTile * dim; i += kThreads) {
    const int at = begin + i / dim, row = at / group;
    const bool known = at < all && p.slots[row] >= 0;
    queries[i / dim * (dim + kPad) + i % dim] =
        known ? p.q[row * p.q_stride + int64_t{head * group + at % group} * dim + i % dim] : 0.0f;
  }
  __syncthreads();
  uint32_t of_vector[kEach];
  Words(hash, queries, dim, of_vector);
  const int word = first_bit / 32 + thread / 32 % (kBlockBits / 32);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = begin + thread / kBlockBits * kEach + i, row = at / group;
    if (at >= all || word >= p.words || thread % 32 != i || p.slots[row] < 0) continue;
    p.codes[(int64_t{row} * p.heads + head * group + at % group) * p.words + word] =
        static_cast<int32_t>(of_vector[i]);
  }
}

bool Fits(int head_dim, int words) {
  return head_dim >= 16 && head_dim % 16 == 0 && head_dim <= kMaxDim && words >= 1 &&
         words * 32 <= kMaxHashBits;
}

template <typename Kernel>
cudaError_t AllowShared(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              SharedBytes(kMaxDim));
}

template <typename T>
cudaError_t LaunchKeys(const HashKeysParams& p, cudaStream_t stream) {
  const cudaError_t error = AllowShared(HashKeysKernel<T>);
  if (error != cudaSuccess) return error;
  const int chunks = (p.codes.dim * 32 + kBlockBits - 1) / kBlockBits;
  const dim3 grid(static_cast<unsigned>(p.cache.kv_heads * chunks), static_cast<unsigned>(p.rows),
                  p.first_positions != nullptr ? kBulkParts : 1);
  return LaunchKernel(HashKeysKernel<T>, grid, dim3(kThreads),
                      static_cast<size_t>(SharedBytes(p.cache.head_dim)), stream, p, chunks);
}

}  // namespace

cudaError_t LaunchHashKeys(const HashKeysParams& p, cudaStream_t stream) {
  const PagedCache& c = p.cache;
  if (p.rows < 0 || p.rows > 65535 || c.kv_heads < 1 || !Fits(c.head_dim, p.codes.dim) ||
      c.block_tokens < 1 || c.block_tokens % kTile != 0 || p.codes.rows_per_page < 1 ||
      p.lengths.rows_per_page < 1 || p.lengths.dim != 1) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  return c.type == DType::kFloat32 ? LaunchKeys<float>(p, stream)
                                   : LaunchKeys<__nv_bfloat16>(p, stream);
}

cudaError_t LaunchHashQueries(const HashQueriesParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads != 0 ||
      !Fits(p.head_dim, p.words)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const cudaError_t error = AllowShared(HashQueriesKernel);
  if (error != cudaSuccess) return error;
  const int chunks = (p.words * 32 + kBlockBits - 1) / kBlockBits;
  const int tiles = (p.rows * (p.heads / p.kv_heads) + kTile - 1) / kTile;
  return LaunchKernel(
      HashQueriesKernel,
      dim3(static_cast<unsigned>(p.kv_heads * chunks), static_cast<unsigned>(tiles)),
      dim3(kThreads), static_cast<size_t>(SharedBytes(p.head_dim)), stream, p, chunks);
}

}  // namespace sluice::kernels::cuda
