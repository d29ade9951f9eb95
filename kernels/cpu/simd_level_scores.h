// Scores of blocks by their digests at Fluxion's levels, for any path.
//
// The rows by which the blocks of a list are known lie one behind the other at one level, so they
// are walked in batches, and a block takes the largest score of its rows. A path has a type `Rows`
// that scores batches of at most Rows::kRows rows:
//   Rows(dim, has_spread)
//   Begin(queries, first)                    takes queries, and the first rows of a list
//   Score(now, next, after, scores)          scores the rows that were `first` or `next` before
// A row's score for a head depends on nothing but the two. Rows::Score asks memory for `after`.
#pragma once

#include "kernels/cpu/simd_scores.h"
#include "kernels/e4m3.h"

namespace sluice::kernels::cpu {
namespace {

// Floats of a row's scores, one for each head: a vector of the widest path.
inline constexpr int64_t kScoreColumns = 16;

// The query heads of one list that have scores, up to kScoreHeads at a time: for each the query,
// which pieces are multiplied with, then its squares, for the spreads.
struct LevelQueries {
  int64_t count = 0;          // heads taken
  int64_t item[kScoreHeads];  // row * heads + h
  alignas(64) float of[kScoreHeads * kMaxRowDim];

  // Takes heads from h on, of those before `end` in the row, and returns the first not looked at.
  int64_t Take(const LevelScoresParams& p, int64_t row, int64_t h, int64_t end, int64_t all,
               int64_t dim) {
    count = 0;
    for (; h < end && count < kScoreHeads; ++h) {
      const int32_t selected = p.blocks[row * p.heads + h];
      if (selected <= 0 || selected >= all) continue;
      const float* const q = p.q + row * p.q_stride + h * dim;
      float* const out = of + count * 2 * dim;
      for (int64_t d = 0; d < dim; ++d) {
        out[d] = q[d];
        out[dim + d] = q[d] * q[d];
      }
      item[count++] = row * p.heads + h;
    }
    return h;
  }
};

// Goes through the rows of a (slot, KV head) in rising order.
class RowWalk {
 public:
  RowWalk(const PagedRows& rows, int64_t slot, int64_t head, int64_t first)
      : rows_(rows),
        page_(rows.page_table + slot * rows.table_stride + first / rows.rows_per_page),
        left_(rows.rows_per_page - first % rows.rows_per_page),
        row_(static_cast<const uint8_t*>(rows.base) + RowOffset(rows, slot, first, head)),
        head_bytes_(head * rows.head_bytes) {}

  const uint8_t* Next() {
    if (left_-- == 0) {
      left_ = rows_.rows_per_page - 1;
      row_ = static_cast<const uint8_t*>(rows_.base) + *++page_ * rows_.page_bytes + head_bytes_;
    }
    const uint8_t* const row = row_;
    row_ += rows_.dim;
    return row;
  }

 private:
  const PagedRows& rows_;
  const int32_t* page_;
  int64_t left_;  // rows of the page that are to come
  const uint8_t* row_;
  const int64_t head_bytes_;
};

template <int64_t kRows>
struct RowBatch {
  const uint8_t* rows[kRows];
  int64_t count = 0;

  // Takes the next rows, of which `left` are left.
  void Fill(RowWalk& walk, int64_t left) {
    count = Min(kRows, left);
    for (int64_t i = 0; i < count; ++i) rows[i] = walk.Next();
  }
  // Rows of a head may lie apart, and are too short for the processor's own prefetcher.
  void AskFor(int64_t row, int64_t bytes) const {
    if (row >= count) return;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(rows[row] + i);
  }
};

// Returns the larger of x and y, and y where either is NaN.
constexpr float Larger(float x, float y) { return x > y ? x : y; }

// Scores rows with the vectors of a path.
template <class S>
class SimdLevelRows {
 public:
  static constexpr int64_t kRows = 4;
  using Batch = RowBatch<kRows>;

  SimdLevelRows(int64_t dim, bool has_spread)
      : dim_(dim), row_bytes_((has_spread ? kDigestVectors : kDigestPieces) * dim) {}

  void Begin(const LevelQueries& queries, const Batch& /*first*/) { queries_ = &queries; }

  void Score(const Batch& now, const Batch& /*next*/, const Batch& after,
             float (*scores)[kScoreColumns]) const {
    for (int64_t i = 0; i < now.count; ++i) {
      after.AskFor(i, row_bytes_);
      ScoreRow(now.rows[i], scores[i]);
    }
  }

 private:
  void ScoreRow(const uint8_t* row, float* scores) const {
    const float* const queries = queries_->of;
    const int64_t heads = queries_->count;
    int64_t h = 0;
    for (; h + S::kLevelHeads <= heads; h += S::kLevelHeads) {
      ScorePieces<S::kLevelHeads>(queries + h * 2 * dim_, row, scores + h);
    }
    if constexpr (S::kLevelHeads > 2) {
      for (; h + 2 <= heads; h += 2) ScorePieces<2>(queries + h * 2 * dim_, row, scores + h);
    }
    for (; h < heads; ++h) ScorePieces<1>(queries + h * 2 * dim_, row, scores + h);
    if (row_bytes_ > kDigestPieces * dim_) AddSpreads(row + kDigestPieces * dim_, scores);
  }

  // Computes the largest products of kHeads queries with a piece.
  template <int kHeads>
  void ScorePieces(const float* queries, const uint8_t* row, float* scores) const {
    using F = typename S::F;
    F sums[kHeads][kDigestPieces];
    for (auto& of_head : sums) {
      for (F& sum : of_head) sum = S::Set1(0.0f);
    }
    for (int64_t d = 0; d < dim_; d += S::kWidth) {
      F q[kHeads];
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) q[h] = S::Load(queries + h * 2 * dim_ + d);
#pragma GCC unroll 4
      for (int piece = 0; piece < kDigestPieces; ++piece) {
        const F x = S::LoadSmallE4M3(row + piece * dim_ + d);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) sums[h][piece] = S::Fma(q[h], x, sums[h][piece]);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      float of[kDigestPieces];
      S::Sum4(sums[h], of);
      scores[h] = Larger(Larger(of[0], of[1]), Larger(of[2], of[3])) * S::kSmallE4M3;
    }
  }

  void AddSpreads(const uint8_t* row, float* scores) const {
    alignas(64) float spreads[kScoreColumns] = {};
    DotRow<S>(queries_->of + dim_, queries_->count, 2 * dim_, row, dim_, spreads, 1);
    for (int64_t h = 0; h < queries_->count; h += S::kWidth) {
      const auto root = S::Sqrt(S::Max(S::Load(spreads + h), S::Set1(0.0f)));
      S::Store(scores + h, S::Fma(S::Set1(kFluxionDeviations), root, S::Load(scores + h)));
    }
  }

  const int64_t dim_, row_bytes_;
  const LevelQueries* queries_ = nullptr;
};

// Writes the scores of blocks [begin, end) of a list for the heads taken.
template <class Rows>
void ScoreBlocks(const LevelScoresParams& p, const FluxionSegments& segments, int32_t level,
                 int64_t slot, int64_t kv_head, const LevelQueries& queries, int64_t begin,
                 int64_t end, Rows& scorer) {
  const auto rows_of = [&](int64_t block) {
    return RowsOfBlock(p.digests, segments, level, static_cast<int32_t>(block));
  };
  const DigestRows first = rows_of(begin);
  const int64_t last = rows_of(end - 1).end;
  const PagedRows& digests = p.digests.of[first.level];
  const int32_t shift = level - first.level;
  RowWalk walk(digests, slot, kv_head, first.begin);
  int64_t left = last - first.begin;
  RowBatch<Rows::kRows> batches[3];
  const auto fill = [&](RowBatch<Rows::kRows>& batch) {
    batch.Fill(walk, left);
    left -= batch.count;
  };
  for (int i = 0; i < 2; ++i) {
    fill(batches[i]);
    for (int64_t row = 0; row < Rows::kRows; ++row) batches[i].AskFor(row, digests.dim);
  }
  scorer.Begin(queries, batches[0]);
  alignas(64) float scores[Rows::kRows][kScoreColumns] = {};
  float best[kScoreHeads];
  for (float& score : best) score = kNegativeInfinity;
  float* outs[kScoreHeads];
  for (int64_t h = 0; h < queries.count; ++h) {
    outs[h] = p.scores + queries.item[h] * p.score_stride;
  }
  int64_t row = first.begin;
  for (int64_t turn = 0; row < last; ++turn) {
    const RowBatch<Rows::kRows>& now = batches[turn % 3];
    fill(batches[(turn + 2) % 3]);
    scorer.Score(now, batches[(turn + 1) % 3], batches[(turn + 2) % 3], scores);
    for (int64_t i = 0; i < now.count; ++i, ++row) {
      for (int64_t h = 0; h < kScoreHeads; ++h) best[h] = Larger(scores[i][h], best[h]);
      const int64_t block = row >> shift;
      if ((row + 1) >> shift == block) continue;
      for (int64_t h = 0; h < queries.count; ++h) outs[h][block] = best[h];
      for (float& score : best) score = kNegativeInfinity;
    }
  }
}

// The blocks of all lists that have scores are taken in order, cut into equal shares.
template <class Rows>
void LevelScores(const LevelScoresParams& p, Worker worker) {
  const int64_t dim = p.head_dim;
  const int64_t kv_heads = p.digests.of[0].kv_heads;
  const int64_t group = p.heads / kv_heads, lists = p.rows * kv_heads;
  if (dim % 16 != 0 || dim > kMaxHeadDim || !AreDigests(p.digests, p.head_dim)) {
    KernelCheckFailed(
        "level_scores: head_dim a multiple of 16 up to 256, digests of it in e4m3, a spread at "
        "level 0 alone");
  }
  const auto blocks_of = [&](int64_t list) {
    const int64_t r = list / kv_heads;
    if (p.slots[r] < 0 || p.levels[list] < 0) return int64_t{0};
    const int64_t all = CpuBlocks(SegmentsOf(p.positions[r]), p.levels[list]);
    for (int64_t i = list * group; i < (list + 1) * group; ++i) {
      if (p.blocks[i] > 0 && p.blocks[i] < all) return all;
    }
    return int64_t{0};
  };
  Rows scorer(dim, HasSpread(p.digests.of[0], p.head_dim));
  int64_t total = 0;
  for (int64_t list = 0; list < lists; ++list) total += blocks_of(list);
  const Range mine = Share(total, worker);
  int64_t before = 0;
  for (int64_t list = 0; list < lists && before < mine.end; ++list) {
    const int64_t count = blocks_of(list);
    const int64_t begin = Max(mine.begin - before, 0), end = Min(mine.end - before, count);
    before += count;
    if (begin >= end) continue;
    const int64_t r = list / kv_heads, kv_head = list % kv_heads, last = (kv_head + 1) * group;
    const int32_t level = p.levels[list];
    const FluxionSegments segments = SegmentsOf(p.positions[r]);
    const int64_t first = FirstBlock(segments, level);
    LevelQueries queries;
    for (int64_t h = kv_head * group; h < last;) {
      h = queries.Take(p, r, h, last, count, dim);
      ScoreBlocks(p, segments, level, p.slots[r], kv_head, queries, first + begin, first + end,
                  scorer);
    }
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
