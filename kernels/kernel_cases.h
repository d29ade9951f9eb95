// Shapes of the operators that tests/kernels holds to the reference and that `sluice-bench kernels`
// checks and times. Tests and benchmarks share one table, so that what is fast is also right.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/params.h"

namespace sluice::kernels {

struct LinearCase {
  int32_t rows;
  int32_t n;
  int32_t k;
  bool bias = false;
  bool accumulate = false;
};

// The products of a layer of SmolLM2-135M: qkv, o, gate and up, down.
inline std::vector<LinearCase> LayerLinearCases(int32_t rows) {
  return {{rows, 960, 576}, {rows, 576, 576}, {rows, 3072, 576}, {rows, 576, 1536}};
}

// Timed shapes of linear: decode steps and a prompt of 1,024 tokens, which needs the head for its
// last row only.
inline std::vector<LinearCase> TimedLinearCases() {
  std::vector<LinearCase> cases;
  for (int32_t rows : {1, 8, 32, 1024}) {
    for (const LinearCase& c : LayerLinearCases(rows)) cases.push_back(c);
    if (rows <= 32) cases.push_back({rows, 49152, 576});
  }
  return cases;
}

// Checked shapes of linear: empty, one, odd, around every tile size, and n and k that fill no
// panel.
inline std::vector<LinearCase> OddLinearCases() {
  std::vector<LinearCase> cases;
  for (int32_t rows : {0, 1, 2, 3, 5, 6, 7, 15, 16, 17, 31, 32, 33, 47, 65}) {
    cases.push_back({rows, 80, 96});
    cases.push_back({rows, 33, 31, true, false});
  }
  for (int32_t n : {1, 15, 16, 17, 130, 576}) {
    for (int32_t k : {1, 2, 31, 32, 33, 64, 576, 1536}) {
      cases.push_back({1, n, k, n % 2 == 0, true});
      cases.push_back({19, n, k, n % 2 != 0, k % 2 == 0});
    }
  }
  cases.push_back({200, 50, 1537, true, true});
  cases.push_back({130, 260, 1288, true, true});
  cases.push_back({9, 1028, 2048});
  return cases;
}

// A row of an attention case: its slot (-1: padded) and its position.
struct AttentionRow {
  int32_t slot;
  int32_t position;
};

struct AttentionCase {
  const char* name;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t block_tokens;
  DType cache_type;
  std::vector<AttentionRow> rows;
};

// Returns `count` rows of one sequence from `first` on.
inline void AppendRun(std::vector<AttentionRow>& rows, int32_t slot, int32_t first, int32_t count) {
  for (int32_t i = 0; i < count; ++i) rows.push_back({slot, first + i});
}

// One row of each context length around the cuts of chunks and splits, with padded rows between.
inline std::vector<AttentionRow> DecodeRows() {
  std::vector<AttentionRow> rows;
  int32_t slot = 0;
  for (int32_t context : {1, 31, 32, 33, 511, 512, 513, 1500}) {
    rows.push_back({slot++, context - 1});
    if (slot % 3 == 0) rows.push_back({-1, 0});
  }
  return rows;
}

// One row of each context length around the cuts of longer splits, and of groups of them.
inline std::vector<AttentionRow> LongDecodeRows() {
  std::vector<AttentionRow> rows;
  int32_t slot = 0;
  for (int32_t context : {4100, 255, 256, 257, 2048, 2049}) rows.push_back({slot++, context - 1});
  return rows;
}

// Prompts in one go, a later chunk across a split, decode rows and padding, in one launch.
inline std::vector<AttentionRow> MixedRows() {
  std::vector<AttentionRow> rows;
  AppendRun(rows, 2, 0, 70);
  rows.push_back({0, 600});
  AppendRun(rows, 1, 500, 30);
  rows.push_back({-1, 0});
  rows.push_back({-1, 7});
  rows.push_back({3, 0});
  AppendRun(rows, 4, 1020, 9);
  return rows;
}

// Rows of sequences with drafts: around the cuts of splits and of groups of them, around a cut of
// 16 tokens and inside one, alone, longer than any bundle of rows that read K and V once, and apart
// in a sequence.
inline std::vector<AttentionRow> DraftedRows() {
  std::vector<AttentionRow> rows;
  AppendRun(rows, 0, 509, 5);
  AppendRun(rows, 1, 4094, 4);
  rows.push_back({2, 100});
  rows.push_back({-1, 0});
  AppendRun(rows, 3, 0, 4);
  AppendRun(rows, 4, 1015, 17);
  AppendRun(rows, 5, 252, 2);
  rows.push_back({5, 300});
  rows.push_back({6, 700});
  AppendRun(rows, 7, 2046, 3);
  AppendRun(rows, 8, 302, 4);
  AppendRun(rows, 9, 1540, 3);
  return rows;
}

inline std::vector<AttentionCase> AttentionCases() {
  constexpr DType kBf16 = DType::kBFloat16, kF32 = DType::kFloat32;
  return {
      {"no rows", 9, 3, 64, 32, kBf16, {}},
      {"only padding", 9, 3, 64, 32, kBf16, {{-1, 0}, {-1, 5}}},
      {"decode, group 3", 9, 3, 64, 32, kBf16, DecodeRows()},
      {"decode, group 1, float32 cache", 2, 2, 64, 16, kF32, DecodeRows()},
      {"decode, group 6, head_dim 32", 6, 1, 32, 32, kBf16, DecodeRows()},
      {"decode, group 4, head_dim 128", 8, 2, 128, 64, kBf16, DecodeRows()},
      {"long decode, group 4, head_dim 128", 8, 2, 128, 32, kBf16, LongDecodeRows()},
      {"long decode, group 12, head_dim 64", 12, 1, 64, 32, kBf16, LongDecodeRows()},
      {"decode, group 16, head_dim 128", 16, 1, 128, 16, kBf16, DecodeRows()},
      {"decode, group 7, head_dim 64", 14, 2, 64, 32, kBf16, DecodeRows()},
      {"drafts, group 4, head_dim 128", 8, 2, 128, 32, kBf16, DraftedRows()},
      {"drafts, group 5, head_dim 64", 5, 1, 64, 16, kBf16, DraftedRows()},
      {"drafts, group 4, head_dim 64", 8, 2, 64, 32, kBf16, DraftedRows()},
      {"drafts, group 1, head_dim 128", 2, 2, 128, 32, kBf16, DraftedRows()},
      {"drafts, group 2, head_dim 128", 4, 2, 128, 16, kBf16, DraftedRows()},
      {"drafts, group 5, head_dim 128", 10, 2, 128, 32, kBf16, DraftedRows()},
      {"drafts, group 8, head_dim 128", 8, 1, 128, 32, kBf16, DraftedRows()},
      {"drafts, group 16, head_dim 128", 16, 1, 128, 32, kBf16, DraftedRows()},
      {"mixed, group 3", 9, 3, 64, 32, kBf16, MixedRows()},
      {"mixed, group 1", 2, 2, 32, 48, kBf16, MixedRows()},
      {"mixed, group 8, head_dim 128", 8, 1, 128, 32, kBf16, MixedRows()},
      {"mixed, group 4, head_dim 128", 8, 2, 128, 32, kBf16, MixedRows()},
      {"mixed, group 4, float32 cache", 4, 1, 128, 32, kF32, MixedRows()},
      {"mixed, group 16, head_dim 256", 16, 1, 256, 16, kBf16, MixedRows()},
      {"mixed, group 17, head_dim 80", 34, 2, 80, 32, kBf16, MixedRows()},
      {"mixed, head_dim 16, float32 cache", 3, 3, 16, 32, kF32, MixedRows()},
  };
}

// Timed shapes of attention. Decode: SmolLM2's heads, then every group size and head_dim at 16K.
inline std::vector<AttentionCase> TimedDecodeCases() {
  constexpr DType kBf16 = DType::kBFloat16;
  return {
      {"9/3 heads of 64, context 64", 9, 3, 64, 32, kBf16, {{0, 63}}},
      {"9/3 heads of 64, context 512", 9, 3, 64, 32, kBf16, {{0, 511}}},
      {"9/3 heads of 64, context 2048", 9, 3, 64, 32, kBf16, {{0, 2047}}},
      {"group 1, head_dim 64, context 16384", 4, 4, 64, 32, kBf16, {{0, 16383}}},
      {"group 3, head_dim 64, context 16384", 12, 4, 64, 32, kBf16, {{0, 16383}}},
      {"group 4, head_dim 64, context 16384", 16, 4, 64, 32, kBf16, {{0, 16383}}},
      {"group 8, head_dim 64, context 16384", 32, 4, 64, 32, kBf16, {{0, 16383}}},
      {"group 1, head_dim 128, context 16384", 4, 4, 128, 32, kBf16, {{0, 16383}}},
      {"group 3, head_dim 128, context 16384", 12, 4, 128, 32, kBf16, {{0, 16383}}},
      {"group 4, head_dim 128, context 16384", 16, 4, 128, 32, kBf16, {{0, 16383}}},
      {"group 8, head_dim 128, context 16384", 32, 4, 128, 32, kBf16, {{0, 16383}}},
  };
}

// A prompt of SmolLM2 in one go.
inline AttentionCase PrefillCase(int32_t tokens) {
  AttentionCase c = {"prefill", 9, 3, 64, 32, DType::kBFloat16, {}};
  AppendRun(c.rows, 0, 0, tokens);
  return c;
}

// A row of sparse attention: its slot (-1: padded), its position, and how many units each of its
// lists has (-1: all).
struct SparseRow {
  int32_t slot;
  int32_t position;
  int32_t units;
};

// The order of a list's units in memory: at the places of their own numbers, at other places, or in
// a ring of the newest blocks; or they have no numbers (SparseAttentionParams::units is null).
enum class SparsePlaces { kOwn, kOther, kRing, kUnnumbered };

struct SparseCase {
  const char* name;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t block_tokens;
  int32_t unit_tokens;
  DType cache_type;
  SparsePlaces places;
  std::vector<SparseRow> rows;
};

// Lists around the cuts of pieces, chunks and splits, empty lists, padded rows between; the newest
// unit is whole or short.
inline std::vector<SparseRow> SparseRows(int32_t unit_tokens) {
  std::vector<SparseRow> rows;
  int32_t slot = 0;
  for (int32_t tokens : {1, 16, 32, 33, 96, 496, 512, 544, 1300}) {
    const int32_t units = (tokens + unit_tokens - 1) / unit_tokens;
    // All of a short sequence, and a part of a longer one.
    rows.push_back({slot++, tokens - 1, -1});
    rows.push_back({slot++, 2 * units * unit_tokens + tokens % 7, units});
    if (slot % 3 == 0) rows.push_back({-1, 5, 0});
  }
  rows.push_back({slot, 700, 0});
  return rows;
}

inline std::vector<SparseCase> SparseCases() {
  constexpr DType kBf16 = DType::kBFloat16, kF32 = DType::kFloat32;
  constexpr SparsePlaces kOwn = SparsePlaces::kOwn, kOther = SparsePlaces::kOther,
                         kRing = SparsePlaces::kRing, kUnnumbered = SparsePlaces::kUnnumbered;
  return {
      {"no rows", 8, 2, 64, 32, 32, kBf16, kOwn, {}},
      {"only padding", 8, 2, 64, 32, 32, kBf16, kOwn, {{-1, 0, 0}, {-1, 5, 0}}},
      {"blocks, group 4, head_dim 128", 8, 2, 128, 32, 32, kBf16, kOwn, SparseRows(32)},
      {"blocks at places, group 8, head_dim 128", 8, 1, 128, 32, 32, kBf16, kOther, SparseRows(32)},
      {"halves of blocks, group 3, head_dim 64", 9, 3, 64, 32, 16, kBf16, kOther, SparseRows(16)},
      {"units of two blocks, group 1", 2, 2, 64, 32, 64, kBf16, kOwn, SparseRows(64)},
      {"blocks of 64, group 16", 16, 1, 128, 64, 64, kBf16, kOther, SparseRows(64)},
      {"blocks, head_dim 80, group 17", 34, 2, 80, 16, 16, kBf16, kOther, SparseRows(16)},
      {"blocks, head_dim 96, group 2", 4, 2, 96, 32, 32, kBf16, kOther, SparseRows(32)},
      {"blocks, head_dim 256, group 5", 5, 1, 256, 16, 16, kBf16, kOwn, SparseRows(16)},
      {"blocks, head_dim 16, float32", 3, 3, 16, 16, 16, kF32, kOther, SparseRows(16)},
      {"blocks, group 4, float32", 8, 2, 128, 32, 32, kF32, kOwn, SparseRows(32)},
      {"ring, group 4", 8, 2, 64, 32, 32, kBf16, kRing, SparseRows(32)},
      {"ring, float32", 2, 2, 128, 16, 16, kF32, kRing, SparseRows(16)},
      {"tokens, group 4, head_dim 128", 8, 2, 128, 32, 1, kBf16, kOwn, SparseRows(1)},
      {"tokens at places, group 8", 8, 1, 64, 32, 1, kBf16, kOther, SparseRows(1)},
      // Lists of this capacity are long.
      {"many tokens, group 4, head_dim 128",
       8,
       2,
       128,
       32,
       1,
       kBf16,
       kOwn,
       {{0, 8999, -1}, {1, 20, -1}, {-1, 5, 0}, {2, 9500, 8300}}},
      {"many tokens at places, group 12",
       12,
       1,
       64,
       32,
       1,
       kBf16,
       kOther,
       {{0, 8200, -1}, {1, 300, 17}}},
      {"tokens, head_dim 256", 2, 1, 256, 16, 1, kBf16, kOther, SparseRows(1)},
      {"tokens, head_dim 48, group 6", 6, 1, 48, 16, 1, kBf16, kOther, SparseRows(1)},
      {"tokens, float32", 4, 1, 128, 32, 1, kF32, kOther, SparseRows(1)},
      {"tokens without numbers", 8, 2, 128, 32, 1, kBf16, kUnnumbered, SparseRows(1)},
      {"blocks without numbers", 8, 2, 64, 32, 32, kBf16, kUnnumbered, SparseRows(32)},
      {"units of 8", 4, 2, 64, 32, 8, kBf16, kOther, SparseRows(8)},
  };
}

// Timed shapes of sparse attention: `rows` rows over lists of `tokens` tokens, anywhere in a long
// sequence. With `alone` each (row, KV head) is a call of its own, as co-attention makes them.
struct TimedSparseCase {
  const char* name;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t block_tokens;
  int32_t unit_tokens;
  int32_t rows;
  int32_t tokens;
  bool alone = false;
};

inline std::vector<TimedSparseCase> TimedSparseCases() {
  return {
      {"blocks, group 4, 2048 tokens", 32, 8, 128, 32, 32, 4, 2048},
      {"blocks, group 8, 2048 tokens", 64, 8, 128, 32, 32, 4, 2048},
      {"blocks, group 4, 160 tokens", 32, 8, 128, 32, 32, 32, 160},
      {"blocks, group 8, 160 tokens", 64, 8, 128, 32, 32, 32, 160},
      {"blocks, group 4, 160 tokens, alone", 32, 8, 128, 32, 32, 32, 160, true},
      {"blocks, group 8, 160 tokens, alone", 64, 8, 128, 32, 32, 32, 160, true},
      {"tokens, group 4, 1536 tokens", 32, 8, 128, 32, 1, 4, 1536},
      {"tokens, group 8, 1536 tokens", 64, 8, 128, 32, 1, 4, 1536},
  };
}

// Timed shapes of level_scores: `rows` rows of `blocks` blocks of level 0, in e4m3.
struct TimedLevelsCase {
  const char* name;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t rows;
  int32_t blocks;
  bool has_spread;
};

inline std::vector<TimedLevelsCase> TimedLevelsCases() {
  return {
      {"group 4", 32, 8, 128, 16, 2044, false},
      {"group 4, spreads", 32, 8, 128, 16, 2044, true},
      {"group 8", 64, 8, 128, 16, 2044, false},
      {"group 5", 40, 8, 128, 16, 2044, false},
  };
}

// Timed shapes of sample: rows, the vocabulary, and how the token is chosen.
struct SampleCase {
  const char* name;
  int32_t rows;
  int32_t vocab;
  float temperature;
  int32_t top_k;
  float top_p;
};

inline std::vector<SampleCase> TimedSampleCases() {
  return {
      {"greedy", 1, 49152, 0.0f, 0, 1.0f},
      {"greedy", 8, 49152, 0.0f, 0, 1.0f},
      {"greedy", 32, 49152, 0.0f, 0, 1.0f},
      {"temperature", 8, 49152, 0.8f, 0, 1.0f},
      {"top_k 50, top_p 0.95", 8, 49152, 0.8f, 50, 0.95f},
      {"top_p 0.95", 8, 49152, 0.8f, 0, 0.95f},
  };
}

}  // namespace sluice::kernels
