// Digests of blocks at Fluxion's four levels.
//
// A thread block takes one chunk of 128 tokens of a KV head at a time. Each of its warps makes the
// digest of 16 tokens, with loads of 16 bytes of which up to 8 are under way in every lane. These 8
// digests meet in shared memory, and those of the larger blocks are made from them there, so that
// keys are read once.
//
// The kernel moves 256 * head_dim bytes of a chunk of bf16 keys and writes 60 * head_dim. A decode
// row has a chunk in one step of 128; its other steps end at a look at its position. How many
// chunks a whole prompt has is known on the device alone: thread blocks of a fixed grid take every
// kBulkBlocks-th one.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/paged_rows.cuh"
#include "kernels/cuda/select/least_largest.cuh"
#include "kernels/fluxion_params.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kUnitTokens = LevelTokens(0);
constexpr int kUnits = kFluxionLargestBlock / kUnitTokens;  // units of a chunk
constexpr int kThreads = 32 * kUnits;
constexpr int kBulkBlocks = 16;
constexpr int kAtOnce = 8;
constexpr int kMaxShared = 48 << 10;

// Writes the digest of the unit of keys from `keys` on to both `out` and `shared`. A key has
// `pieces` pieces of 16 bytes. All 32 lanes call it.
template <typename T>
__device__ void DigestUnit(const uint4* keys, int pieces, uint4* out, uint4* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = 0; first < pieces; first += 32) {
    const int columns = min(32, pieces - first);
    const int keys_at_once = 32 / columns;
    const int column = lane % columns;
    uint4 least, largest;
    least.x = least.y = least.z = least.w = Word<T>::kInfinity;
    largest.x = largest.y = largest.z = largest.w = Word<T>::kMinusInfinity;
    for (int begin = lane / columns; begin < kUnitTokens; begin += kAtOnce * keys_at_once) {
      uint4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int token = begin + i * keys_at_once;
        if (token < kUnitTokens) v[i] = keys[token * pieces + first + column];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i * keys_at_once >= kUnitTokens) continue;
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
    if (lane >= columns) continue;
    out[first + column] = shared[first + column] = least;
    out[pieces + first + column] = shared[pieces + first + column] = largest;
  }
}

// Writes the digests of the larger blocks of a chunk from those of its units in `shared`, which has
// `row_pieces` pieces a unit. Units before `first` are in the sink. The whole thread block calls
// it.
template <typename T>
__device__ void JoinUnits(const LevelDigests& digests, const uint4* shared, int row_pieces,
                          int first, int slot, int chunk, int head) {
  // Blocks [0, 4) of the chunk are those of level 1, then come two of level 2 and one of level 3.
  for (int i = static_cast<int>(threadIdx.x); i < (kUnits - 1) * row_pieces; i += kThreads) {
    const int block = i / row_pieces, piece = i % row_pieces;
    const int level = block < 4 ? 1 : block < 6 ? 2 : 3;
    const int in_level = block - (level == 1 ? 0 : level == 2 ? 4 : 6);
    const int end = (in_level + 1) << level, begin = max(in_level << level, first);
    if (begin >= end) continue;
    uint4 kept = shared[begin * row_pieces + piece];
    for (int unit = begin + 1; unit < end; ++unit) {
      const uint4 v = shared[unit * row_pieces + piece];
      if (piece < row_pieces / 2) {
        KeepLeast<T>(kept, v);
      } else {
        KeepLargest<T>(kept, v);
      }
    }
    T* const row = RowAt<T>(digests.of[level], slot, chunk * (kUnits >> level) + in_level, head);
    reinterpret_cast<uint4*>(row)[piece] = kept;
  }
}

// Grid: (thread blocks that share a row's chunks, KV heads, rows). Shared memory: [kUnits][2 *
// head_dim] elements.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    LevelDigestsKernel(const __grid_constant__ LevelDigestsParams p) {
  extern __shared__ uint4 shared[];
  WaitForPriorKernels();
  LetNextKernelStart();
  const int row = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
  const int slot = p.slots[row];
  if (slot < 0) return;
  const PagedCache& c = p.cache;
  const int last = p.positions[row];
  const int first = p.first_positions != nullptr ? p.first_positions[row] : last;
  const int pieces = c.head_dim * static_cast<int>(sizeof(T)) / 16;
  const int unit = static_cast<int>(threadIdx.x) / 32;
  const int chunks = (last + 1) / kFluxionLargestBlock;  // complete ones
  for (int chunk = first / kFluxionLargestBlock + static_cast<int>(blockIdx.x); chunk < chunks;
       chunk += static_cast<int>(gridDim.x)) {
    const int in_sink = max(SegmentsOf(last).sink / kUnitTokens - chunk * kUnits, 0);
    if (unit >= in_sink) {
      const int number = chunk * kUnits + unit, token = number * kUnitTokens;
      const int block = token / c.block_tokens;
      const T* const keys =
          BlockKeys<T>(c, slot, block, head) + int64_t{token - block * c.block_tokens} * c.head_dim;
      DigestUnit<T>(reinterpret_cast<const uint4*>(keys), pieces,
                    reinterpret_cast<uint4*>(RowAt<T>(p.digests.of[0], slot, number, head)),
                    shared + unit * 2 * pieces);
    }
    __syncthreads();
    JoinUnits<T>(p.digests, shared, 2 * pieces, in_sink, slot, chunk, head);
    __syncthreads();  // before the next chunk overwrites the units
  }
}

bool AreValid(const LevelDigestsParams& p) {
  for (const PagedRows& digests : p.digests.of) {
    if (digests.type != p.cache.type || digests.dim != 2 * p.cache.head_dim ||
        !HasAlignedRows(digests)) {
      return false;
    }
  }
  return HasAlignedKeys(p.cache) && p.cache.block_tokens % kUnitTokens == 0;
}

}  // namespace

cudaError_t LaunchLevelDigests(const LevelDigestsParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const int64_t shared = int64_t{kUnits} * 2 * p.cache.head_dim * SizeOf(p.cache.type);
  if (!AreValid(p) || shared > kMaxShared) return cudaErrorInvalidValue;
  const auto kernel = p.cache.type == DType::kFloat32 ? LevelDigestsKernel<float>
                                                      : LevelDigestsKernel<__nv_bfloat16>;
  const int blocks = p.first_positions != nullptr ? kBulkBlocks : 1;
  return LaunchKernel(kernel, dim3(blocks, p.cache.kv_heads, p.rows), dim3(kThreads),
                      static_cast<size_t>(shared), stream, p);
}

}  // namespace sluice::kernels::cuda
