// Digests of Fluxion's four levels, for kernel tests.
#pragma once

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

inline float Magnitude(float v) { return std::fabs(v); }
inline uint16_t Magnitude(uint16_t v) { return v & 0x7FFF; }  // of a bf16

// Digests of all levels. They start as all-ones bytes.
template <typename T>
struct TestLevels {
  TestLevels(int32_t of_slots, int32_t of_tokens, int32_t head_dim, int32_t kv_heads,
             Random& random)
      : slots(of_slots), tokens(of_tokens) {
    for (int32_t level = 0; level < kFluxionLevels; ++level) {
      of.emplace_back(slots, tokens / LevelTokens(level), Pick(random, 1, 9), 2 * head_dim,
                      kv_heads, random);
      view.of[level] = of.back().view;
    }
  }
  // Calls body(level, slot, block, head) for every row.
  template <typename Body>
  void ForEachRow(Body body) const {
    for (int32_t level = 0; level < kFluxionLevels; ++level) {
      for (int64_t slot = 0; slot < slots; ++slot) {
        for (int64_t b = 0; b < tokens / LevelTokens(level); ++b) {
          for (int64_t h = 0; h < view.of[0].kv_heads; ++h) body(level, slot, b, h);
        }
      }
    }
  }
  // Fills rows with normal means and with variances of at least 0, which are 0 in one of eight
  // rows, and what lies between rows with 0.
  void Fill(Random& random) {
    for (TestRows<T>& rows : of) std::fill_n(rows.data.data(), rows.data.size(), T{});
    ForEachRow([&](int32_t level, int64_t slot, int64_t b, int64_t h) {
      TestRows<T>& rows = of[static_cast<size_t>(level)];
      const auto dim = static_cast<size_t>(rows.view.dim / 2);
      T* const row = rows.Row(slot, b, h);
      FillNormal(std::span<T>(row, 2 * dim), random, random() % 8 == 0 ? 0.0f : 1.0f);
      FillNormal(std::span<T>(row, dim), random);
      for (size_t d = dim; d < 2 * dim; ++d) row[d] = Magnitude(row[d]);
    });
  }

  int32_t slots, tokens;
  std::vector<TestRows<T>> of;
  LevelDigests view;
};

}  // namespace sluice::kernels
