// The contracts of the operators of sparse attention: which part of a sequence matters (digests,
// scores, selection), where it lies (residency), and attention over lists. The conventions of
// params.h hold: rows, slots, padded rows (slot -1: counts of 0, nothing else is written), and the
// rule of bits. Rows are decode rows here, at most one of a sequence in a call, unless an operator
// says otherwise.
//
// Words. A *unit* is what is selected: `unit_tokens` consecutive tokens of one KV head, a block or
// a single token; unit u covers positions [u * unit_tokens, (u + 1) * unit_tokens). A row's newest
// unit is position / unit_tokens, and it may be short. The *home* of a sequence is its whole cache
// in DRAM; *places* are where copies of units lie in HBM, a fixed number for each sequence, layer
// and KV head. A *list* belongs to a (row, KV head): it is list row * kv_heads + head.
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
  DType type;   // of the elements; tables have int32 where this says kFloat32
  int32_t kv_heads;
};

// Lists of units, each ascending and without repetition.
struct UnitLists {
  int32_t* units;   // [lists][capacity]
  int32_t* counts;  // [lists], each at most capacity
  int32_t capacity;
};

// How the scores of the query heads of a group become one score of their KV head.
enum class GroupReduction : int32_t {
  kMax = 0,
  kMean = 1,
  // The sum over heads of softmax(scores of all units), of scaled scores.
  kSoftmaxSum = 2,
};

// Quest's digests: of every block that holds a position in [first_positions[r], positions[r]], the
// least and the largest value of each element of K over the block's tokens up to positions[r]. A
// row of `digests` is one block: [head_dim] least, then [head_dim] largest, of the cache's type
// (exact). Rows of one slot must not share a block. (Quest, arXiv 2406.10774.)
struct DigestParams {
  PagedCache cache;
  PagedRows digests;               // dim = 2 * head_dim
  const int32_t* slots;            // [rows]
  const int32_t* first_positions;  // [rows]; null: positions
  const int32_t* positions;        // [rows]
  int32_t rows;
};

// scores[l][b] = reduction over the group's heads of  scale * sum_d max(q_d * largest_d, q_d *
// least_d), an upper bound of scale * q k over block b; for b < positions[r] / block_tokens. The
// newest block's score is -inf and its digest is not read: a layer ahead it lacks the row's own
// token, and is another sequence's where that token begins the block. Whoever selects forces it in.
struct DigestScoresParams {
  const float* q;  // [rows][q_stride], heads * head_dim used, after RoPE
  int64_t q_stride;
  const int32_t* slots;
  const int32_t* positions;
  PagedRows digests;
  float* scores;         // [lists][score_stride]
  int64_t score_stride;  // >= units of the longest row
  int32_t rows;
  int32_t heads;
  int32_t block_tokens;
  float scale;
  GroupReduction reduction;
};

// The same from the keys themselves: a head's score of a unit is the natural-log sum-exp of
// scale * q k over the unit's tokens up to positions[r]. What no selector can know beforehand: the
// oracle's scores.
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

// InfiniGen's partial keys: key row [head_dim] times projection [head_dim][rank], for every
// position in [first_positions[r], positions[r]]. A row of `partial` is one token.
struct PartialKeysParams {
  PagedCache cache;         // may be a ring, as Digest's
  const float* projection;  // [kv_heads][head_dim][rank]
  PagedRows partial;        // dim = rank
  const int32_t* slots;
  const int32_t* first_positions;  // [rows]; null: positions
  const int32_t* positions;
  int32_t rows;
};

// scores[l][t] = reduction over the group's heads of scale * (q projection) . partial[t], for t <
// positions[r]; scores[l][positions[r]] = -inf, and that row of `partial` is not read: a layer's
// newest key is not known yet when its queries are predicted.
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

// Of a row's units 0 .. positions[r] / unit_tokens: the first `first_units` and the newest
// `last_units`, and, of the others whose score is at least the list's largest score - margin, those
// with the highest scores, lower units first among equals, up to k units in all (forced ones
// counted, and never left out). A NaN score is -inf. The largest score is over all units, and
// largest - margin a float32.
//
// The runners-up of a list are units that scores could have chosen and did not, in order of their
// numbers: the best of all such, lower units first among equals, at most their capacity. A kernel
// may list fewer, or none, but never a worse one than one that it leaves out: they are a hint.
struct TopKParams {
  const float* scores;  // [lists][score_stride]
  int64_t score_stride;
  const int32_t* slots;
  const int32_t* positions;
  UnitLists selected;  // capacity >= k >= first_units + last_units
  int32_t rows;
  int32_t kv_heads;
  int32_t unit_tokens;
  int32_t k;
  int32_t first_units;
  int32_t last_units;
  float margin;          // +inf: none
  UnitLists runners_up;  // no units: nobody asks
};

// Which units of a sequence and layer have a place in HBM. The newest `ring` units are always at
// place unit % ring and in no table; the places after them hold what was recalled.
struct ResidencyTable {
  PagedRows place_of;  // int32, dim 1, row = unit: its place, or -1
  PagedRows places;    // int32, dim 2, row = place: the unit that has it, or -1, or kNoPlace where
                       // the sequence has fewer places; and the position at which it was last
                       // selected. Rows [0, ring) are not used.
  int32_t ring;
  int32_t count;  // rows of `places`
};
inline constexpr int32_t kNoPlace = -2;

// Splits each list into what has a place and what has none, and stamps the places of selected units
// with positions[r]. With `forget` every place but the ring's is taken back first, in both tables,
// so that only the ring is resident.
struct SplitParams {
  ResidencyTable residency;
  const int32_t* slots;
  const int32_t* positions;
  UnitLists selected;
  UnitLists resident;  // selected, and has a place; with `whole` everything that has a place, the
                       // ring included; there must be room for all of it
  int32_t* places;     // [lists][resident.capacity] of those
  UnitLists missing;   // selected, and has none
  int32_t rows;
  int32_t kv_heads;
  int32_t unit_tokens;
  bool whole;
  bool forget = false;
};

// What a policy counts for one slot and layer, of all the sequences that the slot has had.
struct SparseCounters {
  int64_t steps;
  int64_t selected;  // tokens x KV heads
  int64_t missing;   // of them without a place
  int64_t recalled;  // tokens x KV heads that were given one
  int64_t recalls;   // steps in which a recall was due
};

// Whether a row's missing units shall be recalled in this step: with interval > 0 in every
// interval-th step of the sequence, else once their share, missing / (kv_heads * budget_units),
// would pass `share_limit` in the next step if it grew on as it did since the last recall, in
// proportion to the steps since: once share * (since + 2) / (since + 1) > share_limit, in float64.
// Adds to the counters but recalled and recalls, whole units.
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

// Gives the missing units of each due row places, in their order, until none is left to give: free
// places first, then those of the units selected longest ago, lower places first among equals,
// never one that was stamped with this step's position. What is given one is stamped with it.
// Updates the tables and writes what must be moved, as indices of pieces of a block (unit_tokens =
// block_tokens) or of a token's K row (unit_tokens = 1) of the two caches:
//   block: page * kv_heads + head;  token: (page * kv_heads + head) * 2 * block_tokens + offset
// so that one Transfer moves blocks, and two (the second block_tokens rows further) tokens. List
// l's moves are [l * missing.capacity, ...).
struct RecallParams {
  ResidencyTable residency;
  const int32_t* slots;
  const int32_t* positions;
  UnitLists missing;
  const int32_t* due;   // [rows]; null: every row
  PagedCache home;      // its table: by block
  PagedCache resident;  // its table: by place (blocks) or place / block_tokens (tokens)
  int32_t* source_units;
  int32_t* target_units;
  int32_t* move_counts;      // [lists]
  SparseCounters* counters;  // [slots], or null: adds to `recalled` and `recalls` of due rows
  int32_t rows;
  int32_t kv_heads;
  int32_t unit_tokens;
};

// Copies each row's K and V, as RopeAppendParams::written has them, to its place in `home`. Any
// rows.
struct WriteThroughParams {
  const void* written;  // [rows][kv_heads][2][head_dim] of the cache's type
  const int32_t* slots;
  const int32_t* positions;
  PagedCache home;
  int32_t rows;
};

// Attention of each row over the tokens, up to its own position, of the units in its lists. Unit
// list entry i lies where `places` says: token t of it is token places[i] * unit_tokens + t of
// `cache`, as cache.block_table has it. The tokens of a list count in order, and how they are
// shared out depends on the list alone (on a CPU it is cut at multiples of kAttentionSplitTokens of
// them, as attention is). An empty list: o = 0, lse = -inf.
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
  int32_t kv_head_begin;  // only these KV heads; the others' results are left alone
  int32_t kv_head_end;
  float scale;
};

// HGCA's moving average of attention weights over the units that a row attends to on the device:
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
