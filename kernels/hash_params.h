// This file declares the contracts of CLO's operators (kernels/sparse_params.h has its words):
// hash codes that stand for keys and queries in scores (HATA), and the lookup of what a KV head
// selected earlier.
//
// The *product* of a vector x with column b of a hash matrix is sum_d x_d * hash[d][b], summed in
// float32. The *code* of a key is a bit for each column: bit b is 1 where the product is above 0,
// and is bit b % 32 of word b / 32. Codes have 32 * words bits, at most kMaxHashBits.
//
// The code of a query has a *level* for each column, a whole number from -7 to 7 that follows the
// product. Its bits as a number of four bits in two's complement are four *planes*, each laid out
// like the code of a key: [kHashPlanes][words].
//
// Keys of a head have a large common part, which says nothing of their order: products of a query
// with any two keys differ by as much as those with the two keys less one vector, the *centre*.
// Without it most bits of all keys are alike.
#pragma once

#include <cstdint>

#include "kernels/params.h"
#include "kernels/sparse_params.h"

namespace sluice::kernels {

inline constexpr int32_t kMaxHashBits = 256;
inline constexpr int32_t kMaxHashGroup = 64;  // query heads of a KV head
inline constexpr int32_t kHashPlanes = 4;
inline constexpr int32_t kMostHashLevels = 7;
inline constexpr int32_t kCentreKeys = 256;

// Computes the centre of a sequence's keys for each KV head: the mean of the keys at positions
// i * n / count for i < count, where n = positions[r] + 1 and count = min(n, kCentreKeys). Sums run
// in that order, in float32.
struct KeyCentresParams {
  PagedCache cache;          // not a ring, and without head tables
  const int32_t* slots;      // [rows]
  const int32_t* positions;  // [rows]
  float* centres;            // [slots][kv_heads][head_dim]
  int32_t rows;
};

// Computes codes and lengths (the square root of the sum of squares) of keys less their centre, for
// every position in [first_positions[r], positions[r]]. A row of `codes` and one of `lengths`
// describe one token.
struct HashKeysParams {
  PagedCache cache;                // may be a ring, as in DigestParams
  const float* hash;               // [kv_heads][head_dim][32 * codes.dim]
  PagedRows codes;                 // int32, dim = words of a code
  PagedRows lengths;               // dim 1
  const int32_t* slots;            // [rows]
  const int32_t* first_positions;  // [rows]; null: positions
  const int32_t* positions;        // [rows]
  int32_t rows;
  const float* centres = nullptr;  // as in KeyCentresParams; null: all are 0
};

// Computes the codes of queries, each with the hash matrix of its KV head. `levels` is 1 or
// kMostHashLevels. With 1 a level is 1 where a key would have a bit, and else -1 (HATA). Otherwise
// it is the product times levels over the query's largest absolute product, rounded to the nearest
// whole number, halves to the even one. It is 0 where that is not a number.
struct HashQueriesParams {
  const float* q;  // [rows][q_stride], heads * head_dim used, after RoPE
  int64_t q_stride;
  const int32_t* slots;
  const float* hash;  // as in HashKeysParams
  int32_t* codes;     // [rows][heads][kHashPlanes][words]
  int32_t rows;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t words;
  int32_t levels;
};

// Computes scores[l][t] = agreement * lengths[t] for t < positions[r]. The agreement of a query
// with key t is the sum of its levels, each with a minus where the key's bit is 0. That of the
// group is the largest of its queries' (kMax), or their sum (kMean, which leaves out the division).
// It is exact, and the product is one float32 rounding. (With one level and kMean this is HATA's
// score times the number of bits, which does not change an order.) scores[l][positions[r]] is -inf,
// and that row of `codes` is not read: a layer's newest key is not known yet when its queries are
// predicted. Nothing is written for a list that is not wanted.
struct HashScoresParams {
  const int32_t* q_codes;  // [rows][heads][kHashPlanes][codes.dim]
  const int32_t* wanted;   // [lists] 0: the list is not wanted; null: every list is
  const int32_t* slots;
  const int32_t* positions;
  PagedRows codes;
  PagedRows lengths;
  float* scores;         // [lists][score_stride]
  int64_t score_stride;  // > the largest position
  int32_t rows;
  int32_t heads;
  GroupReduction reduction;  // kMax or kMean
};

// The rule by which the similarities of a group's query heads become one of their KV head.
enum class SimilarityRule : int32_t {
  // sum(w) / sum(w / similarity) over the group's heads, with their importance as w (CLO, equation
  // 10). 1 where all importance is 0; else 0 where a head that counts has a similarity of 0 or
  // less.
  kHarmonic = 0,
  kMin = 1,
  kMean = 2,
};

// Decides for each list whether its KV head may use what it selected earlier. A head's *label* are
// the queries for which it selected. A list misses where the head has no label of an earlier
// position (a row that is computed again selects again), where a query or its label has a length of
// 0 or not a finite one, where the similarity of the queries with the
// label (cosines, by `rule`) is below the head's threshold, or where the label is
// refresh_tokens + position / refresh_divisor positions old. The label of a list that misses
// becomes the row's queries.
struct LabelLookupParams {
  const float* q;  // [rows][q_stride], heads * head_dim used
  int64_t q_stride;
  const int32_t* slots;
  const int32_t* positions;
  const float* importance;   // [heads], 0 or more
  const float* thresholds;   // [kv_heads]
  float* labels;             // [slots][heads][head_dim]
  int32_t* labelled;         // [slots][kv_heads] position of the label's row; -1: there is none
  int32_t* missed;           // [lists] 1 or 0; 0 for padded rows
  SparseCounters* counters;  // [slots]; null: nothing is counted
  int32_t rows;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t refresh_tokens;   // 0 with a divisor of 0: labels do not age
  int32_t refresh_divisor;  // 0: the age does not depend on the position
  SimilarityRule rule;
  // [lists] 0: the list has no lookup, and its label stays; null: every list has one
  const int32_t* wanted = nullptr;
  int32_t others = 0;  // 1 or 0: `missed` of lists that have no lookup
};

// Returns the age from which on a label is renewed; 0: never.
constexpr int32_t LabelAge(const LabelLookupParams& p, int32_t position) {
  return p.refresh_tokens + (p.refresh_divisor > 0 ? position / p.refresh_divisor : 0);
}

}  // namespace sluice::kernels
