// Scores of hash codes (kernels/hash_params.h), exact: the agreement of the group's queries with
// each key, times the key's length.
//
// Bytes: 34 a token and list at 256 bits, and 4 for its score: 22 us for ten rows of 64K tokens and
// 8 KV heads at 4.3 TB/s, if every list is wanted. Operations: the bits that a plane of a query has
// in common with a key are a product of two rows of bits, which tensor cores compute: 16 keys and
// 8 planes of 256 bits in one instruction. 16 keys take two of them for four queries, and an H200
// runs 1.5e11 a second (measured), enough for 40 TB/s of codes. So bytes bind.
//
// A warp takes 64 keys at a time, as four tiles of 16. Four queries share two products: the first
// has planes 0 and 1 of each, the second planes 2 and 3, so that each lane gets all four planes of
// one query for the keys that it has.
#include <climits>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/paged_rows.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTileKeys = 16;
constexpr int kTiles = 4;  // of a warp at a time
constexpr int kWarpKeys = kTiles * kTileKeys;
constexpr int kBlockTokens = 4 * kWarps * kWarpKeys;
constexpr int kMaxWords = kMaxHashBits / 32;
constexpr int kQuad = 4;  // queries that share two products
constexpr int kBlocksPerSm = 3;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
static_assert(kMaxWords == 8, "a product takes 256 bits");

// The second factors of products: for each quad of queries and both products a lane's two words
// (mma.m16n8k256, B), and for each query the sum of its levels.
struct Planes {
  uint2 words[kMaxHashGroup / kQuad][2][32];
  int of_no_bits[kMaxHashGroup];
};

// Adds the numbers of common bits of 16 rows (`a`) and 8 columns (`b`) of 256 bits.
__device__ __forceinline__ void AddCommonBits(const uint32_t (&a)[4], uint2 b, int (&sums)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// Words behind the last one are 0. Any order of words does, if it is that of the keys: lane l has
// words 2 (l % 4) and the next one.
__device__ void MakePlanes(const int32_t* codes, int group, int words, bool sum, Planes* out) {
  const int quads = (group + kQuad - 1) / kQuad;
  for (int i = static_cast<int>(threadIdx.x); i < quads * 2 * 32; i += kThreads) {
    const int lane = i % 32, product = i / 32 % 2, column = lane / 4, word = lane % 4 * 2;
    const int query = i / 64 * kQuad + column / 2, plane = product * 2 + column % 2;
    const int32_t* const from = codes + (query * kHashPlanes + plane) * words;
    const bool known = query < group;
    out->words[i / 64][product][lane] = {
        known && word < words ? static_cast<uint32_t>(from[word]) : 0u,
        known && word + 1 < words ? static_cast<uint32_t>(from[word + 1]) : 0u};
  }
  for (int query = static_cast<int>(threadIdx.x); query < quads * kQuad; query += kThreads) {
    // A query that is not there changes neither a sum nor a maximum.
    int levels = sum ? 0 : INT_MAX / 2;
    if (query < group) {
      levels = 0;
      for (int plane = 0; plane < kHashPlanes; ++plane) {
        int bits = 0;
        for (int w = 0; w < words; ++w) {
          bits += __popc(static_cast<uint32_t>(codes[(query * kHashPlanes + plane) * words + w]));
        }
        levels += (plane == kHashPlanes - 1 ? -bits : bits) << plane;
      }
    }
    out->of_no_bits[query] = levels;
  }
  __syncthreads();
}

__device__ __forceinline__ float LengthOf(const PagedRows& lengths, int slot, int token, int head) {
  return lengths.type == DType::kFloat32
             ? *RowAt<float>(lengths, slot, token, head)
             : __bfloat162float(*RowAt<__nv_bfloat16>(lengths, slot, token, head));
}

template <bool aligned>
__device__ __forceinline__ uint2 TwoWords(const uint32_t* code, int word, int words) {
  if (aligned) return *reinterpret_cast<const uint2*>(code + word);
  return {word < words ? code[word] : 0u, word + 1 < words ? code[word + 1] : 0u};
}

__device__ __forceinline__ int Combined(int a, int b, bool sum) { return sum ? a + b : max(a, b); }

// The keys that a warp takes at a time: codes as first factors of products (mma.m16n8k256, A), and
// the lengths of keys `lane` and 32 + `lane`.
struct Keys {
  uint32_t codes[kTiles][4];
  float lengths[kWarpKeys / 32];
};

// Reads keys from `first` on. A key behind the last one is the last one once more.
template <bool aligned>
__device__ __forceinline__ void ReadKeys(const HashScoresParams& p, int slot, int head, int first,
                                         int end, Keys* keys) {
  const int lane = static_cast<int>(threadIdx.x) % 32, word = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < kWarpKeys / 32; ++half) {
    const int token = min(first + half * 32 + lane, end - 1);
    const auto mine = reinterpret_cast<uint64_t>(RowAt<uint32_t>(p.codes, slot, token, head));
    keys->lengths[half] = LengthOf(p.lengths, slot, token, head);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // tile 2 half + i / 2, keys lane / 4 and that + 8
      const auto* const code =
          reinterpret_cast<const uint32_t*>(__shfl_sync(kAllLanes, mine, i * 8 + lane / 4));
      const uint2 two = TwoWords<aligned>(code, word, p.codes.dim);
      keys->codes[2 * half + i / 2][i % 2] = two.x;
      keys->codes[2 * half + i / 2][i % 2 + 2] = two.y;
    }
  }
}

// Writes the scores of these keys to scores[first] and up.
__device__ __forceinline__ void WriteScores(const Planes& planes, const Keys& keys, int quads,
                                            bool sum, int first, int end, float* scores) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int best[kTiles][2];
  for (int quad = 0; quad < quads; ++quad) {
    const uint2 low = planes.words[quad][0][lane], high = planes.words[quad][1][lane];
    const int of_no_bits = planes.of_no_bits[quad * kQuad + lane % 4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      int of_low[4] = {}, of_high[4] = {};
      AddCommonBits(keys.codes[tile], low, of_low);
      AddCommonBits(keys.codes[tile], high, of_high);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int levels =
            of_low[2 * i] + 2 * of_low[2 * i + 1] + 4 * of_high[2 * i] - 8 * of_high[2 * i + 1];
        const int agreement = 2 * levels - of_no_bits;
        best[tile][i] = quad == 0 ? agreement : Combined(best[tile][i], agreement, sum);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < kWarpKeys / 32; ++half) {
    int score = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int of_group = best[2 * half + i / 2][i % 2];
      of_group = Combined(of_group, __shfl_xor_sync(kAllLanes, of_group, 1), sum);
      of_group = Combined(of_group, __shfl_xor_sync(kAllLanes, of_group, 2), sum);
      // Keys 8 i to 8 i + 7 of this half, each in four lanes.
      const int of_key = __shfl_sync(kAllLanes, of_group, lane % 8 * 4);
      score = lane / 8 == i ? of_key : score;
    }
    const int token = first + half * 32 + lane;
    if (token < end) scores[token] = static_cast<float>(score) * keys.lengths[half];
  }
}

// Grid: (lists, runs of kBlockTokens tokens).
template <bool aligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    HashScoresKernel(const __grid_constant__ HashScoresParams p) {
  __shared__ Planes planes;
  WaitForPriorKernels();
  LetNextKernelStart();
  const int kv_heads = p.codes.kv_heads, words = p.codes.dim, group = p.heads / kv_heads;
  const int list = static_cast<int>(blockIdx.x), row = list / kv_heads;
  const int head = list - row * kv_heads, slot = p.slots[row];
  if (slot < 0 || (p.wanted != nullptr && p.wanted[list] == 0)) return;
  const int tokens = p.positions[row];
  const int begin = static_cast<int>(blockIdx.y) * kBlockTokens;
  float* const scores = p.scores + list * p.score_stride;
  if (begin == 0 && threadIdx.x == 0) scores[tokens] = -INFINITY;
  if (begin >= tokens) return;
  const int end = min(begin + kBlockTokens, tokens), step = kWarps * kWarpKeys;
  // The next keys are on their way while these are scored.
  int first = begin + static_cast<int>(threadIdx.x) / 32 * kWarpKeys;
  Keys keys, next;
  ReadKeys<aligned>(p, slot, head, first, end, &keys);
  const bool sum = p.reduction == GroupReduction::kMean;
  MakePlanes(p.q_codes + (int64_t{row} * p.heads + head * group) * kHashPlanes * words, group,
             words, sum, &planes);
  const int quads = (group + kQuad - 1) / kQuad;
  for (; first < end; first += step) {
    if (first + step < end) ReadKeys<aligned>(p, slot, head, first + step, end, &next);
    WriteScores(planes, keys, quads, sum, first, end, scores);
    keys = next;
  }
}

template <bool aligned>
cudaError_t Launch(const HashScoresParams& p, cudaStream_t stream) {
  const int64_t runs = (p.score_stride + kBlockTokens - 1) / kBlockTokens;
  return LaunchKernel(
      HashScoresKernel<aligned>,
      dim3(static_cast<unsigned>(p.rows * p.codes.kv_heads), static_cast<unsigned>(runs)),
      dim3(kThreads), 0, stream, p);
}

}  // namespace

cudaError_t LaunchHashScores(const HashScoresParams& p, cudaStream_t stream) {
  const int kv_heads = p.codes.kv_heads, words = p.codes.dim;
  if (p.rows < 0 || kv_heads < 1 || p.heads < kv_heads || p.heads % kv_heads != 0 || words < 1 ||
      words > kMaxWords || p.heads / kv_heads > kMaxHashGroup || p.codes.rows_per_page < 1 ||
      p.lengths.rows_per_page < 1 || p.score_stride < 1 ||
      p.score_stride > int64_t{65535} * kBlockTokens ||
      p.reduction == GroupReduction::kSoftmaxSum) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  return words == kMaxWords && HasAlignedRows(p.codes) ? Launch<true>(p, stream)
                                                       : Launch<false>(p, stream);
}

}  // namespace sluice::kernels::cuda
