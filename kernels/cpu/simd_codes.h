// Scores of blocks from key codes, for any path (`S`: see simd_math.h).
//
// A key is made again from its code, as floats, and scores as a key does in exact_scores.
#pragma once

#include "kernels/cpu/simd_scores.h"

namespace sluice::kernels::cpu {
namespace {

// KeyCodeLevel as a distance from the middle.
inline constexpr auto kInner = static_cast<float>(KeyCodeLevel(true, false) - 0.5);
inline constexpr auto kOuter = static_cast<float>(KeyCodeLevel(true, true) - 0.5);

// The blocks of a list's shortlist, numbered by their place in it.
template <class S>
struct CodeSource {
  const RefineScoresParams& p;
  int64_t row, kv_head;
  const int32_t* blocks;
  int64_t heads = 0;
  alignas(64) float queries[kScoreHeads * kMaxHeadDim];

  CodeSource(const RefineScoresParams& params, int64_t list)
      : p(params),
        row(list / p.digests.kv_heads),
        kv_head(list % p.digests.kv_heads),
        blocks(p.units.units + list * p.units.capacity) {}

  void SetHeads(int64_t first, int64_t count) {
    const int64_t dim = p.digests.dim / 2, group = p.heads / p.digests.kv_heads;
    heads = count;
    const float* q = p.q + row * p.q_stride + (kv_head * group + first) * dim;
    for (int64_t i = 0; i < count * dim; ++i) queries[i] = q[i] * p.scale;
  }

  void Fill(int64_t first, int64_t count, UnitScores& tile) const {
    const int64_t dim = p.digests.dim / 2, words = p.codes.dim / 2;
    alignas(64) float middle[kMaxCodeDim] = {}, range[kMaxCodeDim] = {}, key[kMaxCodeDim];
    UnitScores of_tokens;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = blocks[first + i];
      const int64_t digest = RowOffset(p.digests, p.slots[row], block, kv_head);
      const auto element = [&](int64_t d) {
        const char* at = static_cast<const char*>(p.digests.base) + digest;
        return p.digests.type == DType::kFloat32
                   ? reinterpret_cast<const float*>(at)[d]
                   : Bf16ToFloat(reinterpret_cast<const uint16_t*>(at)[d]);
      };
      for (int64_t d = 0; d < dim; ++d) {
        middle[d] = (element(d) + element(dim + d)) * 0.5f;
        range[d] = element(dim + d) - element(d);
      }
      RunningSum sums[kScoreHeads];
      for (int64_t begin = 0; begin < p.block_tokens; begin += kScoreUnits) {
        const int64_t these = Min(kScoreUnits, p.block_tokens - begin);
        for (int64_t t = 0; t < these; ++t) {
          const uint32_t* codes =
              CodesAt(p.codes, p.slots[row], block * p.block_tokens + begin + t, kv_head);
          for (int64_t w = 0; w < words; ++w) {
            const uint32_t uppers = codes[w], outers = codes[words + w];
            for (int64_t b = 0; b < kWordBits; ++b) {
              const int64_t d = w * kWordBits + b;
              const float level = (outers >> b & 1) != 0 ? kOuter : kInner;
              key[d] = middle[d] + range[d] * ((uppers >> b & 1) != 0 ? level : -level);
            }
          }
          DotRow<S>(queries, heads, dim, key, dim, &of_tokens.scores[0][t], kScoreUnits);
        }
        for (int64_t h = 0; h < heads; ++h) AddTo<S>(sums[h], of_tokens.scores[h], these);
      }
      for (int64_t h = 0; h < heads; ++h) tile.scores[h][i] = sums[h].LogSumExp();
    }
  }
};

// Workers take whole lists: the shortlist's scores are first written one after the other, and then
// moved to their blocks.
template <class S>
void RefineScores(const RefineScoresParams& p, Worker worker) {
  if (p.digests.dim % 32 != 0 || p.digests.dim > kMaxRowDim) {
    KernelCheckFailed("refine_scores: head_dim a multiple of 16 up to 256");
  }
  const int64_t kv_heads = p.digests.kv_heads;
  const Range mine = Share(p.rows * kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t row = list / kv_heads;
    if (p.slots[row] < 0) continue;
    const int64_t newest = p.positions[row] / p.block_tokens;
    float* const out = p.scores + list * p.score_stride;
    const int32_t* const blocks = p.units.units + list * p.units.capacity;
    int64_t count = p.units.counts[list];
    while (count > 0 && blocks[count - 1] >= newest) --count;
    CodeSource<S> source(p, list);
    if (count > 0) ReduceGroup<S>(source, p.heads / kv_heads, p.reduction, 0, count, out);
    // A list is ascending, so a score never moves to the front.
    for (int64_t block = newest; block >= 0; --block) {
      const bool listed = count > 0 && blocks[count - 1] == block;
      out[block] = listed ? out[--count] : kNegativeInfinity;
    }
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
