// Linear with e4m3 weights and block scales, which besides the reference only a GPU's kernels
// take, and such weights made there by formula.
#include <cuda_runtime_api.h>

#include "kernels/cuda/common/launch.h"
#include "kernels/fp8_pairs.h"
#include "kernels/kernel_cases.h"
#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

// Operands with every code but NaN, and scales of all sizes: ordinary ones, far ones, 0, and ones
// beyond the range of a bf16 exponent.
struct Operands {
  Operands(const LinearCase& c, Random& random)
      : shape(c),
        codes(int64_t{c.n} * c.k),
        pairs(int64_t{c.n} * c.k),
        scales((c.n + kFp8BlockRows - 1) / kFp8BlockRows *
               ((c.k + kFp8BlockColumns - 1) / kFp8BlockColumns)),
        x(NormalBuffer<uint16_t>(int64_t{c.rows} * c.k, random)),
        bias(NormalBuffer<float>(c.n, random)),
        start(NormalBuffer<float>(int64_t{c.rows} * c.n, random)) {
    for (uint8_t& code : codes) {
      do code = static_cast<uint8_t>(random());
      while ((code & 0x7F) == 0x7F);
    }
    for (int64_t i = 0; HasFp8Pairs(c.k) && i < codes.size(); ++i) pairs[PairedPlace(i)] = codes[i];
    std::uniform_real_distribution<float> uniform(0.5f, 2.0f);
    for (float& scale : scales) {
      scale = uniform(random);
      if (random() % 8 == 0) scale *= 0x1p-9f;
      if (random() % 16 == 0) scale = 0;
    }
  }

  // Weights are in pairs if the path and k allow it, unless `plain`.
  Guarded<float> Run(const KernelTable& table, int64_t first, int32_t rows, int32_t decode_rows,
                     bool plain = false) const {
    Guarded<float> y(int64_t{rows} * shape.n);
    if (shape.accumulate) std::copy_n(start.data() + first * shape.n, y.size(), y.data());
    const bool is_reference = std::string_view(table.name) == "reference";
    const bool paired = !is_reference && HasFp8Pairs(shape.k) && !plain;
    const auto* w = reinterpret_cast<const uint16_t*>((paired ? pairs : codes).data());
    const LinearParams p = {
        x.data() + first * shape.k,
        {w, shape.n, shape.k, paired ? kFp8Pairs : WeightLayout::kFp8Blocks, scales.data()},
        shape.bias ? bias.data() : nullptr,
        y.data(),
        rows,
        decode_rows,
        DType::kBFloat16,
        shape.accumulate};
    RunWorkers(table.linear, p, 1);
    CHECK(y.Damage() == "");
    return y;
  }

  LinearCase shape;
  Guarded<uint8_t> codes, pairs;
  Guarded<float> scales;
  Guarded<uint16_t> x;
  Guarded<float> bias, start;
};

std::string Name(const LinearCase& c) {
  return std::to_string(c.rows) + " x " + std::to_string(c.n) + " x " + std::to_string(c.k);
}

const LinearCase kCases[] = {
    {0, 64, 256},     {1, 2240, 512},  {5, 33, 31, true, false},      {64, 4, 128},
    {9, 96, 144},     {33, 260, 1424}, {130, 576, 640, true, true},   {76, 128, 4608},
    {300, 160, 896},  {129, 36, 16},   {26, 1024, 2048, false, true}, {70, 31744, 128},
    {33, 67712, 128},
};

void TestLinear(const KernelTable& table, Random& random) {
  for (const LinearCase& c : kCases) {
    INFO(Name(c));
    const Operands o(c, random);
    const auto want = o.Run(*FindKernelTable("reference"), 0, c.rows, c.rows);
    const auto got = o.Run(table, 0, c.rows, c.rows / 2);
    // Values are of size 100, and their sums vary less than single values.
    const double typical = std::sqrt(double(c.k)) * 10;
    CHECK(Difference(got.span(), want.span(), 3e-6, c.n, typical) == "");
    const auto plain = o.Run(table, 0, c.rows, c.rows / 2, true);
    CHECK(Difference(plain.span(), want.span(), 3e-6, c.n, typical) == "");
    for (int32_t rows : {1, 8, 26, 33, 64, 65, 128, 129}) {
      if (rows > c.rows) continue;
      INFO("the last " << rows << " rows");
      const auto some = o.Run(table, c.rows - rows, rows, rows / 3);
      const auto same = got.span().last(static_cast<size_t>(rows) * static_cast<size_t>(c.n));
      CHECK(BitDifference(some.span(), same, c.n) == "");
    }
  }
}
TEST_CASE("linear with fp8 weights agrees with the reference, bits by row (cuda)",
          "[kernels][cuda]") {
  OnPath("cuda", TestLinear);
}

void TestScales(const KernelTable& table, Random& random) {
  for (float size : {0x1p-110f, 0x1p-30f, 300.0f, 0x1p20f}) {
    INFO("scales around " << size);
    Operands o({9, 64, 1024}, random);
    for (float& scale : o.scales) scale *= size;
    const auto want = o.Run(*FindKernelTable("reference"), 0, 9, 9);
    CHECK(Difference(o.Run(table, 0, 9, 9).span(), want.span(), 3e-6, 64) == "");
  }
}
TEST_CASE("scales of fp8 weights may be of any size (cuda)", "[kernels][cuda]") {
  OnPath("cuda", TestScales);
}

void TestFormula(const KernelTable&, Random& random) {
  for (int64_t count : {1, 15, 16, 1000, 100'003}) {
    const WeightFormula formula = {random(), 0.5f, 0.0f, static_cast<uint64_t>(count * 3 / 4)};
    Guarded<uint8_t> want(count), got(count);
    FillWeights(formula, 0, count, want.data());
    REQUIRE(cuda::LaunchFillWeights(formula, count, got.data(), nullptr) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(std::memcmp(want.data(), got.data(), static_cast<size_t>(count)) == 0);
    CHECK(got.Damage() == "");
  }
}
TEST_CASE("fp8 weights by formula are the same on a GPU (cuda)", "[kernels][cuda]") {
  OnPath("cuda", TestFormula);
}

void TestPairs(const KernelTable&, Random& random) {
  for (int64_t count : {0, 16, 304, 1 << 20}) {
    Guarded<uint8_t> want(count), got(count);
    for (int64_t i = 0; i < count; ++i) {
      got[i] = static_cast<uint8_t>(random());
      want[PairedPlace(i)] = got[i];
    }
    REQUIRE(cuda::LaunchPairWeights(count, got.data(), nullptr) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(std::memcmp(want.data(), got.data(), static_cast<size_t>(count)) == 0);
    CHECK(got.Damage() == "");
  }
  Guarded<uint8_t> weights(32);
  CHECK(cuda::LaunchPairWeights(17, weights.data(), nullptr) == cudaErrorInvalidValue);
  CHECK(cuda::LaunchPairWeights(16, weights.data() + 8, nullptr) == cudaErrorInvalidValue);
}
TEST_CASE("fp8 weights are put in pairs on a GPU (cuda)", "[kernels][cuda]") {
  OnPath("cuda", TestPairs);
}

}  // namespace
}  // namespace sluice::kernels
