// The contracts of the operators of the DeepSeek-V3.2 family: multi-head latent attention in its
// absorbed form (MLA), the indexer of sparse attention (DSA), and experts. The conventions of
// params.h hold: rows, slots, padded rows (slot -1), and the rule of bits. Rows are of any kind
// here, decode rows and rows of prompts, in any number of a sequence, unless an operator says
// otherwise.
//
// Words. An *entry* is what the latent cache has of one token: `rank` latent values after
// kv_a_layernorm, then `rope` values after RoPE, shared by all heads. The key of a head is the
// whole entry, the value its first `rank` elements, once the head's part of kv_b_proj is folded
// into query and output (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). RoPE pairs are neighbours
// (interleaved) in entries and queries, and halves (element i with i + rope / 2) in the indexer.
//
// The packed form, DType::kFloat8E4M3, is that of published systems: an entry is 656 bytes,
// [0, 512) e4m3 values, [512, 528) four float32 scales of 128 values each, [528, 656) 64 bf16 RoPE
// values; an index key is 128 e4m3 values and one float32 scale. A scale is amax / 448 (1 where all
// values are 0), of latents up to twice that (latent_scales.h); a value is its quotient by it,
// rounded to nearest, ties to even. Only rank 512 with rope 64 is packed. The other forms, bf16 and
// float32, are for exactness tests: an entry is [rank + rope] elements, an index key [dim].
#pragma once

#include <cstdint>

#include "kernels/params.h"
#include "kernels/sparse_params.h"

namespace sluice::kernels {

inline constexpr int32_t kPackedRank = 512;
inline constexpr int32_t kPackedRope = 64;
inline constexpr int32_t kPackedEntryBytes = 656;
inline constexpr int32_t kPackedScaleTokens = 128;  // latent values of one scale
inline constexpr int32_t kIndexDim = 128;           // elements of an index key, always
inline constexpr float kE4M3Max = 448.0f;

constexpr int64_t EntryBytes(DType type, int32_t rank, int32_t rope) {
  return type == DType::kFloat8E4M3 ? kPackedEntryBytes : (rank + rope) * SizeOf(type);
}
constexpr int64_t IndexKeyBytes(DType type) {
  return type == DType::kFloat8E4M3 ? kIndexDim + 4 : kIndexDim * SizeOf(type);
}

// Entries of one layer: entry e of slot s is entry e % block_tokens of page
// block_table[s * table_stride + e / block_tokens]; page p is block_tokens entries, packed one
// after the other, from base + p * page_bytes. What numbers entries, positions or places, is the
// table's.
struct PagedLatents {
  void* base;
  const int32_t* block_table;  // [slots][table_stride] page numbers
  int64_t table_stride;
  int64_t page_bytes;  // block_tokens * EntryBytes
  int32_t block_tokens;
  int32_t rank;
  int32_t rope;
  DType type;
};

// Index keys of one layer, by position. A page is [block_tokens][128] elements, then, of the packed
// form, [block_tokens] float32 scales.
struct PagedIndexKeys {
  void* base;
  const int32_t* block_table;
  int64_t table_stride;
  int64_t page_bytes;  // block_tokens * IndexKeyBytes
  int32_t block_tokens;
  DType type;
};

// Each row's entry: RMSNorm of the latent values, RoPE of the others, into the cache.
struct LatentAppendParams {
  const float* kv;  // [rows][kv_stride]: rank latent values, then rope values
  int64_t kv_stride;
  const float* norm;         // [rank]
  const float* cos_sin;      // [rows][rope / 2][2]
  const int32_t* slots;      // [rows]
  const int32_t* positions;  // [rows]
  PagedLatents cache;        // base null: nothing is written there
  // The entry's number in the cache: row `position` of this (ResidencyTable::place_of); where that
  // is < 0 the cache is left as it is. With base null: the position.
  PagedRows place_of;
  // [rows] entries of the cache's form, dense, once more, or null: for a write-through to the
  // sequences' home. Padded rows: left as they are.
  void* written;
  int32_t rows;
  float epsilon;
  int32_t decode_rows;  // as in LinearParams; for policies, kernels treat all rows alike
};

// Each row's index key: LayerNorm, RoPE of the first rope_dim elements; of the packed form then
// the Walsh-Hadamard transform, scaled by 128^-1/2, and a scale for the row. As DeepSeek's
// reference does it; the same transform of the query cancels it.
struct IndexAppendParams {
  const float* k;  // [rows][k_stride], 128 used
  int64_t k_stride;
  const float* norm_weight;  // [128]
  const float* norm_bias;    // [128]
  const float* cos_sin;      // [rows][rope_dim / 2][2]
  const int32_t* slots;      // [rows]
  const int32_t* positions;  // [rows]
  PagedIndexKeys cache;      // base null: nothing is written there
  // [rows] keys of the cache's form, dense (packed: 128 values, then the scale: 132 bytes), once
  // more, or null. Padded rows: left as they are.
  void* written;
  int32_t rows;
  int32_t rope_dim;  // <= 128
  float epsilon;
  int32_t decode_rows;
};

// Queries of the indexer. RoPE of each head's first rope_dim elements; of the packed form then the
// Hadamard transform and a scale for each head, which goes into the head's weight.
struct IndexQueryParams {
  const float* q;        // [rows][heads * 128]
  const float* weights;  // [rows][weights_stride], heads used
  int64_t weights_stride;
  const float* cos_sin;  // [rows][rope_dim / 2][2]
  void* out;             // [rows][heads][128]: e4m3 in the packed form, else float32
  float* out_weights;    // [rows][heads]: weights * weight_scale (* the head's scale)
  DType type;            // of the cache's form
  int32_t rows;
  int32_t heads;
  int32_t rope_dim;
  float weight_scale;  // heads^-1/2 * 128^-1/2
};

// scores[r][t] = scale_t * sum_h weights[r][h] * relu(q[r][h] . k_t) for t <= positions[r], with
// scale_t = 1 but in the packed form. The heads count in order. Elements past the position are left
// as they are. (DeepSeek-V3.2-Exp, equation 1.)
struct IndexLogitsParams {
  const void* q;             // IndexQueryParams::out
  const float* weights;      // IndexQueryParams::out_weights
  const int32_t* slots;      // [rows]; -1: nothing written
  const int32_t* positions;  // [rows]
  PagedIndexKeys cache;
  float* scores;         // [rows][score_stride]
  int64_t score_stride;  // >= the longest row's position + 1
  int32_t rows;
  int32_t heads;
  int32_t spare_processors;  // as in SparseMlaParams
};

// The queries of attention as its products are: each head's RoPE part rotated into its place behind
// the latent part, which HeadLinear makes of `nope`.
struct MlaQueryParams {
  const float* q;        // [rows][heads][nope + rope]
  const float* cos_sin;  // [rows][rope / 2][2]
  void* nope;            // [rows][heads][nope] of `type`
  void* out;             // [rows][heads][rank + rope] of `type`: the last `rope` of each head
  DType type;            // the kernel set's activation type
  int32_t rows;
  int32_t heads;
  int32_t nope_dim;
  int32_t rope;
  int32_t rank;
};

// Head by head, y[r][h] = x[r][h] W_h^T. Folds kv_b_proj into queries and results.
struct HeadLinearParams {
  const void* x;  // [rows] heads at x_head_stride elements of x_type from each other
  int64_t x_stride;
  int64_t x_head_stride;
  WeightMatrix w;  // [heads * n][k], the heads one below the other; n a multiple of 16
  void* y;         // [rows] heads of n elements, y_head_stride elements of y_type from each other
  int64_t y_stride;
  int64_t y_head_stride;
  DType x_type;  // the kernel set's activation type
  DType y_type;  // the same, or float32
  int32_t rows;
  int32_t heads;
  int32_t n;
  int32_t decode_rows;  // as in LinearParams
};

// Entries of a list that are one piece of attention: pieces give (o, lse) and merge in order,
// whether they were computed apart or in one go. The rule depends on the list alone. (Over packed
// entries on a GPU pieces are twice as long, kernels/cuda/mla/mla_plan.cuh.)
inline constexpr int kMlaSplitEntries = 256;

// Attention of each row over a list of entries:
//   s_e = scale * q_h . entry_e;  out_h = softmax(s) latent;  lse = natural-log sum-exp of s.
// A list counts in its order. An empty list: out = 0, lse = -inf. With `other_o` the result is
// merged with another partial result of the same rows, that first (the rule of MergeParams).
//
// With `then_counts` each row has a second list: the result is, to the bit, that of two calls, one
// over the first list into `other_o` and `other_lse`, which are work space here, and one over the
// second that is merged with them. REQUIRES: a row's two lists have at most `capacity` entries
// together.
struct SparseMlaParams {
  const void* q;  // [rows][heads][rank + rope] of q_type
  const int32_t* slots;
  PagedLatents cache;
  const int32_t* entries;       // [rows][capacity] numbers of entries; null: 0, 1, ...
  const int32_t* counts;        // [rows]; below 0 as 0, above the capacity as the capacity
  const int32_t* then_entries;  // [rows][capacity]
  const int32_t* then_counts;   // [rows], or null: one list
  int64_t capacity;
  float* other_o;    // [rows][heads][rank], or null
  float* other_lse;  // [rows][heads]
  void* out;         // [rows][heads][rank] of out_type
  float* lse;        // [rows][heads], or null
  void* scratch;     // KernelSet::SparseMlaScratchBytes
  int64_t scratch_bytes;
  int32_t rows;
  int32_t decode_rows;  // as in LinearParams
  int32_t heads;
  // Processors of a GPU that it leaves to what runs beside it: a block of this takes one wholly,
  // and those that had to wait for a transfer's would end with it.
  int32_t spare_processors;
  // The operator before this one in its stream is a Transfer that brings the entries of second
  // lists and nothing else that this reads; what comes before that is done when it begins. A GPU
  // then computes first lists beneath it.
  bool then_arrives = false;
  float scale;
  DType q_type;    // the kernel set's activation type
  DType out_type;  // the same, or float32
};

// The two calls that a call with two lists stands for, in order.
inline SparseMlaParams FirstOfTwo(SparseMlaParams p) {
  p.out = p.other_o;
  p.out_type = DType::kFloat32;
  p.lse = p.other_lse;
  p.other_o = p.other_lse = nullptr;
  p.then_entries = p.then_counts = nullptr;
  p.then_arrives = false;
  return p;
}
inline SparseMlaParams SecondOfTwo(SparseMlaParams p) {
  p.entries = p.then_entries;
  p.counts = p.then_counts;
  p.then_entries = p.then_counts = nullptr;
  p.then_arrives = false;
  return p;
}

// Which entries of sequences have a place in HBM, and which shall be given one: Split and Recall of
// sparse_params.h for single tokens of one head, in one operator, for whole sequences. Neighbouring
// rows of one slot are one sequence, at most kMaxQueryPositions of them, of rising positions.
//
// Of the units that the sequence's rows have selected, those without a place get one: free places
// first, then those of the units used longest ago, lower places first among equals, never one of a
// unit selected or held ahead here. So do the positions last + 1 .. last + `ahead` after the
// sequence's last row, for the entries of the next step (those that have no place yet). Places of
// selected units are stamped with the sequence's last position, those made ahead with their own
// position. REQUIRES: a sequence has at least as many places as its rows select, and `ahead` more;
// its free places come behind those that are taken, and behind them those that it has not: a table
// begins empty, or taken from the first place on, and UpdateResidency keeps it so.
//
// A row's list of places is in the order of its selected units: in `resident` those that had one
// before, in `arriving` those that have one now and whose entries must be moved there first. What
// to move is listed once for each sequence, in the order of units, in the list of its first row;
// the lists of its other rows are empty. An index of a move is
//   page * block_tokens + entry % block_tokens
// of the home (by position) and of the pool (by place), so that one Transfer with pitches of
// EntryBytes moves them.
inline constexpr int32_t kMaxQueryPositions = 4;
struct UpdateResidencyParams {
  ResidencyTable residency;  // kv_heads 1, ring 0
  const int32_t* slots;
  const int32_t* positions;
  UnitLists selected;  // [rows]
  int32_t* resident;   // [rows][selected.capacity] places
  int32_t* resident_counts;
  int32_t* arriving;  // [rows][selected.capacity] places
  int32_t* arriving_counts;
  PagedLatents home;      // base is not read
  PagedLatents pool;      // base is not read
  int32_t* source_units;  // [rows][move_capacity]
  int32_t* target_units;  // [rows][move_capacity]
  int32_t* move_counts;   // [rows]
  // [slots], or null: adds 1 step, the rows' selected units, and in `missing` and `recalled` those
  // that were moved.
  SparseCounters* counters;
  int32_t move_capacity;  // >= kMaxQueryPositions * selected.capacity, or of as many rows as there
                          // are of a sequence
  int32_t rows;
  int32_t ahead;
  // Every place is taken back first: nothing is resident but what this call admits. (A policy that
  // fetches all.)
  bool forget;
  // The units are not what the rows attend to, but may be soon: `recalled` alone is counted.
  bool speculative;
  // [slots], or null. Not 0: the slot's sequence is whole, and nobody ever asks how old its places
  // are. Place u is unit u's up to the last position, the places behind are free, so its lists are
  // what its rows have selected and its next position gets the place of its number. The result is
  // the same but for stamps, which may stay as they are. REQUIRES: not `forget`.
  const int32_t* whole;
};

// The router of experts: s = sigmoid(logits); choice by c = s + bias. The `groups` groups of
// neighbouring experts are ranked by the sum of their two largest c (by the only one where a group
// has one), the best `top_groups` stay, and of their experts the k with the largest c; lower
// numbers first among equals. A row's choices are listed in ascending order of experts; their
// weights are s, divided by their sum + 1e-20 if `normalise`, times `scaling`. A padded row, or one
// with a logit that is NaN, has experts -1 and weights 0. (DeepSeek-V3, arXiv 2412.19437, section
// 2.1.2.)
struct RouteParams {
  const float* logits;   // [rows][experts]
  const float* bias;     // [experts], or null
  const int32_t* slots;  // [rows]
  int32_t* chosen;       // [rows][k]
  float* weights;        // [rows][k]
  // The pairs, row * k + choice, in order of experts and of pairs inside one: expert e has
  // pairs[begins[e]] .. pairs[begins[e + 1] - 1].
  int32_t* pairs;   // [rows * k]
  int32_t* begins;  // [experts + 1]
  int32_t rows;
  int32_t experts;
  int32_t k;
  int32_t groups;  // divides experts
  int32_t top_groups;
  bool normalise;
  float scaling;
};

// For each expert and each of its pairs p: y[p] = x[p / pairs_per_row] W_e^T.
struct ExpertLinearParams {
  const void* x;  // [..][k], dense, of x_type
  int32_t pairs_per_row;
  WeightMatrix w;  // [experts * n][k], the experts one below the other; n a multiple of 16
  float* y;        // [max_pairs][n]
  const int32_t* pairs;
  const int32_t* begins;
  int32_t max_pairs;  // rows * k
  int32_t experts;
  int32_t n;
  DType x_type;  // the kernel set's activation type
};

// out[r] += sum_j weights[r][j] * y[r * k + j], in order of j; a chosen of -1 counts nothing and
// its y is not read.
struct CombineParams {
  const float* y;         // [rows * k][dim]
  const int32_t* chosen;  // [rows][k]
  const float* weights;   // [rows][k]
  float* out;             // [rows][dim]
  int32_t rows;
  int32_t k;
  int32_t dim;
};

}  // namespace sluice::kernels
