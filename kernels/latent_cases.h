// Shapes of the operators of latent attention and of experts that tests/kernels holds to the
// reference and that `sluice-bench kernels` checks and times.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/latent_params.h"

namespace sluice::kernels {

// A row of sparse MLA: its slot (-1: padded) and the number of entries of its list.
struct MlaRow {
  int32_t slot;
  int32_t entries;
};

// The other result to merge with: nothing, a result of every row, or of some of them.
enum class MlaOther { kNone, kAll, kSome };

struct MlaCase {
  const char* name;
  int32_t heads;
  int32_t rank;
  int32_t rope;
  int32_t block_tokens;
  DType type;
  MlaOther other;
  bool numbered;  // false: SparseMlaParams::entries is null
  bool float_out;
  std::vector<MlaRow> rows;
};

// Lists around the cuts of tiles and pieces, empty lists, padded rows between, two rows of a slot.
inline std::vector<MlaRow> MlaRows() {
  std::vector<MlaRow> rows;
  int32_t slot = 0;
  for (int32_t entries : {0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 255, 256, 257, 600}) {
    rows.push_back({slot++, entries});
    if (slot % 4 == 0) rows.push_back({-1, entries});
  }
  rows.push_back({slot - 1, 100});
  rows.push_back({slot - 1, 0});
  return rows;
}

inline std::vector<MlaCase> MlaCases() {
  constexpr DType kPacked = DType::kFloat8E4M3, kBf16 = DType::kBFloat16, kF32 = DType::kFloat32;
  constexpr MlaOther kNone = MlaOther::kNone, kAll = MlaOther::kAll, kSome = MlaOther::kSome;
  return {
      {"packed, no rows", 128, 512, 64, 64, kPacked, kNone, true, false, {}},
      {"packed, only padding", 16, 512, 64, 64, kPacked, kSome, true, false, {{-1, 0}, {-1, 9}}},
      {"packed, 128 heads",
       128,
       512,
       64,
       64,
       kPacked,
       kNone,
       true,
       false,
       {{0, 300}, {-1, 3}, {1, 1}, {2, 0}, {3, 2047}}},
      {"packed, 128 heads, merged",
       128,
       512,
       64,
       32,
       kPacked,
       kSome,
       true,
       false,
       {{0, 2048}, {1, 64}, {2, 0}, {3, 0}, {4, 700}}},
      {"packed, 128 heads, cuts",
       128,
       512,
       64,
       64,
       kPacked,
       kSome,
       true,
       false,
       {{0, 0}, {1, 1}, {2, 63}, {3, 64}, {-1, 5}, {4, 300}, {5, 512}, {6, 513}, {7, 1100}}},
      {"packed, 64 heads, merged",
       64,
       512,
       64,
       32,
       kPacked,
       kAll,
       true,
       false,
       {{0, 2048}, {1, 256}, {2, 0}, {3, 65}}},
      {"packed, 16 heads", 16, 512, 64, 64, kPacked, kNone, true, true, MlaRows()},
      {"packed, 16 heads, merged", 16, 512, 64, 16, kPacked, kAll, true, false, MlaRows()},
      {"packed, 4 heads, merged", 4, 512, 64, 64, kPacked, kSome, true, true, MlaRows()},
      {"packed, 1 head", 1, 512, 64, 32, kPacked, kNone, true, false, MlaRows()},
      {"packed, 4 heads, unnumbered", 4, 512, 64, 32, kPacked, kNone, false, false, MlaRows()},
      {"bf16, 16 heads", 16, 512, 64, 32, kBf16, kSome, true, false, MlaRows()},
      {"bf16, 5 heads, unnumbered", 5, 512, 64, 64, kBf16, kNone, false, true, MlaRows()},
      {"bf16, 20 heads, small", 20, 128, 32, 16, kBf16, kAll, true, false, MlaRows()},
      {"float32, 4 heads", 4, 512, 64, 32, kF32, kSome, true, true, MlaRows()},
      {"float32, 16 heads, unnumbered", 16, 512, 64, 16, kF32, kNone, false, false, MlaRows()},
      {"float32, 3 heads, small", 3, 64, 16, 16, kF32, kAll, true, false, MlaRows()},
  };
}

// Timed shapes of sparse MLA in the packed form with rank 512: rows over lists of `entries`
// entries, anywhere in a long sequence.
struct TimedMlaCase {
  int32_t heads;
  int32_t rows;
  int32_t entries;
};
inline std::vector<TimedMlaCase> TimedMlaCases() {
  return {{128, 1, 300}, {128, 1, 2048}, {128, 8, 300}, {128, 8, 2048}, {16, 8, 2048}};
}

// Timed shapes of index logits in the packed form: rows of one sequence each.
struct TimedLogitsCase {
  int32_t heads;
  int32_t rows;
  int32_t context;
};
inline std::vector<TimedLogitsCase> TimedLogitsCases() {
  return {{64, 1, 32768}, {64, 4, 32768}, {64, 1, 131072}};
}

// Timed shapes of products of experts (`rows` rows choose `k` experts each) and of heads.
struct TimedExpertCase {
  int32_t rows;
  int32_t k;
  int32_t experts;
  int32_t n;
  int32_t columns;  // columns of a weight matrix
};
inline std::vector<TimedExpertCase> TimedExpertCases() {
  return {{1, 8, 16, 4096, 2048}, {8, 8, 16, 4096, 2048}, {32, 8, 16, 4096, 2048}};
}
struct TimedHeadCase {
  int32_t rows;
  int32_t heads;
  int32_t n;
  int32_t columns;
};
inline std::vector<TimedHeadCase> TimedHeadCases() {
  return {{1, 128, 512, 128}, {8, 128, 512, 128}, {8, 128, 128, 512}};
}

// Timed shapes of TopK: rows of `units` scores, of which k are selected.
struct TimedTopKCase {
  int32_t rows;
  int32_t units;
  int32_t k;
};
inline std::vector<TimedTopKCase> TimedTopKCases() { return {{1, 131072, 2048}, {8, 32768, 2048}}; }

}  // namespace sluice::kernels
