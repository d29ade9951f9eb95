// This file declares the contracts of the operators of the DeepSeek-V3.2 family: multi-head latent
// attention in its absorbed form (MLA), the indexer of sparse attention (DSA), and experts. The
// conventions of params.h hold: rows, slots, padded rows (slot -1), and the rule of bits. Rows are
// of any kind, decode rows and prompt rows, and a sequence may have any number of them, unless an
// operator says otherwise.
//
// Words. An *entry* is the latent cache's record of one token: `rank` latent values after
// kv_a_layernorm, then `rope` values after RoPE. All heads share it. A head's key is the whole
// entry, and its value the first `rank` elements, once the head's part of kv_b_proj is folded into
// query and output (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). RoPE pairs are neighbours
// (interleaved) in entries and queries, and halves (element i with i + rope / 2) in the indexer.
//
// The packed form, DType::kFloat8E4M3, is that of published systems. An entry is 656 bytes: [0,
// 512) e4m3 values, [512, 528) four float32 scales of 128 values each, [528, 656) 64 bf16 RoPE
// values. An index key is 128 e4m3 values and one float32 scale. A scale is amax / 448 (1 where all
// values are 0); the scale of latents is up to twice that (latent_scales.h). A stored value is the
// value divided by its scale, rounded to nearest, ties to even. Only rank 512 with rope 64 is
// packed. The other forms, bf16 and float32, serve exactness tests: an entry is [rank + rope]
// elements, an index key [dim].
#pragma once

#include <cstdint>

#include "kernels/params.h"
#include "kernels/sparse_params.h"

namespace sluice::kernels {

inline constexpr int32_t kPackedRank = 512;
inline constexpr int32_t kPackedRope = 64;
inline constexpr int32_t kPackedEntryBytes = 656;
inline constexpr int32_t kPackedScaleTokens = 128;  // latent values that share a scale
inline constexpr int32_t kIndexDim = 128;           // elements of an index key, always
inline constexpr float kE4M3Max = 448.0f;

constexpr int64_t EntryBytes(DType type, int32_t rank, int32_t rope) {
  return type == DType::kFloat8E4M3 ? kPackedEntryBytes : (rank + rope) * SizeOf(type);
}
constexpr int64_t IndexKeyBytes(DType type) {
  return type == DType::kFloat8E4M3 ? kIndexDim + 4 : kIndexDim * SizeOf(type);
}

// The entries of one layer. Entry e of slot s is entry e % block_tokens of page block_table[s *
// table_stride + e / block_tokens]. Page p is block_tokens entries, packed one after the other,
// from base + p * page_bytes. Depending on the table, entries are numbered by position or by place.
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

// The index keys of one layer, numbered by position. A page is [block_tokens][128] elements, and in
// the packed form [block_tokens] float32 scales behind them.
struct PagedIndexKeys {
  void* base;
  const int32_t* block_table;
  int64_t table_stride;
  int64_t page_bytes;  // block_tokens * IndexKeyBytes
  int32_t block_tokens;
  DType type;
};

// Writes each row's entry into the cache: RMSNorm of the latent values, RoPE of the others.
struct LatentAppendParams {
  const float* kv;  // [rows][kv_stride]: rank latent values, then rope values
  int64_t kv_stride;
  const float* norm;         // [rank]
  const float* cos_sin;      // [rows][rope / 2][2]
  const int32_t* slots;      // [rows]
  const int32_t* positions;  // [rows]
  PagedLatents cache;        // base null: no entry is written to the cache
  // Row `position` of this table (ResidencyTable::place_of) is the entry's number in the cache;
  // where it is < 0 the cache is left as it is. With base null the number is the position.
  PagedRows place_of;
  // [rows] entries of the cache's form, or null: a second, dense copy for a write-through to the
  // sequences' home. Padded rows are left as they are.
  void* written;
  int32_t rows;
  float epsilon;
  int32_t decode_rows;  // as in LinearParams; policies read it, kernels treat all rows alike
};

// Writes each row's index key: LayerNorm, then RoPE of the first rope_dim elements. The packed form
// then takes the Walsh-Hadamard transform, scaled by 128^-1/2, and one scale for the row.
// DeepSeek's reference does the same; the same transform of the query cancels it.
struct IndexAppendParams {
  const float* k;  // [rows][k_stride], 128 used
  int64_t k_stride;
  const float* norm_weight;  // [128]
  const float* norm_bias;    // [128]
  const float* cos_sin;      // [rows][rope_dim / 2][2]
  const int32_t* slots;      // [rows]
  const int32_t* positions;  // [rows]
  PagedIndexKeys cache;      // base null: no key is written to the cache
  // [rows] keys of the cache's form (packed: 128 values, then the scale: 132 bytes), or null: a
  // second, dense copy. Padded rows are left as they are.
  void* written;
  int32_t rows;
  int32_t rope_dim;  // <= 128
  float epsilon;
  int32_t decode_rows;
};

// Prepares the queries of the indexer: RoPE of each head's first rope_dim elements. The packed form
// then takes the Hadamard transform and a scale for each head, which is multiplied into the head's
// weight.
struct IndexQueryParams {
  const float* q;        // [rows][heads * 128]
  const float* weights;  // [rows][weights_stride], `heads` of them used
  int64_t weights_stride;
  const float* cos_sin;  // [rows][rope_dim / 2][2]
  void* out;             // [rows][heads][128]: e4m3 in the packed form, else float32
  float* out_weights;    // [rows][heads]: weights * weight_scale (* the head's scale)
  DType type;            // form of the cache
  int32_t rows;
  int32_t heads;
  int32_t rope_dim;
  float weight_scale;  // heads^-1/2 * 128^-1/2
};

// Computes scores[r][t] = scale_t * sum_h weights[r][h] * relu(q[r][h] . k_t) for t <= positions[r]
// (DeepSeek-V3.2-Exp, equation 1). scale_t is the key's scale in the packed form, else 1. The heads
// are summed in order. Elements past the position are left as they are.
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
  int32_t spare_processors;   // as in SparseMlaParams
  int32_t sequence_rows = 1;  // as in AttentionParams
};

// Prepares the queries of attention: rotates each head's RoPE part into its position behind the
// latent part. HeadLinear makes the latent part from `nope`.
struct MlaQueryParams {
  const float* q;        // [rows][heads][nope + rope]
  const float* cos_sin;  // [rows][rope / 2][2]
  void* nope;            // [rows][heads][nope] of `type`
  // [rows][heads][rank + rope] of `type`; the last `rope` elements of each head are written
  void* out;
  DType type;  // the kernel set's activation type
  int32_t rows;
  int32_t heads;
  int32_t nope_dim;
  int32_t rope;
  int32_t rank;
};

// Computes y[r][h] = x[r][h] W_h^T, head by head. It folds kv_b_proj into queries and results.
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

// Entries of a list that make one piece of attention: pieces give (o, lse) and merge in order,
// whether they are computed apart or in one go. The rule depends on the list alone. (Over packed
// entries on a GPU pieces are twice as long, kernels/cuda/mla/mla_plan.cuh.)
inline constexpr int kMlaSplitEntries = 256;

// Computes attention of each row over a list of entries:
//   s_e = scale * q_h . entry_e;  out_h = softmax(s) latent;  lse = natural-log sum-exp of s.
// A list counts in its order. An empty list gives out = 0, lse = -inf. With `other_o` the result is
// merged with another partial result of the same rows, which comes first (the rule of MergeParams).
//
// Each row has a second list if `then_counts` is given. The result is, to the bit, that of two
// calls: one over the first list into `other_o` and `other_lse`, which then are work space, and one
// over the second list that is merged with them. REQUIRES: a row's two lists have at most
// `capacity` entries together.
struct SparseMlaParams {
  const void* q;  // [rows][heads][rank + rope] of q_type
  const int32_t* slots;
  PagedLatents cache;
  const int32_t* entries;  // [rows][capacity] entry numbers; null: 0, 1, ...
  // [rows]; a count below 0 is taken as 0, one above the capacity as the capacity
  const int32_t* counts;
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
  // Processors of a GPU that the operator leaves to the work beside it. A block of this operator
  // takes one processor wholly, and blocks that had to wait for a transfer's blocks would end with
  // the transfer.
  int32_t spare_processors;
  // Promises that the operator before this one in its stream is a Transfer or a TakeRing that
  // brings the entries of second lists and nothing else that this one reads, and that everything
  // before that operator is done when it begins. A GPU then computes first lists beneath it. Rows
  // right behind a row of the same slot are exempt: it may bring entries of their first lists too.
  bool then_arrives = false;
  float scale;
  DType q_type;    // the kernel set's activation type
  DType out_type;  // the same, or float32
};

// These return the two calls that a call with two lists stands for, in order.
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

// Tells which entries of sequences have a place in HBM, and gives places to more of them. It is
// Split and Recall of sparse_params.h for single tokens of one head, in one operator, for whole
// sequences. Neighbouring rows of one slot are one sequence, at most kMaxQueryPositions of them, of
// rising positions.
//
// The units that the sequence's rows have selected and that have no place get one: free places
// first, then those of the units used longest ago, lower places first among equals, and never the
// place of a unit that is selected or held ahead in this call. The positions last + 1 .. last +
// `ahead` after the sequence's last row get places in the same way, for the entries of the next
// step (if they have none yet). Places of selected units are stamped with the sequence's last
// position, places that are made ahead with their own position. REQUIRES: a sequence has at least
// as many places as its rows select, and `ahead` more. Its free places come behind those that are
// taken, and the places that it does not have come last: a table begins empty, or taken from the
// first place on, and UpdateResidency keeps it so.
//
// A row's lists of places are in the order of its selected units: `resident` has the places of
// units that had one before, `arriving` the new places, into which entries must be moved first. The
// moves are listed once for each sequence, in the order of units, in the list of its first row; the
// lists of its other rows are empty. An index of a move is
//   page * block_tokens + entry % block_tokens
// of the home (by position) and of the pool (by place), so that one Transfer with pitches of
// EntryBytes makes the moves.
inline constexpr int32_t kMaxQueryPositions = 4;

// Records what places held before rows took or stamped them, so that TakeBackResidency can undo the
// rows. The row of position q of slot s is list s * rows + q % rows.
struct ResidencyJournal {
  int32_t* places;  // [slots][rows][capacity], in any order
  int32_t* units;   // [slots][rows][capacity]: the unit that had the place, or -1
  int32_t* stamps;  // [slots][rows][capacity]: the place's stamp
  int32_t* counts;  // [slots][rows]
  int32_t rows;     // >= the most rows of a sequence in a call
  int32_t capacity;
};

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
  // [slots], or null: adds 1 step, the rows' selected units, and, in `missing` and `recalled`, the
  // units that are moved.
  SparseCounters* counters;
  // >= kMaxQueryPositions * selected.capacity, or, where sequences have fewer rows, >= the most
  // rows of a sequence * selected.capacity.
  int32_t move_capacity;
  int32_t rows;
  int32_t ahead;
  // Takes back every place first, so that only what this call gives a place is resident. (For a
  // policy that fetches everything.)
  bool forget;
  // Says that rows do not attend to the units yet but may do so soon: only `recalled` is counted.
  bool speculative;
  // [slots], or null. A value that is not 0 says that the slot's sequence is whole, and that nobody
  // ever asks how old its places are: place u is unit u's up to the last position, and the places
  // behind are free. Its lists are then its rows' selections, and its next position gets the place
  // of its number. The result is the same except for stamps, which may stay as they are. REQUIRES:
  // not `forget`.
  const int32_t* whole;
  // Says that each row of a sequence is updated by itself, one after the other, as by calls of its
  // own: its lists, its places and their stamps depend on no row behind it, its moves are in its
  // own list, and it counts as a step. No unit is moved twice, so a later row's `resident` may have
  // places into which an earlier row's moves bring entries. A sequence may then have any number of
  // rows, and move_capacity is that of one row. REQUIRES: not `forget`; a sequence with several
  // rows has at least as many places as they select together, one more for each of them, and
  // `ahead` more. (Then no row is given a place that a row before it uses: some place's stamp is
  // older.)
  bool in_turn = false;
  // With `in_turn`: where it is written down what each row changes. rows 0: nowhere. Rows of whole
  // sequences may be left out. REQUIRES: capacity >= selected.capacity + ahead.
  ResidencyJournal journal = {};
};

// Undoes UpdateResidency (in_turn) for a sequence's last rows, the last one first: places, units
// and stamps are again what they were. The entries of units that lose no place then are where they
// were. Those of units that get a place back have to be fetched again, into the same place: the
// moves, as in UpdateResidencyParams, lie in the journal itself (sources in `units`, targets in
// `places`, both -1 where nothing is to be moved). One Transfer over all lists makes them.
struct TakeBackResidencyParams {
  ResidencyTable residency;  // kv_heads 1, ring 0
  const int32_t* last;       // [slots] position of the slot's last row
  const int32_t* rows;       // [slots] rows to undo, the last one included; at most journal.rows
  ResidencyJournal journal;  // as the rows' calls have left it
  PagedLatents home;         // base is not read
  PagedLatents pool;         // base is not read
  int32_t* move_counts;      // [slots][journal.rows]; 0 for rows that are not undone
  int32_t slots;
};

// Routes rows to experts: s = sigmoid(logits), and experts are chosen by c = s + bias. The `groups`
// groups of neighbouring experts are ranked by the sum of their two largest c (by the only one
// where a group has one). The best `top_groups` groups stay, and of their experts the k with the
// largest c are chosen, lower numbers first among equals. A row's choices are listed in ascending
// order of experts. Their weights are s, divided by their sum + 1e-20 if `normalise`, times
// `scaling`. A padded row, or one with a NaN logit, has experts -1 and weights 0. (DeepSeek-V3,
// arXiv 2412.19437, section 2.1.2.)
struct RouteParams {
  const float* logits;   // [rows][experts]
  const float* bias;     // [experts], or null
  const int32_t* slots;  // [rows]
  int32_t* chosen;       // [rows][k]
  float* weights;        // [rows][k]
  // The pairs, row * k + choice, in order of experts and, inside one expert, of pairs: expert e has
  // pairs[begins[e]] .. pairs[begins[e + 1] - 1].
  int32_t* pairs;   // [rows * k]
  int32_t* begins;  // [experts + 1]
  int32_t rows;
  int32_t experts;
  int32_t k;
  int32_t groups;  // divides `experts`
  int32_t top_groups;
  bool normalise;
  float scaling;
};

// Computes y[p] = x[p / pairs_per_row] W_e^T for each expert e and each of its pairs p.
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

// Computes out[r] += sum_j weights[r][j] * y[r * k + j], in order of j. A choice of -1 counts
// nothing, and its y is not read.
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
