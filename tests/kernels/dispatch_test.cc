#include <algorithm>
#include <string>

#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

TEST_CASE("the reference and the portable path are always there, slowest first", "[kernels]") {
  const auto& tables = AvailableKernelTables();
  REQUIRE(tables.size() >= 2);
  CHECK(std::string(tables[0]->name) == "reference");
  CHECK(std::string(tables[1]->name) == "portable");
}

TEST_CASE("every available path is a known one, found by its name, in the known order",
          "[kernels]") {
  const auto& known = KnownKernelTables();
  size_t last = 0;
  for (const KernelTable* table : AvailableKernelTables()) {
    CHECK(FindKernelTable(table->name) == table);
    const auto at = std::find_if(known.begin(), known.end(), [&](const char* name) {
      return std::string(name) == table->name;
    });
    REQUIRE(at != known.end());
    const auto index = static_cast<size_t>(at - known.begin());
    CHECK(index >= last);
    last = index;
  }
  CHECK(FindKernelTable("sse9") == nullptr);
}

TEST_CASE("packing rows in pieces gives the panels of the whole matrix", "[kernels]") {
  Random random(TestSeed());
  for (const auto& [n, k] : {std::pair{37, 33}, {16, 32}, {1, 1}, {50, 65}}) {
    const auto w = NormalBuffer<uint16_t>(int64_t{n} * k, random);
    Guarded<uint16_t> whole(PanelElements(n, k)), pieces(PanelElements(n, k));
    std::fill_n(whole.data(), whole.size(), uint16_t{0});
    std::fill_n(pieces.data(), pieces.size(), uint16_t{0});
    PackPanels(w.data(), n, k, 0, whole.data());
    const int32_t cut = n / 3;
    PackPanels(w.data() + int64_t{cut} * k, n - cut, k, cut, pieces.data());
    PackPanels(w.data(), cut, k, 0, pieces.data());
    CHECK(BitDifference(pieces.span(), whole.span(), 32) == "");
    CHECK(whole.Damage() == "");
    const WeightMatrix matrix = {whole.data(), n, k, WeightLayout::kPanel16};
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        REQUIRE(whole[WeightIndex(matrix, row, i)] == w[row * k + i]);
      }
    }
  }
}

}  // namespace
}  // namespace sluice::kernels
