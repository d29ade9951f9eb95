#include "src/profile/skew.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int64_t kDim = 16;

// Returns rows in the span of `directions` random directions of kDim, plus noise.
std::vector<float> Rows(SplitMix64& random, const std::vector<float>& directions, int64_t rows,
                        double noise) {
  std::vector<float> out;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<double> row(kDim);
    for (size_t d = 0; d < directions.size() / kDim; ++d) {
      const double weight = 2 * random.Uniform() - 1;
      for (size_t i = 0; i < kDim; ++i) row[i] += weight * double{directions[d * kDim + i]};
    }
    for (double v : row) out.push_back(static_cast<float>(v + noise * (random.Uniform() - 0.5)));
  }
  return out;
}

std::vector<float> Random(SplitMix64& random, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = static_cast<float>(2 * random.Uniform() - 1);
  return values;
}

// Returns the first columns of the identity.
std::vector<float> FirstColumns(int64_t rank) {
  std::vector<float> p(static_cast<size_t>(kDim * rank));
  for (int64_t r = 0; r < rank; ++r) p[static_cast<size_t>(r * rank + r)] = 1;
  return p;
}

}  // namespace

TEST_CASE("the columns of a skew are orthonormal") {
  SplitMix64 random(TestSeed());
  const std::vector<float> p = SkewOf(Random(random, 100 * kDim), kDim, 5);
  REQUIRE(p.size() == kDim * 5);
  for (size_t a = 0; a < 5; ++a) {
    for (size_t b = 0; b < 5; ++b) {
      double dot = 0;
      for (size_t d = 0; d < kDim; ++d) dot += double{p[d * 5 + a]} * double{p[d * 5 + b]};
      CHECK(dot == Approx(a == b ? 1 : 0).margin(1e-6));
    }
  }
}

TEST_CASE("where queries lie in few directions, as many skewed columns order keys exactly") {
  SplitMix64 random(TestSeed());
  const std::vector<float> directions = Random(random, 3 * kDim);
  const std::vector<float> q = Rows(random, directions, 200, 0), k = Random(random, 60 * kDim);
  CHECK(RankCorrelation(q, k, SkewOf(q, kDim, 3), kDim, 3) > 0.999);
  // Plain columns do not: the directions are spread over all of them.
  CHECK(RankCorrelation(q, k, FirstColumns(3), kDim, 3) < 0.95);
}

TEST_CASE("a skew serves queries that it has not seen") {
  SplitMix64 random(TestSeed());
  const std::vector<float> directions = Random(random, 3 * kDim);
  const std::vector<float> seen = Rows(random, directions, 300, 0.3);
  const std::vector<float> fresh = Rows(random, directions, 50, 0.3);
  const std::vector<float> k = Random(random, 200 * kDim);
  const double skewed = RankCorrelation(fresh, k, SkewOf(seen, kDim, 4), kDim, 4);
  CHECK(skewed > 0.8);
  CHECK(skewed > RankCorrelation(fresh, k, FirstColumns(4), kDim, 4));
}

TEST_CASE("the columns with the most weight are taken, not the first") {
  // One loud query along one axis: the largest singular value; many soft ones along another.
  std::vector<float> q(101 * 2);
  q[0] = 12;
  for (size_t i = 1; i <= 100; ++i) q[i * 2 + 1] = 1;
  const std::vector<float> p = SkewOf(q, 2, 1);
  CHECK(std::abs(p[0]) == Approx(0).margin(1e-6));
  CHECK(std::abs(p[1]) == Approx(1));
}

TEST_CASE("a rank correlation is 1 for the whole, -1 for the reverse, 0 for nothing to order") {
  SplitMix64 random(TestSeed());
  const std::vector<float> q = Random(random, 5 * kDim), k = Random(random, 30 * kDim);
  CHECK(RankCorrelation(q, k, FirstColumns(kDim), kDim, kDim) == Approx(1));
  CHECK(RankCorrelation({}, k, FirstColumns(kDim), kDim, kDim) == 0);
  CHECK(RankCorrelation(q, {k.data(), kDim}, FirstColumns(kDim), kDim, kDim) == 0);
  // The keys lie in two opposite corners: the second column tells the opposite of the sum.
  const std::vector<float> one = {1, 1}, keys = {3, -1, 6, -2, 9, -3};
  CHECK(RankCorrelation(one, keys, std::vector<float>{0, 1}, 2, 1) == Approx(-1));
}

}  // namespace sluice
