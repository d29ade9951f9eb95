// InfiniGen's partial keys and their scores for any path (`S`: see simd_math.h). Tokens and lists
// are split over workers; sums run over elements in one order, whatever the other tokens.
#pragma once

#include "kernels/cpu/simd_scores.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int kMaxRank = kMaxHeadDim;

inline void* PartialRow(const PagedRows& rows, int64_t slot, int64_t row, int64_t head) {
  return static_cast<char*>(rows.base) + RowOffset(rows, slot, row, head);
}

inline float ElementOf(const void* data, DType type, int64_t i) {
  return type == DType::kFloat32 ? static_cast<const float*>(data)[i]
                                 : Bf16ToFloat(static_cast<const uint16_t*>(data)[i]);
}

template <class S>
inline typename S::F LoadAs(const void* data, DType type, int64_t i) {
  return type == DType::kFloat32 ? S::Load(static_cast<const float*>(data) + i)
                                 : S::LoadBf16(static_cast<const uint16_t*>(data) + i);
}

// Computes out[j] = sum over d of x[d] * projection[d][j], for kVectors vectors of columns.
template <class S, int kVectors>
inline void ProjectColumns(const float* x, const float* projection, int64_t dim, int64_t rank,
                           float* out) {
  typename S::F sums[kVectors];
  for (auto& sum : sums) sum = S::Set1(0.0f);
  for (int64_t d = 0; d < dim; ++d) {
    const typename S::F element = S::Set1(x[d]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = S::Fma(element, S::Load(projection + d * rank + v * S::kWidth), sums[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) S::Store(out + v * S::kWidth, sums[v]);
}

// Computes the same for all columns: one chain over d for each.
template <class S>
void Project(const float* x, const float* projection, int64_t dim, int64_t rank, float* out) {
  constexpr int kVectors = 4;
  int64_t j = 0;
  for (; j + kVectors * S::kWidth <= rank; j += kVectors * S::kWidth) {
    ProjectColumns<S, kVectors>(x, projection + j, dim, rank, out + j);
  }
  for (; j + S::kWidth <= rank; j += S::kWidth) {
    ProjectColumns<S, 1>(x, projection + j, dim, rank, out + j);
  }
  for (; j < rank; ++j) {
    float sum = 0;
    for (int64_t d = 0; d < dim; ++d) sum += x[d] * projection[d * rank + j];
    out[j] = sum;
  }
}

template <class S>
void PartialKey(const PartialKeysParams& p, int64_t slot, int64_t token) {
  const PagedCache& c = p.cache;
  const int64_t rank = p.partial.dim;
  for (int64_t h = 0; h < c.kv_heads; ++h) {
    alignas(64) float key[kMaxHeadDim], projected[kMaxRank];
    const int64_t at = KeyIndex(c, slot, token, h);
    for (int64_t d = 0; d < c.head_dim; d += S::kWidth) {
      S::Store(key + d, LoadAs<S>(c.base, c.type, at + d));
    }
    Project<S>(key, p.projection + h * c.head_dim * rank, c.head_dim, rank, projected);
    WriteRounded(PartialRow(p.partial, slot, token, h), p.partial.type, 0, projected, rank);
  }
}

// Calls body(slot, token) for this worker's share of the positions [first_positions[r],
// positions[r]] of all rows.
template <class Params, class Body>
void ShareTokens(const Params& p, Worker worker, Body body) {
  const auto first_of = [&](int64_t r) {
    return int64_t{p.first_positions != nullptr ? p.first_positions[r] : p.positions[r]};
  };
  const auto tokens_of = [&](int64_t r) {
    return p.slots[r] < 0 ? 0 : Max(0, p.positions[r] + 1 - first_of(r));
  };
  int64_t total = 0;
  for (int64_t r = 0; r < p.rows; ++r) total += tokens_of(r);
  const Range mine = Share(total, worker);
  int64_t before = 0;
  for (int64_t r = 0; r < p.rows && before < mine.end; ++r) {
    const int64_t tokens = tokens_of(r);
    const int64_t end = Min(mine.end - before, tokens);
    for (int64_t t = Max(mine.begin - before, 0); t < end; ++t) body(p.slots[r], first_of(r) + t);
    before += tokens;
  }
}

template <class S>
void PartialKeys(const PartialKeysParams& p, Worker worker) {
  if (p.cache.head_dim % 16 != 0 || p.cache.head_dim > kMaxHeadDim || p.partial.dim > kMaxRank) {
    KernelCheckFailed("partial_keys: head_dim a multiple of 16 up to 256, rank up to 256");
  }
  ShareTokens(p, worker, [&](int64_t slot, int64_t token) { PartialKey<S>(p, slot, token); });
}

// A token's score is one dot product of its partial key with the projected query.
template <class S>
struct PartialSource {
  const PartialScoresParams& p;
  int64_t row, kv_head;
  int64_t heads = 0;
  alignas(64) float queries[kScoreHeads * kMaxRank];

  PartialSource(const PartialScoresParams& params, int64_t list)
      : p(params), row(list / p.partial.kv_heads), kv_head(list % p.partial.kv_heads) {}

  void SetHeads(int64_t first, int64_t count) {
    const int64_t dim = p.head_dim, rank = p.partial.dim, group = p.heads / p.partial.kv_heads;
    heads = count;
    for (int64_t h = 0; h < count; ++h) {
      float* out = queries + h * kMaxRank;
      Project<S>(p.q + row * p.q_stride + (kv_head * group + first + h) * dim,
                 p.projection + kv_head * dim * rank, dim, rank, out);
      for (int64_t j = 0; j < rank; ++j) out[j] *= p.scale;
    }
  }

  void Fill(int64_t first, int64_t count, UnitScores& tile) const {
    const PagedRows& rows = p.partial;
    const int64_t whole = rows.dim / 16 * 16;
    for (int64_t i = 0; i < count; ++i) {
      const char* partial =
          static_cast<const char*>(rows.base) + RowOffset(rows, p.slots[row], first + i, kv_head);
      DotRow<S>(queries, heads, kMaxRank, partial, rows.type, whole, &tile.scores[0][i],
                kScoreUnits);
      for (int64_t j = whole; j < rows.dim; ++j) {
        const float element = ElementOf(partial, rows.type, j);
        for (int64_t h = 0; h < heads; ++h) {
          tile.scores[h][i] += queries[h * kMaxRank + j] * element;
        }
      }
    }
  }
};

template <class S>
void PartialScores(const PartialScoresParams& p, Worker worker) {
  if (p.head_dim > kMaxHeadDim || p.partial.dim > kMaxRank) {
    KernelCheckFailed("partial_scores: head_dim and rank up to 256");
  }
  const int64_t kv_heads = p.partial.kv_heads;
  const bool whole = p.reduction == GroupReduction::kSoftmaxSum;
  const auto tokens = [&](int64_t r) {
    return p.slots[r] < 0 ? int64_t{0} : int64_t{p.positions[r]};
  };
  for (int64_t list = worker.index; list < p.rows * kv_heads; list += worker.count) {
    const int64_t row = list / kv_heads;
    if (p.slots[row] < 0) continue;
    p.scores[list * p.score_stride + p.positions[row]] = kNegativeInfinity;
  }
  ShareUnits(p.rows, kv_heads, whole, worker, tokens,
             [&](int64_t list, int64_t begin, int64_t end) {
               PartialSource<S> source(p, list);
               ReduceGroup<S>(source, p.heads / kv_heads, p.reduction, begin, end,
                              p.scores + list * p.score_stride);
             });
}

}  // namespace
}  // namespace sluice::kernels::cpu
