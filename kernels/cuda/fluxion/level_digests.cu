// Digests of blocks at Fluxion's four levels: means and variances of the elements of keys.
//
// A thread block takes one chunk of 128 tokens of a KV head at a time. Each of its warps makes the
// digest of 16 tokens, with loads of 16 bytes of which up to 8 are under way in every lane. These 8
// digests meet in shared memory, in float32, and those of the larger blocks are made from them
// there, so that keys are read once. A digest is rounded when it is written, and a larger one is
// made from halves that are not rounded.
//
// Keys have channels whose mean is tens of times their deviation, where E[x^2] - E[x]^2 loses the
// variance. So a unit's sums are those of the keys' differences from its first key. Of 16 numbers
// none lies further from the mean than sqrt(15) deviations: the mean square of the differences is
// at most 16 times the variance, and no more than 4 bits cancel. Which sums are added in which
// order depends on head_dim alone, so that a chunk has the same digests in any call.
//
// The kernel moves 256 * head_dim bytes of a chunk of bf16 keys and writes 60 * head_dim. A decode
// row has a chunk in one step of 128; its other steps end at a look at its position. How many
// chunks a whole prompt has is known on the device alone: thread blocks of a fixed grid take every
// kBulkBlocks-th one.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/paged_rows.cuh"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/fluxion_params.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kUnitTokens = LevelTokens(0);
constexpr int kUnits = kFluxionLargestBlock / kUnitTokens;  // units of a chunk
constexpr int kThreads = 32 * kUnits;
constexpr int kBulkBlocks = 16;
constexpr int kAtOnce = 8;
constexpr int kMaxShared = 48 << 10;

static_assert(kFluxionSinkTokens % (kFluxionLargestBlock / 2) == 0,
              "the halves of a block are equally long, or the first one is in the sink");

template <typename T>
inline constexpr int kElements = 16 / sizeof(T);  // of a piece of 16 bytes

__device__ __forceinline__ void Widen(const uint4& v, float (&x)[4]) {
  x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y);
  x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
}
__device__ __forceinline__ void Widen(const uint4& v, float (&x)[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ uint4 Round(const float (&x)[4]) {
  return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
          __float_as_uint(x[3])};
}
__device__ __forceinline__ uint4 Round(const float (&x)[8]) {
  return {PackBf16(x[0], x[1]), PackBf16(x[2], x[3]), PackBf16(x[4], x[5]), PackBf16(x[6], x[7])};
}

__device__ __forceinline__ uint4 FromLane(const uint4& v, int lane) {
  return {__shfl_sync(0xffffffffu, v.x, lane), __shfl_sync(0xffffffffu, v.y, lane),
          __shfl_sync(0xffffffffu, v.z, lane), __shfl_sync(0xffffffffu, v.w, lane)};
}

// Sums over keys of the differences of one piece's elements from those of the unit's first key.
template <typename T>
struct PieceSums {
  float first[kElements<T>], sums[kElements<T>], squares[kElements<T>];

  __device__ __forceinline__ explicit PieceSums(const uint4& of_first) {
    Widen(of_first, first);
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) sums[i] = squares[i] = 0;
  }
  __device__ __forceinline__ void Add(const uint4& key) {
    float x[kElements<T>];
    Widen(key, x);
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) {
      const float off = x[i] - first[i];
      sums[i] += off;
      squares[i] = fmaf(off, off, squares[i]);
    }
  }
  // Adds the sums of the lane that is `lanes` higher. All 32 lanes call it.
  __device__ __forceinline__ void AddFromAbove(int lanes) {
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) {
      sums[i] += __shfl_down_sync(0xffffffffu, sums[i], lanes);
      squares[i] += __shfl_down_sync(0xffffffffu, squares[i], lanes);
    }
  }
  // Replaces the sums over a unit by means, and the squares by variances.
  __device__ __forceinline__ void Finish() {
    constexpr float kShare = 1.0f / kUnitTokens;
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) {
      const float off = sums[i] * kShare;
      squares[i] = fmaxf(fmaf(-off, sums[i], squares[i]) * kShare, 0.0f);
      sums[i] = first[i] + off;
    }
  }
};

// Writes the elements of a piece to `shared`, and rounded to `out`.
template <int n>
__device__ __forceinline__ void PutPiece(const float (&x)[n], uint4* out, float* shared) {
  *out = Round(x);
#pragma unroll
  for (int i = 0; i < n; i += 4) {
    *reinterpret_cast<float4*>(shared + i) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
  }
}

// Writes the digest of the unit of keys from `keys` on to both `out` and `shared`. A key has
// `pieces` pieces of 16 bytes. All 32 lanes call it.
template <typename T>
__device__ void DigestUnit(const uint4* keys, int pieces, uint4* out, float* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = 0; first < pieces; first += 32) {
    const int columns = min(32, pieces - first), column = lane % columns;
    int keys_at_once = 1;  // a power of 2, which divides the keys of a unit
    while (2 * keys_at_once * columns <= 32 && keys_at_once < kUnitTokens) keys_at_once *= 2;
    // Lanes that are left over do what others do, and their sums go nowhere.
    const uint4* const from = keys + lane / columns % keys_at_once * pieces + first + column;
    const int of_lane = kUnitTokens / keys_at_once;
    uint4 v[kAtOnce];
    const auto load = [&](int begin) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i < of_lane) v[i] = from[(begin + i) * keys_at_once * pieces];
      }
    };
    load(0);
    PieceSums<T> piece(FromLane(v[0], column));
    for (int begin = 0; begin < of_lane; begin += kAtOnce) {
      if (begin > 0) load(begin);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i < of_lane) piece.Add(v[i]);
      }
    }
    // Reduces the sums of all lanes of one column into the first of them.
    for (int i = keys_at_once / 2; i > 0; i /= 2) piece.AddFromAbove(i * columns);
    if (lane >= columns) continue;
    piece.Finish();
    const int at = first + column;
    PutPiece(piece.sums, out + at, shared + at * kElements<T>);
    PutPiece(piece.squares, out + pieces + at, shared + (pieces + at) * kElements<T>);
  }
}

// Mean and variance of two neighbouring elements.
struct Moments {
  float2 mean, variance;
};

__device__ __forceinline__ float JoinedVariance(float mean_a, float mean_b, float a, float b) {
  const float off = 0.5f * (mean_a - mean_b);
  return fmaf(off, off, 0.5f * (a + b));
}
// Returns the moments of two blocks of as many tokens together.
__device__ __forceinline__ Moments Join(const Moments& a, const Moments& b) {
  return {{0.5f * (a.mean.x + b.mean.x), 0.5f * (a.mean.y + b.mean.y)},
          {JoinedVariance(a.mean.x, b.mean.x, a.variance.x, b.variance.x),
           JoinedVariance(a.mean.y, b.mean.y, a.variance.y, b.variance.y)}};
}

__device__ __forceinline__ void PutPair(float* to, const float2& v) {
  *reinterpret_cast<float2*>(to) = v;
}
__device__ __forceinline__ void PutPair(__nv_bfloat16* to, const float2& v) {
  *reinterpret_cast<uint32_t*>(to) = PackBf16(v.x, v.y);
}

// Writes the digests of the larger blocks of a chunk from those of its units in `shared`, which has
// 2 * `dim` floats a unit. Units before `first` are in the sink. A thread takes two elements
// through all levels. The whole thread block calls it.
template <typename T>
__device__ void JoinUnits(const LevelDigests& digests, const float* shared, int dim, int first,
                          int slot, int chunk, int head) {
  for (int d = 2 * static_cast<int>(threadIdx.x); d < dim; d += 2 * kThreads) {
    Moments of[kUnits];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      if (unit < first) continue;
      const float* const mean = shared + unit * 2 * dim + d;
      of[unit] = {*reinterpret_cast<const float2*>(mean),
                  *reinterpret_cast<const float2*>(mean + dim)};
    }
#pragma unroll
    for (int level = 1; level < kFluxionLevels; ++level) {
#pragma unroll
      for (int i = 0; i < kUnits / 2; ++i) {  // a fixed number keeps them in registers
        if (i >= kUnits >> level || (i + 1) << level <= first) continue;
        const bool half_in_sink = (2 * i + 1) << (level - 1) <= first;
        of[i] = half_in_sink ? of[2 * i + 1] : Join(of[2 * i], of[2 * i + 1]);
        T* const row = RowAt<T>(digests.of[level], slot, chunk * (kUnits >> level) + i, head);
        PutPair(row + d, of[i].mean);
        PutPair(row + dim + d, of[i].variance);
      }
    }
  }
}

// Grid: (thread blocks that share a row's chunks, KV heads, rows). Shared memory: [kUnits][2 *
// head_dim] floats.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    LevelDigestsKernel(const __grid_constant__ LevelDigestsParams p) {
  extern __shared__ __align__(16) float moments[];
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
                    moments + unit * 2 * c.head_dim);
    }
    __syncthreads();
    JoinUnits<T>(p.digests, moments, c.head_dim, in_sink, slot, chunk, head);
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
  const int64_t shared = int64_t{kUnits} * 2 * p.cache.head_dim * int64_t{sizeof(float)};
  if (!AreValid(p) || shared > kMaxShared) return cudaErrorInvalidValue;
  const auto kernel = p.cache.type == DType::kFloat32 ? LevelDigestsKernel<float>
                                                      : LevelDigestsKernel<__nv_bfloat16>;
  const int blocks = p.first_positions != nullptr ? kBulkBlocks : 1;
  return LaunchKernel(kernel, dim3(blocks, p.cache.kv_heads, p.rows), dim3(kThreads),
                      static_cast<size_t>(shared), stream, p);
}

}  // namespace sluice::kernels::cuda
