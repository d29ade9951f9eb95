// Quest's digests: the least and the largest value of each element of K over a block's tokens, and
// the key codes of complete blocks, which read the keys once more, from L2.
//
// A warp makes the digest of one (block, KV head). Lanes take 16 bytes of a key each, several
// keys at a time, and 8 such loads are under way in every lane.
//
// The kernel moves a block's keys, block_tokens * head_dim elements, and writes two rows of
// head_dim. Decode rows: 8 KB a (row, KV head) of Qwen3-14B, 0.7 MB for 10 rows: one memory
// latency, 2.5 us measured on an H200. A whole prompt of 64K comes over the link once, 134 MB a
// layer: the floor is 2.44 ms at 55 GB/s, measured 2.61. A grid of kBulkBlocks a (row, KV head)
// has some MB under way.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/paged_rows.cuh"
#include "kernels/cuda/select/least_largest.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kBulkBlocks = 16;
constexpr int kAtOnce = 8;

// Writes the digest of `tokens` >= 1 keys from `keys` on to `out`. All 32 lanes call it.
template <typename T>
__device__ void DigestBlock(const T* keys, int tokens, int dim, T* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int pieces = dim * static_cast<int>(sizeof(T)) / 16;  // pieces of a key
  const auto* from = reinterpret_cast<const uint4*>(keys);
  auto* to = reinterpret_cast<uint4*>(out);
  for (int first = 0; first < pieces; first += 32) {
    const int columns = min(32, pieces - first);
    const int keys_at_once = 32 / columns;
    const int column = lane % columns;
    uint4 least, largest;
    least.x = least.y = least.z = least.w = Word<T>::kInfinity;
    largest.x = largest.y = largest.z = largest.w = Word<T>::kMinusInfinity;
    for (int begin = lane / columns; begin < tokens; begin += kAtOnce * keys_at_once) {
      uint4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {  // a key may be taken twice
        const int token = min(begin + i * keys_at_once, tokens - 1);
        v[i] = from[token * pieces + first + column];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        KeepLeast<T>(least, v[i]);
        KeepLargest<T>(largest, v[i]);
      }
    }
    __syncwarp();
    // Reduces the values of all lanes of one column into the first of them.
    for (int i = 1; i < keys_at_once; ++i) {
      KeepLeast<T>(least, FromLane(least, i * columns + column));
      KeepLargest<T>(largest, FromLane(largest, i * columns + column));
    }
    if (lane < columns) {
      to[first + column] = least;
      to[pieces + first + column] = largest;
    }
  }
}

// Writes the key codes of a complete block, whose digest lies at `digest`. All 32 lanes call it,
// each for one element of every 32: a vote makes a word of their bits.
template <typename T>
__device__ void CodeBlock(const DigestParams& p, const T* keys, const T* digest, int slot,
                          int block, int head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int dim = p.cache.head_dim, words = KeyCodeWords(dim), tokens = p.cache.block_tokens;
  __syncwarp();  // the digest is there
  for (int w = 0; w < words; ++w) {
    const int d = 32 * w + lane;
    const float least = d < dim ? static_cast<float>(digest[d]) : 0.0f;
    const float largest = d < dim ? static_cast<float>(digest[dim + d]) : 0.0f;
    const float middle = (least + largest) * 0.5f, quarter = (largest - least) * 0.25f;
    for (int first = 0; first < tokens; first += kAtOnce) {
      float key[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int token = min(first + i, tokens - 1);
        key[i] = d < dim ? static_cast<float>(keys[token * dim + d]) : 0.0f;
      }
      for (int i = 0; i < kAtOnce && first + i < tokens; ++i) {
        const bool is_upper = key[i] > middle;
        const bool is_outer = is_upper ? key[i] > middle + quarter : key[i] <= middle - quarter;
        const unsigned upper = __ballot_sync(0xffffffffu, d < dim && is_upper);
        const unsigned outer = __ballot_sync(0xffffffffu, d < dim && is_outer);
        if (lane == 0) {
          uint32_t* const row = RowAt<uint32_t>(p.codes, slot, block * tokens + first + i, head);
          row[w] = upper;
          row[words + w] = outer;
        }
      }
    }
  }
}

// Grid: (thread blocks that share a row's digests, KV heads, rows).
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    DigestKernel(const __grid_constant__ DigestParams p) {
  WaitForPriorKernels();
  LetNextKernelStart();
  const int row = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
  const int slot = p.slots[row];
  if (slot < 0) return;
  const PagedCache& c = p.cache;
  const int last = p.positions[row];
  const int first = p.first_positions != nullptr ? p.first_positions[row] : last;
  const int warps = static_cast<int>(gridDim.x * blockDim.x) / 32;
  const int warp = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32;
  for (int block = first / c.block_tokens + warp; block <= last / c.block_tokens; block += warps) {
    const int tokens = min(c.block_tokens, last + 1 - block * c.block_tokens);
    const T* const keys = BlockKeys<T>(c, slot, block, head);
    T* const digest = RowAt<T>(p.digests, slot, block, head);
    DigestBlock(keys, tokens, c.head_dim, digest);
    if (p.codes.base != nullptr && tokens == c.block_tokens) {
      CodeBlock(p, keys, digest, slot, block, head);
    }
  }
}

}  // namespace

cudaError_t LaunchDigest(const DigestParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.digests.type != p.cache.type || p.digests.dim != 2 * p.cache.head_dim ||
      !HasAlignedKeys(p.cache) || !HasAlignedRows(p.digests) ||
      (p.codes.base != nullptr && p.codes.dim != 2 * KeyCodeWords(p.cache.head_dim))) {
    return cudaErrorInvalidValue;
  }
  const auto kernel =
      p.cache.type == DType::kFloat32 ? DigestKernel<float> : DigestKernel<__nv_bfloat16>;
  const bool bulk = p.first_positions != nullptr;
  return LaunchKernel(kernel, dim3(bulk ? kBulkBlocks : 1, p.cache.kv_heads, p.rows),
                      dim3(bulk ? 32 * kWarps : 32), 0, stream, p);
}

}  // namespace sluice::kernels::cuda
