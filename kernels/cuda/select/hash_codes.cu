// Hash codes of keys and of queries, and the centres of keys (kernels/hash_params.h). A product is
// one chain of fused products over the elements of a vector, so that codes are those of the CPU's
// paths.
//
// Bytes of keys, in bulk: the keys once, over the link where the home is (134 MB a layer for 64K
// tokens of 8 KV heads of 128: 2.4 ms at 55 GB/s), and an eighth of it to HBM. The arithmetic, 17 G
// fused products a layer at 256 bits, takes two reads of shared memory for four of them: 1.2 ms on
// 132 multiprocessors at 1.75 GHz, so the link is the floor. A step's queries read the hash
// matrices once for every sixteen of them: 1 MB for 8 KV heads, from L2.
//
// A block has a KV head and 64 bits of its hash matrix, in shared memory (in bulk all bits, where
// there is room), and takes tiles of vectors: 16 keys of a row, the newest keys of 16 rows, or 16
// queries. A thread has a bit and a quarter of the tile. The blocks that share a tile of queries
// are a cluster, because a query's levels follow from its largest product.
//
// Centres read 64 KB a KV head of 128 elements, over the link: 10 us for 8 heads at 55 GB/s. Their
// sums are chains of additions, so the loads of 16 keys go ahead of them.
#include <cooperative_groups.h>

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
constexpr int kPad = 4;  // floats between vectors in shared memory
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kBulkParts = 32;  // blocks that share a (row, head, bits)
constexpr int kMaxShared = 160 * 1024;

int SharedBytes(int dim, int chunks = 1) {
  return static_cast<int>(sizeof(float)) * (chunks * dim * kBlockBits + kTile * (dim + kPad));
}

// Reads the block's columns of the matrix of a KV head. Columns behind the last one are 0.
__device__ void LoadHash(const float* of_head, int dim, int bits, int first_bit, float* hash) {
  for (int i = static_cast<int>(threadIdx.x); i < dim * kBlockBits; i += kThreads) {
    const int d = i / kBlockBits, bit = first_bit + i % kBlockBits;
    hash[i] = bit < bits ? of_head[int64_t{d} * bits + bit] : 0.0f;
  }
}

// Computes the products of this thread's four vectors with its column.
__device__ void Products(const float* hash, const float* tile, int dim, float (&sums)[kEach]) {
  const int bit = static_cast<int>(threadIdx.x) % kBlockBits;
  const int part = static_cast<int>(threadIdx.x) / kBlockBits;
  const float* const x = tile + part * kEach * (dim + kPad);
#pragma unroll
  for (float& sum : sums) sum = 0;
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
}

// Returns the word that this thread's warp has of the thread's vectors.
__device__ __forceinline__ int WordOfWarp(int first_bit) {
  return first_bit / 32 + static_cast<int>(threadIdx.x) / 32 % (kBlockBits / 32);
}

__device__ __forceinline__ float AsFloat(float x) { return x; }
__device__ __forceinline__ float AsFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

// The keys of a tile: tokens of one row one after another (in bulk), or the newest token of each of
// 16 rows.
template <typename T>
class KeyTile {
 public:
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));  // elements of a load
  static constexpr int kLoads = kTile * kMaxDim / kVector / kThreads;

  __device__ KeyTile(const HashKeysParams& params, int of_head, int of_row)
      : p(params), head(of_head), bulk_row(of_row) {}

  struct Key {
    int slot, token;  // a negative slot: the tile has no such key
  };
  // Returns the i-th key of the tile that begins at `begin`.
  __device__ Key At(int begin, int i) const {
    if (p.first_positions == nullptr) {
      const int row = begin + i;
      return row < p.rows ? Key{p.slots[row], p.positions[row]} : Key{-1, 0};
    }
    const int token = begin + i;
    const bool known = token >= p.first_positions[bulk_row] && token <= p.positions[bulk_row];
    return {known ? p.slots[bulk_row] : -1, token};
  }

  // Reads the tile that begins at `begin`: its loads are under way when this returns.
  __device__ void Fetch(int begin) {
    const PagedCache& c = p.cache;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int at = (static_cast<int>(threadIdx.x) + j * kThreads) * kVector;
      loaded[j] = {0, 0, 0, 0};
      if (at >= kTile * c.head_dim) continue;
      const Key key = At(begin, at / c.head_dim);
      if (key.slot < 0) continue;
      const T* const block = BlockKeys<T>(c, key.slot, key.token / c.block_tokens, head);
      loaded[j] = *reinterpret_cast<const uint4*>(block + key.token % c.block_tokens * c.head_dim +
                                                  at % c.head_dim);
    }
  }

  // Writes what was read, less the centres, as floats to shared memory.
  __device__ void Store(int begin, float* keys) const {
    const int dim = p.cache.head_dim;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int at = (static_cast<int>(threadIdx.x) + j * kThreads) * kVector;
      if (at >= kTile * dim) continue;
      const Key key = At(begin, at / dim);
      const float* const centres =
          key.slot < 0 || p.centres == nullptr
              ? nullptr
              : p.centres + (int64_t{key.slot} * p.cache.kv_heads + head) * dim + at % dim;
      const T* const values = reinterpret_cast<const T*>(&loaded[j]);
      float* const to = keys + at / dim * (dim + kPad) + at % dim;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        to[e] = key.slot < 0 ? 0.0f : AsFloat(values[e]) - (centres != nullptr ? centres[e] : 0.0f);
      }
    }
  }

 private:
  const HashKeysParams& p;
  const int head, bulk_row;
  uint4 loaded[kLoads];
};

// Grid: (KV heads x chunks of bits, rows, parts of a row) in bulk, or (KV heads x chunks of bits,
// tiles of rows). A block takes `own` chunks of 64 bits, so that the keys of a tile are read over
// the link once.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    HashKeysKernel(const __grid_constant__ HashKeysParams p, int chunks, int own) {
  extern __shared__ __align__(16) float shared[];
  LetNextKernelStart();
  const int dim = p.cache.head_dim, words = p.codes.dim, thread = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.x) * own / chunks;
  const int first_chunk = static_cast<int>(blockIdx.x) * own % chunks;
  float* const hash = shared;  // [own][dim][kBlockBits]
  float* const keys = shared + own * dim * kBlockBits;
  for (int c = 0; c < own; ++c) {
    LoadHash(p.hash + int64_t{head} * dim * words * 32, dim, words * 32,
             (first_chunk + c) * kBlockBits, hash + c * dim * kBlockBits);
  }
  const bool bulk = p.first_positions != nullptr;
  const int row = static_cast<int>(blockIdx.y);
  const int step = bulk ? static_cast<int>(gridDim.z) * kTile : kTile;
  const int first =
      bulk ? (p.first_positions[row] / kTile + static_cast<int>(blockIdx.z)) * kTile : row * kTile;
  const int end = bulk ? p.positions[row] + 1 : first + 1;
  WaitForPriorKernels();
  if (bulk && p.slots[row] < 0) return;
  KeyTile<T> tile(p, head, row);
  if (first < end) tile.Fetch(first);
  for (int begin = first; begin < end; begin += step) {
    __syncthreads();  // the last tile's keys are free, and the matrix has arrived
    tile.Store(begin, keys);
    __syncthreads();
    if (begin + step < end) tile.Fetch(begin + step);
    const int part = thread / kBlockBits, lane = thread % 32;
    for (int c = 0; c < own; ++c) {
      float products[kEach];
      Products(hash + c * dim * kBlockBits, keys, dim, products);
      const int word = WordOfWarp((first_chunk + c) * kBlockBits);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const uint32_t bits = __ballot_sync(kAllLanes, products[i] > 0);
        if (word >= words || lane != i) continue;
        const auto key = tile.At(begin, part * kEach + i);
        if (key.slot >= 0) RowAt<uint32_t>(p.codes, key.slot, key.token, head)[word] = bits;
      }
    }
    if (first_chunk != 0) continue;
    for (int i = thread / 32; i < kTile; i += kThreads / 32) {
      const float* const of_key = keys + i * (dim + kPad);
      float sum = 0;
      for (int d = lane; d < dim; d += 32) sum = fmaf(of_key[d], of_key[d], sum);
      for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(kAllLanes, sum, s);
      const auto key = tile.At(begin, i);
      if (lane != 0 || key.slot < 0) continue;
      const float length = sqrtf(sum);
      if (p.lengths.type == DType::kFloat32) {
        *RowAt<float>(p.lengths, key.slot, key.token, head) = length;
      } else {
        *RowAt<__nv_bfloat16>(p.lengths, key.slot, key.token, head) = __float2bfloat16_rn(length);
      }
    }
  }
}

// Grid: (KV heads x chunks of bits, tiles of the queries of a KV head in all rows), in clusters of
// the chunks of a head.
__global__ void __launch_bounds__(kThreads)
    HashQueriesKernel(const __grid_constant__ HashQueriesParams p, int chunks) {
  extern __shared__ __align__(16) float shared[];
  __shared__ float largest[kTile][kBlockBits / 32];  // of this block's bits, by warp
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
  float products[kEach];
  Products(hash, queries, dim, products);
  const int part = thread / kBlockBits, lane = thread % 32;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    float most = fabsf(products[i]);
    for (int s = 16; s > 0; s /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, s));
    if (lane == 0) largest[part * kEach + i][thread / 32 % (kBlockBits / 32)] = most;
  }
  const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  cluster.sync();
  const int word = WordOfWarp(first_bit);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    float most = 0;
    for (int c = 0; c < chunks; ++c) {
      const float* const of_block = cluster.map_shared_rank(&largest[part * kEach + i][0], c);
      for (int w = 0; w < kBlockBits / 32; ++w) most = fmaxf(most, of_block[w]);
    }
    const float scale = __fdiv_rn(static_cast<float>(p.levels), most);
    const float scaled =
        p.levels == 1 ? (products[i] > 0 ? 1.0f : -1.0f) : rintf(__fmul_rn(products[i], scale));
    const int level = scaled >= -8.0f && scaled <= 7.0f ? static_cast<int>(scaled) : 0;
    uint32_t planes[kHashPlanes];
#pragma unroll
    for (int n = 0; n < kHashPlanes; ++n) planes[n] = __ballot_sync(kAllLanes, level >> n & 1);
    const int at = begin + part * kEach + i, row = at / group;
    if (at >= all || word >= p.words || lane >= kHashPlanes || p.slots[row] < 0) continue;
    const int64_t query = int64_t{row} * p.heads + head * group + at % group;
    p.codes[(query * kHashPlanes + lane) * p.words + word] =
        static_cast<int32_t>(lane == 0   ? planes[0]
                             : lane == 1 ? planes[1]
                             : lane == 2 ? planes[2]
                                         : planes[3]);
  }
  cluster.sync();  // no block ends while another reads its `largest`
}

// Grid: (KV heads, rows); a thread has an element.
template <typename T>
__global__ void __launch_bounds__(kMaxDim)
    KeyCentresKernel(const __grid_constant__ KeyCentresParams p) {
  constexpr int kAtOnce = 16;
  const PagedCache& c = p.cache;
  const int head = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y);
  const int slot = p.slots[row], d = static_cast<int>(threadIdx.x);
  const int64_t tokens = int64_t{p.positions[row]} + 1;
  WaitForPriorKernels();
  LetNextKernelStart();
  if (slot < 0 || d >= c.head_dim) return;
  const int count = static_cast<int>(min(tokens, int64_t{kCentreKeys}));
  float sum = 0;
  for (int first = 0; first < count; first += kAtOnce) {
    float keys[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = static_cast<int>(min(first + i, count - 1) * tokens / count);
      const T* const block = BlockKeys<T>(c, slot, token / c.block_tokens, head);
      keys[i] = AsFloat(block[token % c.block_tokens * c.head_dim + d]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += first + i < count ? keys[i] : 0.0f;
  }
  p.centres[(int64_t{slot} * c.kv_heads + head) * c.head_dim + d] =
      __fdiv_rn(sum, static_cast<float>(count));
}

bool Fits(int head_dim, int words) {
  return head_dim >= 16 && head_dim % 16 == 0 && head_dim <= kMaxDim && words >= 1 &&
         words * 32 <= kMaxHashBits;
}

template <typename Kernel>
cudaError_t AllowShared(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
}

template <typename T>
cudaError_t LaunchKeys(const HashKeysParams& p, cudaStream_t stream) {
  const cudaError_t error = AllowShared(HashKeysKernel<T>);
  if (error != cudaSuccess) return error;
  const int chunks = (p.codes.dim * 32 + kBlockBits - 1) / kBlockBits;
  const bool bulk = p.first_positions != nullptr;
  const int own = bulk && SharedBytes(p.cache.head_dim, chunks) <= kMaxShared ? chunks : 1;
  const int y = bulk ? p.rows : (p.rows + kTile - 1) / kTile;
  const dim3 grid(static_cast<unsigned>(p.cache.kv_heads * chunks / own), static_cast<unsigned>(y),
                  bulk ? kBulkParts : 1);
  return LaunchKernel(HashKeysKernel<T>, grid, dim3(kThreads),
                      static_cast<size_t>(SharedBytes(p.cache.head_dim, own)), stream, p, chunks,
                      own);
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

cudaError_t LaunchKeyCentres(const KeyCentresParams& p, cudaStream_t stream) {
  const PagedCache& c = p.cache;
  if (p.rows < 0 || p.rows > 65535 || c.kv_heads < 1 || c.head_dim < 1 || c.head_dim > kMaxDim ||
      c.block_tokens < 1 || c.ring_blocks > 0 || c.head_tables != nullptr) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(c.kv_heads), static_cast<unsigned>(p.rows));
  const dim3 block(static_cast<unsigned>((c.head_dim + 31) / 32 * 32));
  return c.type == DType::kFloat32
             ? LaunchKernel(KeyCentresKernel<float>, grid, block, 0, stream, p)
             : LaunchKernel(KeyCentresKernel<__nv_bfloat16>, grid, block, 0, stream, p);
}

cudaError_t LaunchHashQueries(const HashQueriesParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads != 0 ||
      !Fits(p.head_dim, p.words) || (p.levels != 1 && p.levels != kMostHashLevels)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const cudaError_t error = AllowShared(HashQueriesKernel);
  if (error != cudaSuccess) return error;
  const int chunks = (p.words * 32 + kBlockBits - 1) / kBlockBits;
  const int tiles = (p.rows * (p.heads / p.kv_heads) + kTile - 1) / kTile;
  return LaunchClusters(
      HashQueriesKernel,
      dim3(static_cast<unsigned>(p.kv_heads * chunks), static_cast<unsigned>(tiles)),
      dim3(kThreads), dim3(static_cast<unsigned>(chunks)),
      static_cast<size_t>(SharedBytes(p.head_dim)), stream, p, chunks);
}

}  // namespace sluice::kernels::cuda
