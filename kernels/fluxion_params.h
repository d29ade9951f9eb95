// This file declares the contracts of Fluxion's operators (kernels/fluxion_segments.h and
// kernels/sparse_params.h have their words): digests of blocks at four levels, the prediction of
// how much of the cpu segment each query head needs, and the selection of that much. Rows are
// decode rows, at most one of a sequence in a call.
#pragma once

#include <cstdint>

#include "kernels/fluxion_segments.h"
#include "kernels/sparse_params.h"

namespace sluice::kernels {

// Digests of the blocks of every level. A block has four *pieces* of as many tokens each. Row b of
// `of[level]` has for each piece of the block the mean of its keys less the *centre* of the KV
// head's keys, [kDigestPieces][head_dim], in e4m3 without scales. Without a centre, e4m3 would
// spend its four bits of precision on what all keys have in common, which says nothing of their
// order.
//
// A level above 0 may have no digests, and no memory for them (`base` is null). A block is then
// known by the digests of its blocks of level 0. Where level 0 alone has digests, its rows may have
// a fifth vector, the *spread* [head_dim] in e4m3: the mean, over the block's keys, of the squared
// differences from the means of their pieces.
struct LevelDigests {
  PagedRows of[kFluxionLevels];  // kFloat8E4M3, dim = kDigestPieces or kDigestVectors * head_dim
};
inline constexpr int32_t kDigestPieces = 4;
inline constexpr int32_t kDigestVectors = kDigestPieces + 1;  // of a row that has a spread

// The rows of digests by which a block is known: [begin, end) of `of[level]`.
struct DigestRows {
  int32_t level, begin, end;
};
namespace {

// Returns whether rows of digests of heads of `head_dim` elements have a spread.
constexpr bool HasSpread(const PagedRows& rows, int32_t head_dim) {
  return rows.dim == kDigestVectors * head_dim;
}

// Returns whether the rows of all levels are those of digests of heads of `head_dim` elements.
constexpr bool AreDigests(const LevelDigests& digests, int32_t head_dim) {
  const bool has_spread = HasSpread(digests.of[0], head_dim);
  for (int32_t level = 0; level < kFluxionLevels; ++level) {
    const PagedRows& rows = digests.of[level];
    if (level > 0 && rows.base == nullptr) continue;
    if (rows.type != DType::kFloat8E4M3 || rows.kv_heads != digests.of[0].kv_heads) return false;
    if (level > 0 && has_spread) return false;
    if (!has_spread && rows.dim != kDigestPieces * head_dim) return false;
  }
  return true;
}

// Returns the rows of block `block` of a level. Rows that lie in the sink are left out.
constexpr DigestRows RowsOfBlock(const LevelDigests& digests, const FluxionSegments& segments,
                                 int32_t level, int32_t block) {
  if (digests.of[level].base != nullptr) return {level, block, block + 1};
  const int32_t begin = block << level, first = FirstBlock(segments, 0);
  return {0, begin > first ? begin : first, (block + 1) << level};
}

}  // namespace

// Computes the digests of every level that has any, for each *chunk*, which is a block of the
// largest level, whose last token is in [first_positions[r], positions[r]]. A block that lies in
// the sink is not written. A block whose first half lies in the sink has its third and fourth piece
// twice. Means less centres, and spreads, are those of float64 within what float32 sums differ by,
// and then rounded to e4m3 (kernels/e4m3.h). The piece and the spread of a key that is not finite
// are unspecified.
struct LevelDigestsParams {
  PagedCache cache;  // may be a ring, as in DigestParams
  LevelDigests digests;
  const float* centres;            // [slots][kv_heads][head_dim]; null: all are 0
  const int32_t* slots;            // [rows]
  const int32_t* first_positions;  // [rows]; null: positions
  const int32_t* positions;        // [rows]
  int32_t rows;
};

// The statistics of heads at the *anchor*, by slot: the last token of the prompt, or a later one.
// All moments are those of the population; the kurtosis is the plain one, 3 for a normal
// distribution. A moment of no tokens or of equal values is 0.
//
// `kv` has for each KV head, in this order: the mean length of the sink's keys, and of its values;
// the length of the mean key of the cpu segment, and of its mean value; mean, variance, skewness
// and kurtosis of the lengths of the cpu segment's keys, and the same of its values; then the mean
// key of the cpu segment [head_dim].
//
// `heads` has for each query head, with its query q' at the anchor: mean, variance, skewness and
// kurtosis of z = q' k / (|q'| sqrt(head_dim)) over the cpu segment; the natural-log sum-exp of the
// scaled scores over sink, cpu segment and local tokens (-inf of no tokens); the length of the
// attention's output over each of these (0 of no tokens); |q'|; the four budgets that
// AnchorStatistics finds; then q' [head_dim].
//
// `resident` is the largest length, over the layer's query heads, of the attention's output over
// sink and local tokens together.
struct FluxionAnchors {
  float* kv;        // [slots][kv_heads][kAnchorKvNumbers + head_dim]
  float* heads;     // [slots][heads][kAnchorHeadNumbers + head_dim]
  float* resident;  // [slots]
};
inline constexpr int32_t kAnchorKvNumbers = 12;
inline constexpr int32_t kAnchorHeadNumbers = 15;

// Computes the statistics of anchors at positions[r]. The budget of a query head at a level is
// found like this. Blocks of the cpu segment are taken in descending order of their scores (those
// of LevelScores), lower blocks first among equals. The error of a prefix of that order
// is |o' - o|, where o is the head's attention over all tokens, and o' that over the default set
// and the prefix. The budget is the share of the cpu segment in the shortest prefix from which on
// every longer one has an error of at most tau times the largest |o| of the layer's query heads; a
// block counts with all of its LevelTokens, and the budget is at most 1. It is 0 where the cpu
// segment is empty.
struct AnchorStatisticsParams {
  const float* q;  // [rows][q_stride], heads * head_dim used, after RoPE
  int64_t q_stride;
  const int32_t* slots;
  const int32_t* positions;
  PagedCache cache;  // not a ring
  LevelDigests digests;
  FluxionAnchors anchors;
  void* scratch;  // AnchorScratchBytes of the longest row; not shared with another stream
  int32_t rows;
  int32_t heads;
  float scale;
  float tau;
};
// Returns the bytes of scratch with which a row of up to `tokens` tokens is computed. Rows are
// computed one after the other.
constexpr int64_t AnchorScratchBytes(int64_t tokens, int64_t heads, int64_t head_dim) {
  const int64_t units = tokens / LevelTokens(0) + 1;
  // By query head: scores of tokens; scores, weights, weighted values and the order of blocks.
  return heads * (4 * tokens + 4 * units * (head_dim + 8) + 16 * head_dim + 256);
}

// The network of the predictor: outputs = W_n gelu(... gelu(W_1 (x - mean) / deviation + b_1) ...)
// + b_n, with the GELU that has erf. `values` holds, in float32, mean and deviation
// [kFluxionFeatures] each, then for every layer its weights [in][out] and its bias [out].
//
// kLine has three outputs: bgt0, k and the logit of streaming. The budget at a level is bgt0 + k
// log2(LevelTokens) (Fluxion, equation 1). kFour has five: log2 of the budget at each level, and
// the logit. A budget is held to [0, 1]. A head *streams*, and so attends to its default set alone,
// where the logit is finite and sigmoid(logit) > threshold.
enum class FluxionForm : int32_t { kLine = 0, kFour = 1 };
inline constexpr int32_t kFluxionFeatures = 41;
inline constexpr int32_t kFluxionMostLayers = 8;
inline constexpr int32_t kFluxionMostWidth = 1024;
struct FluxionNetwork {
  const float* values;
  int32_t layers;
  int32_t widths[kFluxionMostLayers + 1];  // kFluxionFeatures first
  FluxionForm form;
  float threshold;
};

// Predicts the budgets of every query head from 41 features of the head:
//   0-3    layer; query head; tokens of the row's cpu segment; its other tokens
//   4-15   the 12 numbers of the KV head in FluxionAnchors::kv
//   16     q mean_key / (|q| sqrt(head_dim))
//   17-20  the four moments of z in FluxionAnchors::heads
//   21-23  natural-log sum-exp of q over sink, cpu segment and local tokens. The cpu segment has
//          ln(n) + |q| f16 + |q|^2 variance / 2, with its n tokens and the variance of z
//   24-26  the same three at the anchor, as FluxionAnchors::heads has them
//   27-31  length of the output over sink and local tokens for q; over sink, cpu segment and local
//          tokens at the anchor
//   32-34  |q|; |q'|; cosine of q and q'
//   35-38  budgets at the anchor
//   39-40  the largest length, over the layer's query heads, of the output over sink and local
//          tokens together: for q, and at the anchor; not a number if one of these is not
// Scores are q k / sqrt(head_dim).
// If a feature is not finite, the budgets of the head are 1, and it does not stream. A budget that
// is not finite is 1 (a logarithm of -inf counts as not finite), and its head does not stream.
// Results are those of float64 within what float32 sums differ by, and the same in any batch.
struct PredictBudgetsParams {
  const float* q;  // [rows][q_stride], heads * head_dim used, after RoPE
  int64_t q_stride;
  const int32_t* slots;
  const int32_t* positions;
  const float* sink_o;    // [rows][heads][head_dim] attention to the row's sink
  const float* sink_lse;  // [rows][heads]
  const float* local_o;   // the same of its local tokens
  const float* local_lse;
  FluxionAnchors anchors;  // of the layer
  FluxionNetwork network;
  float* features;     // [rows][heads][kFluxionFeatures], or null: they are not wanted
  float* budgets;      // [rows][heads][kFluxionLevels]
  int32_t* streaming;  // [rows][heads] 1 or 0
  int32_t rows;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t layer;
};

// Chooses one block size for the query heads of each KV head (equation 3), and how many blocks each
// of them selects. At a level a head that does not stream selects BlocksOfShare of its budget. The
// level is the one from `first_level` to `last_level` with the least volume: the blocks of the cpu
// segment (for their digests), and LevelTokens for each block that a head selects, summed over the
// heads; the smallest block among equals. A head that streams selects none. If all of a list's
// heads stream, or the cpu segment is empty, the list has no level. So it is with the lists of
// padded rows.
struct PlanRetrievalParams {
  const float* budgets;      // [rows][heads][kFluxionLevels]
  const int32_t* streaming;  // [rows][heads]
  const int32_t* slots;
  const int32_t* positions;
  int32_t* levels;   // [lists]; -1: no level
  int32_t* blocks;   // [rows][heads]
  int32_t* volumes;  // [lists], at the level; 0: no level
  int32_t rows;
  int32_t heads;
  int32_t kv_heads;
  int32_t first_level;
  int32_t last_level;
};

// A digest's score is so many standard deviations of its keys, by its spread, above its best piece.
inline constexpr float kFluxionDeviations = 2;

// Computes scores[row * heads + h][b] for the blocks b of the row's cpu segment at the list's
// level. It is the largest score of the rows by which the block is known (RowsOfBlock): a row's is
// the largest product q . piece of its pieces, and where it has a spread,
// kFluxionDeviations * sqrt(sum_d q_d^2 spread_d) above that. That is about the q k of the block's
// best key. Quest's bound by the least and the largest of each element, which Fluxion publishes, is
// far above any key's q k, and loses facts (src/attention/policies/fluxion/README.md). A head that
// selects no block or all of them has no scores, and nothing is written for it. Scores by digests
// that are not numbers are unspecified.
struct LevelScoresParams {
  const float* q;  // [rows][q_stride], heads * head_dim used, after RoPE
  int64_t q_stride;
  const int32_t* slots;
  const int32_t* positions;
  LevelDigests digests;
  const int32_t* levels;  // [lists]
  const int32_t* blocks;  // [rows][heads]
  float* scores;          // [rows * heads][score_stride]
  int64_t score_stride;   // >= the end of the longest row's blocks at level 0
  int32_t rows;
  int32_t heads;
  int32_t head_dim;
};

// Selects for each query head the blocks[row][h] blocks of its list's level with the highest
// scores, lower blocks first among equals (a NaN score is -inf; scores[..][b] is that of block b of
// the sequence), and lists the union of what a KV
// head's query heads select, in units of unit_tokens tokens, which are no larger than a block. The
// units of the sink are left out. A list without a level selects nothing.
struct SelectUnionParams {
  const float* scores;  // [rows * heads][score_stride], as LevelScores leaves them
  int64_t score_stride;
  const int32_t* slots;
  const int32_t* positions;
  const int32_t* levels;     // [lists]
  const int32_t* blocks;     // [rows][heads]
  UnitLists selected;        // capacity >= every row's units
  SparseCounters* counters;  // [slots], or null: adds to steps and selected, in tokens
  int32_t rows;
  int32_t heads;
  int32_t kv_heads;
  int32_t unit_tokens;  // 16, 32 or 64
};

// Lists the units of each row's sink and of its local tokens, with their places, and stamps the
// places of the sink's units with positions[r], so that they keep them. REQUIRES: every unit of the
// sink that has left the ring has a place, and the ring holds all local tokens.
struct SegmentListsParams {
  ResidencyTable residency;
  const int32_t* slots;
  const int32_t* positions;
  UnitLists sink, local;
  int32_t* sink_places;   // [lists][sink.capacity]
  int32_t* local_places;  // [lists][local.capacity]
  int32_t rows;
  int32_t kv_heads;
  int32_t unit_tokens;  // 16, 32 or 64
};

// Divides each list in two: `first` has its first min(n, ceil(n * share)) units, where the product
// is a float32, and `rest` has the others. The share is the list's own where `shares` are given.
struct DivideListsParams {
  UnitLists from;
  UnitLists first, rest;  // of the capacity of `from`
  const int32_t* slots;
  // [slots], or null: adds the units of `from` to `missing`, and those of `first` to `read`, in
  // tokens
  SparseCounters* counters;
  int32_t rows;
  int32_t kv_heads;
  int32_t unit_tokens;
  float share;  // from 0 to 1
  const float*
      shares;  // [slots][kv_heads] from 0 to 1, by the row's slot, or null: `share` for all
};

}  // namespace sluice::kernels
