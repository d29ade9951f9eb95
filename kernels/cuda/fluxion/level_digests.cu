// Digests of blocks at Fluxion's four levels: the means of a block's pieces, and, where level 0
// alone has digests, the spread of its keys around them.
//
// A thread block takes one chunk of 128 tokens of a KV head at a time. Each thread makes 16 bytes'
// worth of elements of a unit of 16 keys, with a load for each key. Pieces meet in shared memory,
// in float32, and those of larger blocks are made from them there, so that keys are read once. A
// digest is rounded when it is written, and a larger piece is made from pieces that are not
// rounded. Which sums are added in which order depends on nothing, so that a chunk has the same
// digests in any call.
//
// The kernel moves 256 * head_dim bytes of a chunk of bf16 keys and writes 40 * head_dim with
// spreads, or 60 * head_dim where all levels have digests. A decode row has a chunk in one step of
// 128; its other steps end at a look at its position. How many chunks a whole prompt has is known
// on the device alone: thread blocks of a fixed grid take every kBulkBlocks-th one.
#include "kernels/cuda/common/float8.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/paged_rows.cuh"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/fluxion_params.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kUnitTokens = LevelTokens(0);
constexpr int kUnits = kFluxionLargestBlock / kUnitTokens;  // units of a chunk
constexpr int kPieceTokens = kUnitTokens / kDigestPieces;
constexpr int kPieces = kFluxionLargestBlock / kPieceTokens;  // pieces of a chunk
constexpr int kThreads = 128;  // 8 units by 16 pieces of bytes, in bf16 and head_dim 128
constexpr int kBulkBlocks = 16;
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
// Returns the row of a block's digest.
__device__ __forceinline__ uint8_t* DigestAt(const PagedRows& digests, int slot, int block,
                                             int head) {
  return RowAt<uint8_t>(digests, slot, block, head);
}

// Rounds some elements to e4m3 and writes them, and writes them to `shared` if it is not null.
template <int n>
__device__ __forceinline__ void PutElements(const float (&x)[n], uint8_t* out, float* shared) {
#pragma unroll
  for (int e = 0; e < n; e += 4) {
    const float4 four = {x[e], x[e + 1], x[e + 2], x[e + 3]};
    *reinterpret_cast<uint32_t*>(out + e) = PackE4M3(four);
    if (shared != nullptr) *reinterpret_cast<float4*>(shared + e) = four;
  }
}

// Makes the digests of the units from `first` on, writes them and, where `shared` is not null,
// leaves their pieces there: [kPieces][dim]. `centre` may be null. The whole thread block calls it.
template <typename T>
__device__ void MakeUnits(const LevelDigestsParams& p, int slot, int head, int chunk, int first,
                          const float* centre, float* shared) {
  const PagedCache& c = p.cache;
  const bool has_spread = HasSpread(p.digests.of[0], c.head_dim);
  const int dim = c.head_dim, columns = dim / kElements<T>;
  for (int i = first * columns + static_cast<int>(threadIdx.x); i < kUnits * columns;
       i += kThreads) {
    const int unit = i / columns, column = i % columns, at = column * kElements<T>;
    const int number = chunk * kUnits + unit, token = number * kUnitTokens;
    const int block = token / c.block_tokens;
    const auto* const keys = reinterpret_cast<const uint4*>(
        BlockKeys<T>(c, slot, block, head) + int64_t{token - block * c.block_tokens} * dim);
    uint4 v[kUnitTokens];
#pragma unroll
    for (int t = 0; t < kUnitTokens; ++t) v[t] = keys[t * columns + column];
    uint8_t* const row = DigestAt(p.digests.of[0], slot, number, head) + at;
    float squares[kElements<T>] = {};
#pragma unroll
    for (int piece = 0; piece < kDigestPieces; ++piece) {
      float x[kPieceTokens][kElements<T>], mean[kElements<T>];
#pragma unroll
      for (int t = 0; t < kPieceTokens; ++t) Widen(v[piece * kPieceTokens + t], x[t]);
#pragma unroll
      for (int e = 0; e < kElements<T>; ++e) {
        mean[e] = ((x[0][e] + x[1][e]) + x[2][e] + x[3][e]) * (1.0f / kPieceTokens);
#pragma unroll
        for (int t = 0; t < kPieceTokens; ++t) {
          const float off = x[t][e] - mean[e];
          squares[e] = fmaf(off, off, squares[e]);
        }
        if (centre != nullptr) mean[e] -= centre[at + e];
      }
      PutElements(mean, row + piece * dim,
                  shared != nullptr ? shared + (unit * kDigestPieces + piece) * dim + at : nullptr);
    }
    if (!has_spread) continue;
#pragma unroll
    for (float& square : squares) square *= 1.0f / kUnitTokens;
    PutElements(squares, row + kDigestPieces * dim, nullptr);
  }
}

__device__ __forceinline__ float4 Middle(const float4& a, const float4& b) {
  return {0.5f * (a.x + b.x), 0.5f * (a.y + b.y), 0.5f * (a.z + b.z), 0.5f * (a.w + b.w)};
}

// Writes the digests of the larger blocks of a chunk from its pieces in `shared`, of which those
// before `first` are in the sink. A thread takes four elements through all levels, and overwrites
// pieces that it has joined. The whole thread block calls it.
__device__ void JoinPieces(const LevelDigests& digests, float* shared, int dim, int first, int slot,
                           int chunk, int head) {
  for (int d = 4 * static_cast<int>(threadIdx.x); d < dim; d += 4 * kThreads) {
    int in_sink = first;
    for (int level = 1; level < kFluxionLevels; ++level) {
      const bool has_digests = digests.of[level].base != nullptr;
      in_sink /= 2;
      for (int i = in_sink; i < kPieces >> level; ++i) {
        const float* const from = shared + 2 * i * dim + d;
        const float4 piece = Middle(*reinterpret_cast<const float4*>(from),
                                    *reinterpret_cast<const float4*>(from + dim));
        *reinterpret_cast<float4*>(shared + i * dim + d) = piece;
        if (!has_digests) continue;
        const int block = i / kDigestPieces, place = i % kDigestPieces;
        uint8_t* const row =
            DigestAt(digests.of[level], slot, chunk * (kUnits >> level) + block, head) + d;
        const uint32_t rounded = PackE4M3(piece);
        *reinterpret_cast<uint32_t*>(row + place * dim) = rounded;
        // The first half of the block lies in the sink.
        if (in_sink > block * kDigestPieces) {
          *reinterpret_cast<uint32_t*>(row + (place - kDigestPieces / 2) * dim) = rounded;
        }
      }
    }
  }
}

// Grid: (thread blocks that share a row's chunks, KV heads, rows). Shared memory: [kPieces]
// [head_dim] floats, or none if only level 0 has digests.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    LevelDigestsKernel(const __grid_constant__ LevelDigestsParams p, bool joins) {
  extern __shared__ __align__(16) float pieces[];
  WaitForPriorKernels();
  LetNextKernelStart();
  const int row = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
  const int slot = p.slots[row];
  if (slot < 0) return;
  const PagedCache& c = p.cache;
  const int last = p.positions[row];
  const int first = p.first_positions != nullptr ? p.first_positions[row] : last;
  const float* const centre =
      p.centres == nullptr ? nullptr : p.centres + (int64_t{slot} * c.kv_heads + head) * c.head_dim;
  const int chunks = (last + 1) / kFluxionLargestBlock;  // complete ones
  for (int chunk = first / kFluxionLargestBlock + static_cast<int>(blockIdx.x); chunk < chunks;
       chunk += static_cast<int>(gridDim.x)) {
    const int in_sink = max(SegmentsOf(last).sink / kPieceTokens - chunk * kPieces, 0);
    MakeUnits<T>(p, slot, head, chunk, in_sink / kDigestPieces, centre, joins ? pieces : nullptr);
    if (!joins) continue;
    __syncthreads();
    JoinPieces(p.digests, pieces, c.head_dim, in_sink, slot, chunk, head);
    __syncthreads();  // before the next chunk overwrites the pieces
  }
}

bool AreValid(const LevelDigestsParams& p) {
  for (const PagedRows& digests : p.digests.of) {
    if (digests.base == nullptr && &digests != &p.digests.of[0]) continue;
    if (!HasAlignedRows(digests)) return false;
  }
  return AreDigests(p.digests, p.cache.head_dim) && HasAlignedKeys(p.cache) &&
         p.cache.head_dim % 16 == 0 && p.cache.block_tokens % kUnitTokens == 0;
}

}  // namespace

cudaError_t LaunchLevelDigests(const LevelDigestsParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  bool joins = false;
  for (int level = 1; level < kFluxionLevels; ++level) {
    joins = joins || p.digests.of[level].base != nullptr;
  }
  const int64_t shared = joins ? int64_t{kPieces} * p.cache.head_dim * int64_t{sizeof(float)} : 0;
  if (!AreValid(p) || shared > kMaxShared) return cudaErrorInvalidValue;
  const auto kernel = p.cache.type == DType::kFloat32 ? LevelDigestsKernel<float>
                                                      : LevelDigestsKernel<__nv_bfloat16>;
  const int blocks = p.first_positions != nullptr ? kBulkBlocks : 1;
  return LaunchKernel(kernel, dim3(blocks, p.cache.kv_heads, p.rows), dim3(kThreads),
                      static_cast<size_t>(shared), stream, p, joins);
}

}  // namespace sluice::kernels::cuda
