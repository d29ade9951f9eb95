// Digests of Fluxion's four levels, for kernel tests.
#pragma once

#include "kernels/e4m3.h"
#include "kernels/fluxion_params.h"
#include "tests/kernels/sparse_support.h"

// As SLUICE_TEST_ON_EVERY_PATH, with a tag of these files' cases.
#define SLUICE_TEST_LEVELS(claim, test)                                                 \
  TEST_CASE(claim " (portable)", "[kernels][levels]") { OnPath("portable", test); }     \
  TEST_CASE(claim " (avx2)", "[kernels][levels]") { OnPath("avx2", test); }             \
  TEST_CASE(claim " (avx512bf16)", "[kernels][levels]") { OnPath("avx512bf16", test); } \
  TEST_CASE(claim " (amx)", "[kernels][levels]") { OnPath("amx", test); }               \
  TEST_CASE(claim " (cuda)", "[kernels][levels][cuda]") { OnPath("cuda", test); }

namespace sluice::kernels {

inline int32_t Pick(Random& random, int32_t from, int32_t to) {
  return from + static_cast<int32_t>(random() % static_cast<uint64_t>(to - from + 1));
}

// The levels that have digests, and whether these have a spread.
enum class DigestsOf { kAllLevels, kFirstLevel, kFirstLevelWithSpread };
inline constexpr DigestsOf kAllDigests[] = {DigestsOf::kAllLevels, DigestsOf::kFirstLevel,
                                            DigestsOf::kFirstLevelWithSpread};

inline const char* Name(DigestsOf digests) {
  if (digests == DigestsOf::kAllLevels) return "all levels have digests";
  return digests == DigestsOf::kFirstLevel ? "level 0 alone has digests"
                                           : "level 0 alone has digests, with a spread";
}
inline int32_t VectorsOf(DigestsOf digests) {
  return digests == DigestsOf::kFirstLevelWithSpread ? kDigestVectors : kDigestPieces;
}

// Digests of all levels, or of level 0 alone. They start as all-ones bytes.
struct TestLevels {
  TestLevels(int32_t of_slots, int32_t of_tokens, int32_t head_dim, int32_t kv_heads,
             Random& random, DigestsOf digests)
      : slots(of_slots),
        tokens(of_tokens),
        levels(digests == DigestsOf::kAllLevels ? kFluxionLevels : 1),
        spread_at(kDigestPieces * head_dim) {
    for (int32_t level = 0; level < kFluxionLevels; ++level) {
      of.emplace_back(slots, tokens / LevelTokens(level), Pick(random, 1, 9),
                      VectorsOf(digests) * head_dim, kv_heads, random);
      if (level < levels) view.of[level] = of.back().view;
    }
  }
  // Calls body(level, slot, block, head) for every row.
  template <typename Body>
  void ForEachRow(Body body) const {
    for (int32_t level = 0; level < levels; ++level) {
      for (int64_t slot = 0; slot < slots; ++slot) {
        for (int64_t b = 0; b < tokens / LevelTokens(level); ++b) {
          for (int64_t h = 0; h < view.of[0].kv_heads; ++h) body(level, slot, b, h);
        }
      }
    }
  }
  // Fills rows with e4m3 values of any exponent, most of them near 1; spreads are 0 or more.
  void Fill(Random& random) {
    ForEachRow([&](int32_t level, int64_t slot, int64_t b, int64_t h) {
      TestRows<uint8_t>& rows = of[static_cast<size_t>(level)];
      std::vector<float> values(static_cast<size_t>(rows.view.dim));
      FillNormal(values, random, random() % 8 == 0 ? 0.01f : 1.0f);
      uint8_t* const row = rows.Row(slot, b, h);
      for (size_t d = 0; d < values.size(); ++d) {
        row[d] = FloatToE4M3(d < spread_at ? values[d] : std::fabs(values[d]));
      }
    });
  }

  int32_t slots, tokens, levels;
  size_t spread_at;  // the first element of a row's spread, if it has one
  std::vector<TestRows<uint8_t>> of;
  LevelDigests view = {};
};

}  // namespace sluice::kernels
