// This file declares the contracts of the operators of sparse attention: which part of a sequence
// matters (digests, scores, selection), where that part lies (residency), and attention over lists.
// The conventions of params.h hold: rows, slots, padded rows (slot -1: counts of 0, and nothing
// else is written), and the rule of bits. All rows are decode rows, at most one of a sequence in a
// call, unless an operator says otherwise.
//
// Words. A *unit* is what a policy selects: `unit_tokens` consecutive tokens of one KV head, which
// is a block or a single token. Unit u covers positions [u * unit_tokens, (u + 1) * unit_tokens). A
// row's newest unit is position / unit_tokens, and it may be short. The *home* of a sequence is its
// whole cache in DRAM. *Places* are where copies of units lie in HBM, a fixed number for each
// sequence, layer and KV head. A *list* belongs to a (row, KV head): it is list row * kv_heads +
// head.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace sluice::kernels {

// Small rows of numbers that a sequence has beside its cache (digests, partial keys, tables), for
// each KV head, in pages of the cache's pool. Row i of (slot, head) is at
//   base + page_table[slot * table_stride + i / rows_per_page] * page_bytes + head * head_bytes +
//   (i % rows_per_page) * dim * element size.
struct PagedRows {
  void* base;
  const int32_t* page_table;  // [slots][table_stride]
  int64_t table_stride;
  int64_t page_bytes;
  int64_t head_bytes;
  int32_t rows_per_page;
  int32_t dim;  // elements of a row
  DType type;   // element type; tables have int32 where this says kFloat32
  int32_t kv_heads;
};

// Lists of units. Each list is ascending and without repetition.
struct UnitLists {
  int32_t* units;   // [lists][capacity]
  int32_t* counts;  // [lists], each at most capacity
  int32_t capacity;
};

// The rule by which the scores of a group's query heads become one score of their KV head.
enum class GroupReduction : int32_t {
  kMax = 0,
  kMean = 1,
  // The sum over heads of softmax(scores of all units), where scores are scaled.
  kSoftmaxSum = 2,
};

// Computes Quest's digests (arXiv 2406.10774): for every block that holds a position in
// [first_positions[r], positions[r]], the smallest and the largest value of each element of K over
// the block's tokens up to positions[r]. A row of `digests` describes one block: [head_dim]
// smallest values, then [head_dim] largest values, of the cache's type (exact). Rows of one slot
// must not share a block.
//
// If `codes` has a base, every token of each of these blocks that is complete (its last token is at
// positions[r] or before) also gets its key code: two bits for each element of K, which say in
// which quarter of the block's range [smallest, largest] the element lies. A row of `codes`
// describes one token: KeyCodeWords(head_dim) words of bits that are set in the upper half of the
// range, then as many of bits that are set in the outer quarters; element d is bit d % 32 of word d
// / 32, and bits behind head_dim are 0. In float32, with middle = (smallest + largest) / 2 and
// quarter = (largest - smallest) / 4: upper is k > middle; outer is k > middle + quarter in the
// upper half, and k <= middle - quarter in the lower one.
struct DigestParams {
  PagedCache cache;
  PagedRows digests;               // dim = 2 * head_dim
  const int32_t* slots;            // [rows]
  const int32_t* first_positions;  // [rows]; null: positions
  const int32_t* positions;        // [rows]
  int32_t rows;
  // int32, dim = 2 * KeyCodeWords(head_dim); base null: none are wanted
  PagedRows codes = {};
};

// Returns how many words hold one bit of every element of a key.
constexpr int32_t KeyCodeWords(int32_t head_dim) { return (head_dim + 31) / 32; }
// Returns where in a block's range an element with this code is taken to lie, from 0 to 1. Most
// elements lie near the middle, so these levels err less than the middles of the quarters.
constexpr double KeyCodeLevel(bool upper, bool outer) {
  return 0.5 + (upper ? 1 : -1) * (outer ? 0.4 : 0.1);
}

// Computes scores[l][b] = reduction over the group's heads of scale * sum_d (q_d * middle_d +
// (1 - narrowed) * |q_d| * half_d), for b < positions[r] / block_tokens, where middle and half are
// the middle of the range [smallest, largest] and half of its width. If narrowed is 0, the summand
// is max(q_d * largest_d, q_d * smallest_d), and the score an upper bound of scale * q k over block
// b (Quest). No key is at its bound in every element, so a bound of narrowed ranges ranks blocks
// better. The newest block's score is -inf and its digest is not read: one layer ahead of
// time the digest lacks the row's own token, and where that token begins the block, the digest is
// another sequence's. The policy that selects forces the newest block in.
struct DigestScoresParams {
  const float* q;  // [rows][q_stride], heads * head_dim used, after RoPE
  int64_t q_stride;
  const int32_t* slots;
  const int32_t* positions;
  PagedRows digests;
  float* scores;         // [lists][score_stride]
  int64_t score_stride;  // >= number of units of the longest row
  int32_t rows;
  int32_t heads;
  int32_t block_tokens;
  float scale;
  GroupReduction reduction;
  float narrowed = 0;  // from 0 to 1
};

// Computes the scores of a shortlist of blocks from key codes: a head's score of a block in `units`
// is the natural-log sum-exp of scale * q k' over the block's tokens, where each element of k' is
// smallest + (largest - smallest) * KeyCodeLevel of the token's code. The reduction over a group's
// heads is over the shortlist: blocks outside it, and the newest block (whose codes are not read),
// have the score -inf, and no part in a softmax. Scores are approximate by nature: a kernel may
// round k' and q to bf16.
struct RefineScoresParams {
  const float* q;  // as in DigestScoresParams
  int64_t q_stride;
  const int32_t* slots;
  const int32_t* positions;
  PagedRows digests;
  PagedRows codes;
  UnitLists units;
  float* scores;  // [lists][score_stride]
  int64_t score_stride;
  int32_t rows;
  int32_t heads;
  int32_t block_tokens;
  float scale;
  GroupReduction reduction;
};

// Computes scores from the keys themselves: a head's score of a unit is the natural-log sum-exp of
// scale * q k over the unit's tokens up to positions[r]. These are the oracle's scores, which no
// selector can know beforehand.
struct ExactScoresParams {
  const float* q;
  int64_t q_stride;
  const int32_t* slots;
  const int32_t* positions;
  PagedCache cache;
  float* scores;
  int64_t score_stride;
  int32_t rows;
  int32_t heads;
  int32_t unit_tokens;
  float scale;
  GroupReduction reduction;
};

// Computes InfiniGen's partial keys: key row [head_dim] times projection [head_dim][rank], for
// every position in [first_positions[r], positions[r]]. A row of `partial` describes one token.
struct PartialKeysParams {
  PagedCache cache;         // may be a ring, as in DigestParams
  const float* projection;  // [kv_heads][head_dim][rank]
  PagedRows partial;        // dim = rank
  const int32_t* slots;
  const int32_t* first_positions;  // [rows]; null: positions
  const int32_t* positions;
  int32_t rows;
};

// Computes scores[l][t] = reduction over the group's heads of scale * (q projection) . partial[t],
// for t < positions[r]. scores[l][positions[r]] is -inf, and that row of `partial` is not read: a
// layer's newest key is not known yet when its queries are predicted.
struct PartialScoresParams {
  const float* q;
  int64_t q_stride;
  const int32_t* slots;
  const int32_t* positions;
  const float* projection;  // [kv_heads][head_dim][rank]
  PagedRows partial;
  float* scores;
  int64_t score_stride;
  int32_t rows;
  int32_t heads;
  int32_t head_dim;
  float scale;
  GroupReduction reduction;
};

// Selects from a row's units 0 .. positions[r] / unit_tokens: the first `first_units`, the newest
// `last_units`, and, among the others whose score is at least the list's largest score - margin,
// those with the highest scores, lower units first among equals, up to k units in all, or up to
// short_k - u / kShortKUnits or u / k_divisor if that is more and the row has u units. Forced units
// are counted and never left out. A list that is not wanted selects nothing, not even forced units,
// and its scores are not read. A NaN score is -inf. The largest score is over all units, and
// largest - margin is a float32.
//
// The runners-up of a list are units that scores could have chosen and did not: the best of them,
// lower units first among equals, at most the capacity of the list, in order of their numbers. They
// are a hint: a kernel may list fewer or none, but it never lists a worse unit than one that it
// leaves out.
struct TopKParams {
  const float* scores;  // [lists][score_stride]
  int64_t score_stride;
  const int32_t* slots;
  const int32_t* positions;
  UnitLists selected;  // capacity >= every row's k; k >= first_units + last_units
  int32_t rows;
  int32_t kv_heads;
  int32_t unit_tokens;
  int32_t k;
  int32_t first_units;
  int32_t last_units;
  float margin;                     // +inf: no margin
  int32_t short_k;                  // 0: no row has more for being short
  UnitLists runners_up;             // units null: no runners-up are wanted
  const int32_t* wanted = nullptr;  // [lists] 0: the list is not wanted; null: every list is
  int32_t k_divisor = 0;            // 0: no row has more for being long
};
// Units that a row may have more for each unit that it selects fewer. It is how many digests are
// scored in the time of one block's key codes (policies/scout/README.md), so that the scores of a
// row take the same time at any length.
inline constexpr int32_t kShortKUnits = 16;
// Return up to how many of a row's `units` units are selected.
constexpr int32_t KOfRow(int32_t k, int32_t short_k, int32_t units) {
  const int32_t of_row = short_k - units / kShortKUnits;
  return of_row > k ? of_row : k;
}
constexpr int32_t KOfRow(const TopKParams& p, int32_t units) {
  const int32_t k = KOfRow(p.k, p.short_k, units);
  const int32_t of_long = p.k_divisor > 0 ? units / p.k_divisor : 0;
  return of_long > k ? of_long : k;
}

// Returns whether the list, which is of that row, selects anything.
constexpr bool IsWanted(const TopKParams& p, int64_t list, int64_t row) {
  return p.slots[row] >= 0 && (p.wanted == nullptr || p.wanted[list] != 0);
}

// Tells which units of a sequence and layer have a place in HBM. The newest `ring` units are always
// at place unit % ring and in no table. The places behind the ring hold recalled units.
struct ResidencyTable {
  PagedRows place_of;  // int32, dim 1, row = unit: its place, or -1
  // int32, dim 2, row = place: the unit that has it, or -1, or kNoPlace where the sequence has
  // fewer places; and the position at which the unit was last selected. Rows [0, ring) are not
  // used.
  PagedRows places;
  int32_t ring;
  int32_t count;  // rows of `places`
  // [kv_heads], or null: no head is persistent. If not 0, every unit of the head has a place: unit
  // u has the place ring + u once it has left the ring, and the tables have nothing of the head.
  const int32_t* persistent = nullptr;
};
inline constexpr int32_t kNoPlace = -2;

// Splits each list into the units that have a place and those that have none, and stamps the places
// of selected units with positions[r]. REQUIRES: no head is persistent.
struct SplitParams {
  ResidencyTable residency;
  const int32_t* slots;
  const int32_t* positions;
  UnitLists selected;
  // Selected units that have a place. With `whole`: all units that have a place, the ring included;
  // the capacity must be enough for all of them.
  UnitLists resident;
  int32_t* places;    // [lists][resident.capacity], the places of `resident`
  UnitLists missing;  // selected units that have no place
  int32_t rows;
  int32_t kv_heads;
  int32_t unit_tokens;
  bool whole;
};

// Counters of one slot and layer, over all the sequences that the slot has had.
struct SparseCounters {
  int64_t steps;
  int64_t selected;  // tokens x KV heads
  int64_t missing;   // tokens x KV heads that were selected and had no place
  int64_t recalled;  // tokens x KV heads that were given a place
  int64_t recalls;   // steps in which a recall was due
  int64_t lookups;   // labels that were looked up (kernels/hash_params.h)
  int64_t misses;    // lookups that missed
  int64_t held;      // tokens x KV heads that persistent heads selected
  int64_t read;      // tokens x KV heads that the device read over the link, and gave no place
};

// Decides whether a row's missing units are recalled in this step. With interval > 0 they are
// recalled in every interval-th step of the sequence. Else they are recalled once their share,
// missing / (kv_heads * budget_units), would pass `share_limit` in the next step if it went on
// growing in proportion to the steps since the last recall: once share * (since + 2) / (since + 1)
// > share_limit, in float64. Adds to the counters steps, selected and missing, in whole units.
struct RecallDueParams {
  const int32_t* slots;
  UnitLists selected;
  UnitLists missing;
  int32_t* since;            // [slots] steps since the last recall; 0 in the first step after it
  SparseCounters* counters;  // [slots]
  int32_t* due;              // [rows] 0 or 1
  int32_t rows;
  int32_t kv_heads;
  int32_t unit_tokens;
  int32_t budget_units;
  int32_t interval;
  float share_limit;
};

// Gives places to the missing units of each due row, in their order, until no place is left to
// give: free places first, then those of the units selected longest ago, lower places first among
// equals, and never a place that was stamped with this step's position. A unit's new place is
// stamped with that position. Updates the tables and lists the moves, as indices of pieces of a
// block (unit_tokens = block_tokens) or of a token's K row (unit_tokens = 1) of the two caches:
//   block: page * kv_heads + head;  token: (page * kv_heads + head) * 2 * block_tokens + offset
// so that one Transfer moves blocks, and two Transfers (the second block_tokens rows further) move
// tokens. List l's moves are [l * missing.capacity, ...).
struct RecallParams {
  ResidencyTable residency;
  const int32_t* slots;
  const int32_t* positions;
  UnitLists missing;
  const int32_t* due;   // [rows]; null: every row
  PagedCache home;      // block_table by block
  PagedCache resident;  // block_table by place (blocks) or place / block_tokens (tokens)
  int32_t* source_units;
  int32_t* target_units;
  int32_t* move_counts;      // [lists]
  SparseCounters* counters;  // [slots], or null: adds to `recalled` and `recalls` of due rows
  int32_t rows;
  int32_t kv_heads;
  int32_t unit_tokens;
};

// Keeps what leaves the ring. Where position positions[r] + 1 begins a unit, unit u = (positions[r]
// + 1) / unit_tokens - ring is no longer among the newest `ring` ones then, and its place in the
// ring is the new unit's. If u >= 0 and u has no place behind the ring, it is given one by the rule
// of Recall: a free one, else that of the unit selected longest ago, never one that was stamped
// with positions[r], with which the new place is stamped. With `only_free` it is given a free place
// or none. In a persistent head its place is always ring + u. Its K and V are copied from its place
// in the ring to the new one. Where no place is to be given, nothing changes.
struct RetainParams {
  ResidencyTable residency;
  const int32_t* slots;
  const int32_t* positions;
  PagedCache resident;  // as in RecallParams
  int32_t rows;
  int32_t unit_tokens;
  bool only_free = false;
};

// Copies each row's K and V, as RopeAppendParams::written holds them, to their position in `home`.
// Rows may be of any kind.
struct WriteThroughParams {
  const void* written;  // [rows][kv_heads][2][head_dim] of the cache's type
  const int32_t* slots;
  const int32_t* positions;
  PagedCache home;
  int32_t rows;
};

// Computes attention of each row over the tokens, up to its own position, of the units in its
// lists. Token t of list entry i is token places[i] * unit_tokens + t of `cache`, as
// cache.block_table maps it. The tokens of a list count in order, and the split of a list depends
// on the list alone (on a CPU it is cut at multiples of kAttentionSplitTokens of its tokens, as
// attention is). An empty list gives o = 0, lse = -inf.
struct SparseAttentionParams {
  const float* q;  // [rows][q_stride], heads * head_dim used
  int64_t q_stride;
  const int32_t* slots;
  const int32_t* positions;
  PagedCache cache;
  const int32_t* units;   // [lists][capacity]; null: 0, 1, ..., and every token counts
  const int32_t* places;  // [lists][capacity]; null: units
  const int32_t* counts;  // [lists]
  float* o;               // [rows][heads][head_dim]
  float* lse;             // [rows][heads]
  int32_t capacity;
  int32_t unit_tokens;
  int32_t rows;
  int32_t heads;
  // Only KV heads [kv_head_begin, kv_head_end) are computed; the others' results are left alone.
  int32_t kv_head_begin;
  int32_t kv_head_end;
  float scale;
  // [lists] 0: the list is not computed, and its results are left alone. Null: every list is.
  const int32_t* wanted = nullptr;
};

// Updates HGCA's moving average of attention weights over the units that a row attends to on the
// device:
//   w_t = reduction over the group's heads of exp(scale * q_h k_t - lse_h)
//   average_t = w_t at the row's own token, else (1 - alpha) average_t + alpha w_t
// A row of `average` is a token of a place: places[i] * unit_tokens + t. (HGCA, algorithm 1, line
// 8; lse is that of the device's part alone.)
struct MovingAverageParams {
  const float* q;
  int64_t q_stride;
  const int32_t* slots;
  const int32_t* positions;
  PagedCache cache;
  const int32_t* units;
  const int32_t* places;
  const int32_t* counts;
  const float* lse;   // [rows][heads]
  PagedRows average;  // float32, dim 1
  int32_t capacity;
  int32_t unit_tokens;
  int32_t rows;
  int32_t heads;
  float scale;
  float alpha;
  GroupReduction reduction;  // kMax or kMean
};

}  // namespace sluice::kernels
