#include "src/profile/svd.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

std::vector<double> Random(SplitMix64& random, int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  for (double& v : values) v = 2 * random.Uniform() - 1;
  return values;
}

// Returns x^T x of x [rows][columns], computed naively.
std::vector<double> Gram(const std::vector<double>& x, int64_t rows, int64_t columns) {
  std::vector<double> out(static_cast<size_t>(columns * columns));
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t r = 0; r < rows; ++r) {
        out[static_cast<size_t>(i * columns + j)] +=
            x[static_cast<size_t>(r * columns + i)] * x[static_cast<size_t>(r * columns + j)];
      }
    }
  }
  return out;
}

double WorstDifference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

// Checks that V is orthogonal, and that V S^2 V^T is a^T a.
void CheckSvd(const std::vector<double>& a, int64_t rows, int64_t columns) {
  INFO(rows << " x " << columns);
  const Svd svd = SvdOf(a, rows, columns);
  REQUIRE(svd.singular_values.size() == static_cast<size_t>(columns));
  CHECK(std::is_sorted(svd.singular_values.rbegin(), svd.singular_values.rend()));
  std::vector<double> identity(static_cast<size_t>(columns * columns));
  for (int64_t i = 0; i < columns; ++i) identity[static_cast<size_t>(i * columns + i)] = 1;
  CHECK(WorstDifference(Gram(svd.v, columns, columns), identity) < 1e-12);
  std::vector<double> scaled(svd.v.size());  // S V^T
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t r = 0; r < columns; ++r) {
      scaled[static_cast<size_t>(j * columns + r)] =
          svd.singular_values[static_cast<size_t>(j)] * svd.v[static_cast<size_t>(r * columns + j)];
    }
  }
  const std::vector<double> gram = Gram(a, rows, columns);
  const double size = std::max(1.0, WorstDifference(gram, std::vector<double>(gram.size())));
  CHECK(WorstDifference(Gram(scaled, columns, columns), gram) < 1e-12 * size * columns);
}

}  // namespace

TEST_CASE("a decomposition puts the matrix together again") {
  SplitMix64 random(TestSeed());
  for (const auto& [rows, columns] :
       {std::pair<int64_t, int64_t>{1, 1}, {50, 16}, {16, 16}, {5, 16}, {0, 4}, {300, 64}}) {
    CheckSvd(Random(random, rows * columns), rows, columns);
  }
}

TEST_CASE("few directions, repeated columns and values far apart are decomposed too") {
  SplitMix64 random(TestSeed());
  const std::vector<double> left = Random(random, 40 * 2), right = Random(random, 2 * 12);
  std::vector<double> a(40 * 12), spread = Random(random, 40 * 12);
  for (size_t r = 0; r < 40; ++r) {
    for (size_t c = 0; c < 12; ++c) {
      a[r * 12 + c] = left[r * 2] * right[c] + left[r * 2 + 1] * right[12 + c];
      spread[r * 12 + c] *= std::pow(10.0, -static_cast<double>(c));
    }
  }
  CheckSvd(a, 40, 12);
  const Svd svd = SvdOf(a, 40, 12);
  CHECK(svd.singular_values[2] < 1e-12 * svd.singular_values[0]);
  CheckSvd(spread, 40, 12);
  for (size_t r = 0; r < 40; ++r) a[r * 12 + 5] = a[r * 12 + 3];
  CheckSvd(a, 40, 12);
}

TEST_CASE("known singular values are found") {
  // diag(3, 1, 2) with a row of zeros.
  const Svd svd = SvdOf({3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0}, 4, 3);
  CHECK(svd.singular_values[0] == Approx(3));
  CHECK(svd.singular_values[1] == Approx(2));
  CHECK(svd.singular_values[2] == Approx(1));
  CHECK(std::abs(svd.v[0 * 3 + 0]) == Approx(1));
  CHECK(std::abs(svd.v[2 * 3 + 1]) == Approx(1));
  CHECK(std::abs(svd.v[1 * 3 + 2]) == Approx(1));
}

}  // namespace sluice
