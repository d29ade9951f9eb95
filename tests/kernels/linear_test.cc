#include <set>

#include "kernels/kernel_cases.h"
#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

// The operands of one product: x in the path's activation type, weights in both layouts.
struct Operands {
  Operands(const LinearCase& c, DType type, Random& random)
      : shape(c),
        x_type(type),
        row_major(NormalBuffer<uint16_t>(int64_t{c.n} * c.k, random, 0.1f)),
        panels(PanelElements(c.n, c.k)),
        x_float(NormalBuffer<float>(int64_t{c.rows} * c.k, random)),
        x_bf16(NormalBuffer<uint16_t>(int64_t{c.rows} * c.k, random)),
        bias(NormalBuffer<float>(c.n, random)),
        start(NormalBuffer<float>(int64_t{c.rows} * c.n, random)) {
    std::fill_n(panels.data(), panels.size(), uint16_t{0});
    PackPanels(row_major.data(), c.n, c.k, 0, panels.data());
  }

  const void* x(int64_t row) const {
    return x_type == DType::kFloat32 ? static_cast<const void*>(x_float.data() + row * shape.k)
                                     : x_bf16.data() + row * shape.k;
  }

  // Computes y = the case's product of rows [first, first + rows), by `workers` workers; the first
  // `decode_rows` of them are decode rows, all of them where it is -1.
  Guarded<float> Run(const KernelTable& table, WeightLayout layout, int64_t first, int32_t rows,
                     int workers, bool threads = false, int32_t decode_rows = -1) const {
    Guarded<float> y(int64_t{rows} * shape.n);
    if (shape.accumulate) {
      std::copy_n(start.data() + first * shape.n, y.size(), y.data());
    }
    const uint16_t* w = layout == WeightLayout::kPanel16 ? panels.data() : row_major.data();
    const LinearParams p = {x(first),
                            {w, shape.n, shape.k, layout},
                            shape.bias ? bias.data() : nullptr,
                            y.data(),
                            rows,
                            decode_rows < 0 ? rows : decode_rows,
                            x_type,
                            shape.accumulate};
    threads ? RunThreads(table.linear, p, workers) : RunWorkers(table.linear, p, workers);
    CHECK(y.Damage() == "");
    return y;
  }

  LinearCase shape;
  DType x_type;
  Guarded<uint16_t> row_major, panels;
  Guarded<float> x_float;
  Guarded<uint16_t> x_bf16;
  Guarded<float> bias, start;
};

std::string Name(const LinearCase& c) {
  return std::to_string(c.rows) + " x " + std::to_string(c.n) + " x " + std::to_string(c.k) +
         (c.bias ? " bias" : "") + (c.accumulate ? " accumulate" : "");
}

const KernelTable& Reference() { return *FindKernelTable("reference"); }

void TestLinear(const KernelTable& table, Random& random) {
  for (const LinearCase& c : OddLinearCases()) {
    INFO(Name(c));
    const Operands o(c, table.activation_type, random);
    const auto want = o.Run(Reference(), WeightLayout::kRowMajor, 0, c.rows, 1);
    const double typical = 0.1 * std::sqrt(static_cast<double>(c.k));
    for (int32_t decode_rows : std::set<int32_t>{c.rows, 0, c.rows / 3}) {
      INFO(decode_rows << " decode rows");
      const auto got = o.Run(table, table.weight_layout, 0, c.rows, 2, false, decode_rows);
      CHECK(Difference(got.span(), want.span(), 3e-6, c.n, typical) == "");
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("linear agrees with the reference", TestLinear)

void TestLinearBits(const KernelTable& table, Random& random) {
  for (const LinearCase& c : {LinearCase{75, 130, 576}, LinearCase{100, 33, 95, true, true},
                              LinearCase{500, 48, 64}, LinearCase{40, 500, 1536, false, true}}) {
    INFO(Name(c));
    const Operands o(c, table.activation_type, random);
    const auto all = o.Run(table, table.weight_layout, 0, c.rows, 1);
    for (int workers : {2, 3, 8}) {
      INFO(workers << " workers");
      const auto shared = o.Run(table, table.weight_layout, 0, c.rows, workers, true);
      CHECK(BitDifference(shared.span(), all.span(), c.n) == "");
    }
    for (int32_t rows : {1, 2, 5, 16, 17, 24}) {
      INFO("batches of " << rows << " rows");
      for (int32_t first = 0; first + rows <= c.rows; first += 7 * rows) {
        const auto some = o.Run(table, table.weight_layout, first, rows, 3);
        const auto same =
            all.span().subspan(static_cast<size_t>(first * c.n), static_cast<size_t>(rows * c.n));
        CHECK(BitDifference(some.span(), same, c.n) == "");
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a row of linear has the same bits in any batch", TestLinearBits)

// Each row of a batch of both kinds has the bits that it has among rows of its own kind, however
// many there are.
void TestLinearKinds(const KernelTable& table, Random& random) {
  for (const LinearCase& c : {LinearCase{513, 144, 1544}, LinearCase{260, 576, 640, true, true}}) {
    INFO(Name(c));
    const Operands o(c, table.activation_type, random);
    const auto run = [&](int32_t first, int32_t rows, int32_t decode_rows) {
      return o.Run(table, table.weight_layout, first, rows, 2, false, decode_rows);
    };
    const auto decode = run(0, c.rows, c.rows), prompt = run(0, c.rows, 0);
    const auto rows_of = [&](const Guarded<float>& y, int32_t first, int32_t rows) {
      return y.span().subspan(static_cast<size_t>(first) * c.n, static_cast<size_t>(rows) * c.n);
    };
    for (int32_t rows : {1, 8, 9, 17, 33, 64, 65, 128, 129, 200}) {
      for (int32_t decode_rows : {0, 1, rows / 2, rows}) {
        const int32_t first = c.rows - rows;
        INFO("the last " << rows << " rows, " << decode_rows << " of them decode rows");
        const auto some = run(first, rows, decode_rows);
        CHECK(BitDifference(rows_of(some, 0, decode_rows), rows_of(decode, first, decode_rows),
                            c.n) == "");
        CHECK(BitDifference(rows_of(some, decode_rows, rows - decode_rows),
                            rows_of(prompt, first + decode_rows, rows - decode_rows), c.n) == "");
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("decode and prompt rows of linear keep their bits in one batch",
                          TestLinearKinds)

void TestLinearIsolation(const KernelTable& table, Random& random) {
  const LinearCase c = {37, 40, 70};
  Operands o(c, table.activation_type, random);
  const auto before = o.Run(table, table.weight_layout, 0, c.rows, 2);
  for (int32_t i = 0; i < c.k; ++i) {
    o.x_float[20 * c.k + i] = std::numeric_limits<float>::quiet_NaN();
    o.x_bf16[20 * c.k + i] = 0x7FC0;
  }
  const auto after = o.Run(table, table.weight_layout, 0, c.rows, 2);
  for (int32_t r = 0; r < c.rows; ++r) {
    INFO("row " << r);
    for (int32_t j = 0; j < c.n; ++j) {
      const float v = after[r * c.n + j];
      const bool as_expected = r == 20 ? std::isnan(v) : v == before[r * c.n + j];
      REQUIRE(as_expected);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a row of NaN stays alone in linear", TestLinearIsolation)

TEST_CASE("the reference reads rows and panels alike", "[kernels]") {
  Random random(TestSeed());
  const LinearCase c = {5, 37, 45, true, false};
  const Operands o(c, DType::kFloat32, random);
  const auto rows = o.Run(Reference(), WeightLayout::kRowMajor, 0, c.rows, 2);
  const auto panels = o.Run(Reference(), WeightLayout::kPanel16, 0, c.rows, 2);
  CHECK(BitDifference(panels.span(), rows.span(), c.n) == "");
}

}  // namespace
}  // namespace sluice::kernels
