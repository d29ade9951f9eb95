// This file declares the contracts of the operators: plain structs of pointers and shapes that the
// reference, CPU and CUDA kernels share. It uses no framework types and includes nothing from src/.
//
// Conventions. A *slot* is a sequence's index in the running batch, 0 <= slot < slots. A *row* is
// one token of one sequence in this step: (slot, position). Everything that changes from step to
// step (rows' slots and positions, tables, token histories, sampling state) is read through
// pointers, so that a launch with the same pointers and the same bucket shape can be replayed. A
// padded row has slot -1: kernels write zeros (or nothing) for it and read nothing of any sequence.
//
// A row's result depends on that row's sequence alone, bit for bit: no reduction order, rounding or
// split may depend on how many rows there are, on the other rows, or on the number of workers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice::kernels {

enum class DType : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat8E4M3 = 2,  // only in caches, with scales: kernels/latent_params.h
};

constexpr int64_t SizeOf(DType t) {
  return t == DType::kFloat32 ? 4 : t == DType::kBFloat16 ? 2 : 1;
}

enum class WeightLayout : int32_t {
  // bf16 [n][k], as in a checkpoint.
  kRowMajor = 0,
  // bf16 [ceil(n/16)][ceil(k/32)*16][16][2]: panels of 16 output columns. A panel holds pairs of
  // consecutive k for each of the 16 columns, which is the operand order of AMX and of AVX-512
  // BF16. Each panel is read front to back. Rows past n and columns past k are zero.
  kPanel16 = 1,
  // float32 [n][k]: weights that are not bf16 in the checkpoint, exactly. Only `reference` reads
  // it.
  kFloat32 = 2,
  // e4m3 [n][k] and a float32 scale for each 32 rows x 128 columns,
  // scales[ceil(n/32)][ceil(k/128)]. A weight is its value times its scale. These are the published
  // 128 x 128 blocks with repeated scales, so that matrices may be put one below the other at any
  // multiple of 32 rows.
  kFp8Blocks = 3,
};

inline constexpr int kPanelColumns = 16;
inline constexpr int kPanelDepth = 32;  // k is padded to a multiple of this
inline constexpr int kFp8BlockRows = 32;
inline constexpr int kFp8BlockColumns = 128;

// A matrix of weights, y = x W^T.
struct WeightMatrix {
  const uint16_t* data;  // elements of the layout's type; 64-byte aligned under kPanel16
  int32_t n;             // output features
  int32_t k;             // input features
  WeightLayout layout;
  const float* scales = nullptr;  // only with e4m3 weights
};

// Computes out[r] = float32(table[token]) with token = tokens[slot * token_stride + position]. A
// token outside the table gives out row = 0. (A failed row's token is -1; the step that was
// launched before the host knew of the failure meets it.)
struct EmbeddingParams {
  const int32_t* tokens;  // [slots][token_stride] token history of each slot
  int64_t token_stride;
  const int32_t* slots;      // [rows]; -1: padded, out row = 0
  const int32_t* positions;  // [rows]
  WeightMatrix table;        // n = vocabulary, k = hidden
  float* out;                // [rows][hidden]
  int32_t rows;
};

// A norm may look ahead for its first `rows` rows, which are decode rows: it predicts the norm of
// a later layer's input, from which that layer's queries can be predicted. A sequence's *drift* to
// that layer is the mean of how its decode rows' x differs between this norm, the *source*, and the
// layer's input: of the first 1 / kDriftWeight rows each counts the same, and then a new row has
// the weight kDriftWeight. numbers[r] is how many decode rows the sequence of row r had before;
// where it had none no drift is known, and what lies in the memory does not count.
struct AheadNormParams {
  int32_t rows = 0;                  // <= RmsNormParams::rows
  const int32_t* slots = nullptr;    // [rows]; a padded row has no drift; null: no row has
  const int32_t* numbers = nullptr;  // [rows]
  // out = norm of x + drift. Null: nothing is written.
  const float* weight = nullptr;  // [dim] weights of that layer
  void* out = nullptr;            // [rows][dim] of out_type
  const float* drift = nullptr;   // [slots][slot_stride], to that layer; null: 0
  // The drift to the layer whose input x is, is updated by x - before. Null: none is.
  float* drift_before = nullptr;  // [slots][slot_stride]
  float* before = nullptr;        // [rows][dim] x at the source; x takes its place; or null
  int64_t slot_stride = 0;
};
inline constexpr float kDriftWeight = 0.1f;

// Computes out = x / sqrt(mean(x^2) + eps) * weight, per row, and what `ahead` says. The bits of
// `out` do not depend on `ahead`.
struct RmsNormParams {
  const float* x;            // [*][x_stride]
  const int32_t* row_index;  // [rows] rows of x to take, or null for 0..rows-1; -1: out row = 0
  const float* weight;       // [dim]
  void* out;                 // [rows][dim] of out_type
  int64_t x_stride;
  int32_t rows;
  int32_t dim;
  float epsilon;
  DType out_type;
  AheadNormParams ahead = {};  // REQUIRES: ahead.rows == 0, or row_index is null
};

// Rows [0, decode_rows) of a step are decode rows: tokens past the prompts of sequences that
// generate, at most the kMaxNewTokens newest ones of a sequence. The other rows are tokens of
// prompts. The kind of a row depends on its sequence alone (its position is past the prompt or
// not), so a kernel set may compute the two kinds in different ways, and a row's bits still depend
// on its own sequence alone. 0 <= decode_rows <= rows.
inline constexpr int32_t kMaxNewTokens = 16;

// Computes y = x W^T (+ bias) (+ y if accumulate).
struct LinearParams {
  const void* x;      // [rows][k] of x_type, dense
  WeightMatrix w;     // [n][k]
  const float* bias;  // [n] or null
  float* y;           // [rows][n]
  int32_t rows;
  int32_t decode_rows;  // as described at kMaxNewTokens
  DType x_type;         // the kernel set's activation type
  bool accumulate;
};

// Computes cos_sin[r][i] = scale * {cos, sin}(position * inv_freq[i]). The angle is rounded to
// float32, as transformers does.
struct RopeTableParams {
  const int32_t* positions;  // [rows]
  const float* inv_freq;     // [head_dim / 2]
  float scale;               // YaRN's attention factor, else 1
  float* cos_sin;            // [rows][head_dim / 2][2]
  int32_t rows;
  int32_t half_dim;  // head_dim / 2
};

// The caches of one layer and one kind. A page is one block of every head: [kv_heads] blocks, each
// K [block_tokens][head_dim] and then V [block_tokens][head_dim]. Block b of the sequence in slot s
// is page block_table[s * table_stride + b] of `base`.
struct PagedCache {
  void* base;                  // the arena
  const int32_t* block_table;  // [slots][table_stride] page numbers
  int64_t table_stride;
  int64_t page_bytes;  // kv_heads * 2 * block_tokens * head_dim * SizeOf(type)
  int32_t block_tokens;
  int32_t kv_heads;
  int32_t head_dim;
  DType type;
  // If > 0, the table is a ring: block b is its entry b % ring_blocks. Only RopeAppend, Digest,
  // LevelDigests, PartialKeys and SparseAttention take a ring.
  int32_t ring_blocks = 0;
  // [kv_heads], or null. If not null, every KV head has a table of its own, which begins at entry
  // head_tables[head] of a slot's table, and its entries are numbers of blocks of one head, counted
  // from `base`. Only RopeAppend, HashKeys, SparseAttention, Recall and Bring (as their target) and
  // Retain take such a cache.
  const int32_t* head_tables = nullptr;
};

// Return where the block lies that entry `entry` of a slot's table means for a head: its number,
// counted from `base` in blocks of one head, and its offset from `base` in bytes.
constexpr int64_t HeadBlock(const PagedCache& c, int64_t slot, int64_t entry, int64_t head) {
  const int32_t* const table = c.block_table + slot * c.table_stride;
  if (c.head_tables != nullptr) return table[c.head_tables[head] + entry];
  return int64_t{table[entry]} * c.kv_heads + head;
}
constexpr int64_t HeadBlockOffset(const PagedCache& c, int64_t slot, int64_t entry, int64_t head) {
  const int32_t* const table = c.block_table + slot * c.table_stride;
  const int64_t bytes = int64_t{2} * c.block_tokens * c.head_dim * SizeOf(c.type);
  if (c.head_tables != nullptr) return table[c.head_tables[head] + entry] * bytes;
  return table[entry] * c.page_bytes + head * bytes;
}

// Does the following for every row: applies an optional RMSNorm to each q and k head (Qwen3),
// applies RoPE to them (half-split pairs: element i with element i + head_dim/2), stores q back in
// place, and writes k and v to the row's position in the cache (rounded to the cache's type).
// Padded rows write nothing. With cache.kv_heads = 0 a row has only q heads, and nothing is
// appended.
struct RopeAppendParams {
  float* qkv;                // [rows][(heads + 2 * kv_heads) * head_dim]: q heads, k heads, v heads
  const float* q_norm;       // [head_dim] or null
  const float* k_norm;       // [head_dim] or null
  const float* cos_sin;      // [rows][head_dim / 2][2]
  const int32_t* slots;      // [rows]
  const int32_t* positions;  // [rows]
  PagedCache cache;
  // [rows][kv_heads][2][head_dim] of the cache's type, or null: a second, dense copy of each row's
  // k and v, for a write-through to the sequences' home. Padded rows are left as they are.
  void* written;
  int32_t rows;
  int32_t heads;
  float epsilon;
  int32_t decode_rows = 0;  // as in LinearParams; policies read it, kernels treat all rows alike
};

// Tokens per split of attention. (On a GPU only decode rows are split.) The rule depends on the
// row's position alone: row r's context of position + 1 tokens is cut at multiples of this, each
// part gives (o, lse), and the parts merge in order.
inline constexpr int kAttentionSplitTokens = 512;

// Causal paged attention: row r attends to positions 0..positions[r] of its own sequence. out =
// softmax(scale * q K^T) V per head; lse is the natural-log sum-exp of the scaled scores.
struct AttentionParams {
  const float* q;  // [rows][q_stride], heads * head_dim used
  int64_t q_stride;
  const int32_t* slots;      // [rows]; -1: padded, out row = 0, lse = -inf
  const int32_t* positions;  // [rows]
  PagedCache cache;
  void* out;   // [rows][heads * head_dim] of out_type
  float* lse;  // [rows][heads] or null
  // Scratch for partial results: `partial_rows` entries of heads * (head_dim + 1) floats, one for
  // each (row, split). Rows for which there is no room are computed without it, to the same bits.
  float* partial;
  int64_t partial_rows;
  int32_t rows;
  int32_t decode_rows;  // as in LinearParams
  int32_t heads;
  float scale;
  DType out_type;
  // The decode rows that a sequence may have in a step: more than one where drafts are verified. A
  // kernel may read K and V once for neighbouring rows of a sequence, to the same bits.
  int32_t sequence_rows = 1;
};

// Merges `parts` partial results of disjoint token sets into one:
//   lse = log(sum_p exp(lse_p)), o = sum_p exp(lse_p - lse) o_p
// If all parts are empty, o = 0 and lse = -inf.
struct MergeParams {
  const float* o;    // [parts][rows][heads][head_dim]
  const float* lse;  // [parts][rows][heads]; -inf: the part is empty, and its o is not read
  void* out;         // [rows][heads * head_dim] of out_type
  float* out_lse;    // [rows][heads] or null
  int32_t parts;
  int32_t rows;
  int32_t heads;
  int32_t head_dim;
  DType out_type;
};

// Computes out = silu(gate) * up.
struct SiluMulParams {
  const float* gate_up;  // [rows][2 * dim]: gate, then up
  void* out;             // [rows][dim] of out_type
  int32_t rows;
  int32_t dim;
  DType out_type;
};

// Moves units of `unit_bytes` (a latent row, a GQA block, a page) between any two memories that the
// device reaches, as lists in device memory say: a gather goes from pinned DRAM to HBM, a scatter
// from HBM to pinned DRAM. There is one list for each sequence, or for each sequence and layer or
// head. Entry i of list l, for 0 <= i < counts[l], copies
//   unit source_units[l * capacity + i] of the list's source: at source + source_offsets[l] +
//   unit * source_pitch
// to the unit of the target that is addressed in the same way. An entry with a negative unit on
// either side is skipped. A count below 0 is taken as 0, a count above the capacity as the
// capacity. Units are copied in no particular order: no two entries may have the same target, and
// no target may be a source. The host fixes only the launch shape (lists, capacity): lists, counts
// and offsets change between replays.
//
// Every address, offset, pitch and unit_bytes is a multiple of 4. Where all of them are multiples
// of 16 the units move in pieces of 16 bytes, and the bandwidth floors are measured with such
// units. A link serves rows best that lie near each other: sort a list's entries by their DRAM
// address.
struct TransferParams {
  const void* source;
  void* target;
  const int64_t* source_offsets;  // [lists] bytes; null: list l at l * source_stride
  const int64_t* target_offsets;  // [lists] bytes; null: list l at l * target_stride
  int64_t source_stride;          // bytes between lists, where there are no offsets
  int64_t target_stride;
  int64_t source_pitch;         // bytes between units
  int64_t target_pitch;         // bytes between units
  const int32_t* source_units;  // [lists][capacity]; null: entry i is unit i
  const int32_t* target_units;  // [lists][capacity]; null: entry i is unit i
  const int32_t* counts;        // [lists]
  int32_t lists;
  int32_t capacity;    // entries of a list
  int32_t unit_bytes;  // > 0
  // The most processors that the transfer may take, so that other work runs beside it; 0: as many
  // as serve it. (On CUDA a processor is a thread block, one to a multiprocessor.) No result
  // depends on it.
  int32_t max_workers;
  // A unit may be several parts of unit_bytes each, which lie part_pitch bytes apart on both sides
  // (K and V of a token). Together they have at most kMaxPartsBytes.
  int32_t parts = 1;
  int64_t part_pitch = 0;
};
inline constexpr int32_t kMaxPartsBytes = 4096;

// Makes a few small copies in one launch, in no particular order. Policies use it for the requests
// to CPU workers and for their answers. Row r of a piece, 0 <= r < rows, is copied from source + u
// * source_pitch to target + r * target_pitch, where u is source_rows[r], or r if source_rows is
// null. Rows with a negative u are left as they are. Every address, pitch and row_bytes is a
// multiple of 4. No target is a source.
struct RowsPiece {
  const void* source;
  void* target;
  int64_t source_pitch;
  int64_t target_pitch;
  const int32_t* source_rows;  // [rows] or null
  int32_t rows;
  int32_t row_bytes;
  // [rows] or null: only the first words[r] * 4 bytes of row r are copied, row_bytes at most.
  const int32_t* words = nullptr;
};
inline constexpr int kMaxRowsPieces = 6;
struct CopyRowsParams {
  RowsPiece pieces[kMaxRowsPieces];
  int32_t count;  // number of pieces
};

inline constexpr int kMaxStopIds = 64;      // stop token ids and EOS ids of a sequence
inline constexpr int kMaxLogitBias = 1024;  // entries of logit_bias of a sequence
inline constexpr int kMaxTopLogprobs = 20;  // alternatives reported per token

// The rule by which one sequence's next token is chosen. The struct lies in a device table [slots]
// and is written at admission.
struct SamplingSlot {
  uint64_t seed;
  float temperature;         // 0: greedy
  float top_p;               // (0, 1]; 1: off
  float min_p;               // [0, 1]; 0: off
  float repetition_penalty;  // > 0; 1: off; over prompt and output
  float frequency_penalty;   // 0: off; over output
  float presence_penalty;    // 0: off; over output
  int32_t top_k;             // 0: off
  int32_t prompt_length;     // history[prompt_length] is the first output token
  int32_t min_tokens;        // stop ids have probability 0 before this many output tokens
  int32_t stop_count;        // entries of stop_ids[slot]
  int32_t bias_count;        // entries of bias_ids[slot], bias_values[slot]
  int32_t top_logprobs;      // alternatives wanted, 0..kMaxTopLogprobs
  int32_t logprobs;          // 1: the chosen token's log-probability is wanted
};

// Chooses a token from the logits of each sampled row, in this order. Log-probabilities of the raw
// logits come first (if wanted). On a copy then follow the repetition penalty (l > 0 ? l / p : l *
// p, once per distinct token of prompt and output), frequency and presence penalties, logit_bias,
// and stop ids masked while output < min_tokens. If the temperature is 0, the argmax is taken (the
// lowest id among equals). Else temperature, top_k (ties at the cut: lower ids stay), top_p (the
// fewest most probable tokens whose share of what top_k left reaches top_p) and min_p (relative to
// the largest) are applied, and one draw u in [0,1) from (seed, output index) by UniformFromSeed is
// taken through the surviving tokens in order of id.
//
// A row with a NaN or +inf logit, or with no finite logit left, gives token -1: its sequence must
// end, and the others are not affected. Log-probabilities are written only for rows whose slot
// wants them and whose token is not -1: the chosen token's if logprobs or top_logprobs is set, and
// top_logprobs alternatives, of which those past the vocabulary are (-1, -inf).
struct SampleParams {
  float* logits;                 // [rows][vocab]; may be overwritten
  const int32_t* slots;          // [rows]; -1: padded, nothing written
  const int32_t* positions;      // [rows] position of the row that made the logits
  const SamplingSlot* sampling;  // [slots]
  const int32_t* stop_ids;       // [slots][kMaxStopIds]
  const int32_t* bias_ids;       // [slots][kMaxLogitBias]
  const float* bias_values;      // [slots][kMaxLogitBias]
  int32_t* tokens;               // [slots][token_stride]; the choice goes to [slot][position + 1]
  int64_t token_stride;
  int32_t* out_tokens;      // [rows]
  float* out_logprobs;      // [rows]
  int32_t* out_top_ids;     // [rows][kMaxTopLogprobs], best first
  float* out_top_logprobs;  // [rows][kMaxTopLogprobs]
  void* scratch;            // [workers] of SampleScratchBytes(vocab)
  int32_t rows;
  int32_t vocab;
  // [rows] or null. 0: the row's choice goes to out_tokens alone, and its history stays as it is.
  // Rows of one slot in a step need that: each would write where the next one reads.
  const int32_t* stores = nullptr;
};

// Returns whether row `row`'s choice goes to its history.
constexpr bool Stores(const SampleParams& p, int64_t row) {
  return p.stores == nullptr || p.stores[row] != 0;
}

// Returns the bytes of scratch of one worker: a float copy, an id list and a count per vocabulary
// entry.
constexpr int64_t SampleScratchBytes(int32_t vocab) {
  return ((static_cast<int64_t>(vocab) * 16 + 63) / 64) * 64;
}

// Returns the draw for output token number `index` of a sequence: splitmix64 of the pair, 53 bits.
constexpr double UniformFromSeed(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1.0p-53;
}

}  // namespace sluice::kernels
