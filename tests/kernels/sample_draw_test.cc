// Many draws together: they follow the distribution, and repeat.
#include "tests/kernels/sample_support.h"

namespace sluice::kernels {
namespace {

// Draws `count` tokens from row 0's logits, one per output index.
std::vector<int32_t> DrawMany(const KernelTable& path, SampleFixture& f, int32_t count) {
  std::vector<int32_t> drawn;
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t r = 0; r < f.rows; ++r) f.positions[static_cast<size_t>(r)] = i;
    f.Run(path);
    drawn.push_back(f.out_tokens[0]);
  }
  return drawn;
}

SampleFixture SmallVocabulary(Random& random, int32_t draws) {
  SampleFixture f(1, 8, draws + 1);
  FillNormal(std::span<float>(f.logits.data(), 8), random);
  f.sampling[0].temperature = 0.8f;
  f.sampling[0].seed = random();
  return f;
}

void TestDistribution(const KernelTable& path, Random& random) {
  constexpr int32_t kDraws = 5000;
  for (float top_p : {1.0f, 0.8f}) {
    SampleFixture f = SmallVocabulary(random, kDraws);
    f.sampling[0].top_p = top_p;
    const std::vector<double> want = OracleProbabilities(f, 0);
    std::vector<int> seen(8, 0);
    for (int32_t token : DrawMany(path, f, kDraws)) ++seen[static_cast<size_t>(token)];
    double chi2 = 0;
    for (size_t v = 0; v < 8; ++v) {
      const double expected = want[v] * kDraws;
      if (expected == 0) {
        CHECK(seen[v] == 0);
        continue;
      }
      chi2 += (seen[v] - expected) * (seen[v] - expected) / expected;
    }
    CHECK(chi2 < 50);  // 7 degrees of freedom: exceeded once in 7e7 honest runs
  }
}
SLUICE_TEST_ON_EVERY_PATH("draws follow the distribution (chi-square)", TestDistribution)

void TestSeeds(const KernelTable& path, Random& random) {
  SampleFixture f = SmallVocabulary(random, 200);
  const auto first = DrawMany(path, f, 200);
  CHECK(DrawMany(path, f, 200) == first);
  f.sampling[0].seed += 1;
  CHECK(DrawMany(path, f, 200) != first);
}
SLUICE_TEST_ON_EVERY_PATH("a seed gives the same tokens again, another seed others", TestSeeds)

void TestCompany(const KernelTable& path, Random& random) {
  SampleFixture alone = SmallVocabulary(random, 100);
  SampleFixture together(4, 8, 101);
  for (int64_t r = 0; r < 4; ++r) {
    FillNormal(std::span<float>(together.row(r), 8), random);
    together.sampling[static_cast<size_t>(r)].temperature = 2.0f;
  }
  std::copy_n(alone.row(0), 8, together.row(0));
  together.sampling[0] = alone.sampling[0];
  CHECK(DrawMany(path, together, 100) == DrawMany(path, alone, 100));
}
SLUICE_TEST_ON_EVERY_PATH("a seeded sequence draws the same whatever else is in the batch",
                          TestCompany)

}  // namespace
}  // namespace sluice::kernels
