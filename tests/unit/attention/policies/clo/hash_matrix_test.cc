#include "src/attention/policies/clo/hash_matrix.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

namespace sluice {
namespace {

TEST_CASE("random hash matrices have orthogonal columns, and bits that tell angles") {
  const HashShape shape{2, 2, 64, 160};
  const std::vector<float> hash = RandomHash(shape, 5);
  REQUIRE(std::ssize(hash) == shape.elements());
  CHECK(hash == RandomHash(shape, 5));
  CHECK(hash != RandomHash(shape, 6));
  const auto product = [&](int64_t matrix, int64_t a, int64_t b) {
    double sum = 0;
    for (int64_t d = 0; d < 64; ++d) {
      const float* row = hash.data() + (matrix * 64 + d) * 160;
      sum += double{row[a]} * double{row[b]};
    }
    return sum;
  };
  for (int64_t matrix = 0; matrix < 4; ++matrix) {
    for (int64_t a = 0; a < 160; ++a) {
      CHECK(product(matrix, a, a) == Approx(1).epsilon(1e-5));
      for (int64_t b = a + 1; b < std::min<int64_t>(a / 64 * 64 + 64, 160); ++b) {
        REQUIRE(std::abs(product(matrix, a, b)) < 1e-5);
      }
    }
  }
  // Two vectors at 60 degrees differ in a third of the bits, give or take what 640 bits allow.
  int differing = 0;
  for (size_t matrix = 0; matrix < 4; ++matrix) {
    for (size_t bit = 0; bit < 160; ++bit) {
      const float x = hash[matrix * 64 * 160 + bit], y = hash[(matrix * 64 + 1) * 160 + bit];
      differing += (x > 0) != (0.5f * x + 0.8660254f * y > 0) ? 1 : 0;
    }
  }
  CHECK(std::abs(differing / 640.0 - 1.0 / 3) < 0.06);
}

TEST_CASE("a rank's heads have the matrices that they have in the whole model") {
  const int64_t of_head = 32 * 64, of_layer = 4 * of_head;
  const std::vector<float> all = RandomHash({2, 4, 32, 64}, 3);
  const std::vector<float> own = RandomHash({2, 2, 32, 64, 1, 4}, 3);
  REQUIRE(std::ssize(own) == 4 * of_head);
  for (int64_t layer = 0; layer < 2; ++layer) {
    CHECK(std::equal(own.begin() + layer * 2 * of_head, own.begin() + (layer + 1) * 2 * of_head,
                     all.begin() + layer * of_layer + of_head));
  }
}

}  // namespace
}  // namespace sluice
