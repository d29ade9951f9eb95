// HeadLinear, and weights of any layout in the reference.
#include "tests/kernels/latent_support.h"

namespace sluice::kernels {
namespace {

struct HeadCase {
  int32_t rows;
  int32_t heads;
  int32_t n;
  int32_t k;
  int64_t x_gap;  // elements between heads of x, beyond k
  int64_t y_gap;  // elements between heads of y, beyond n
  bool float_out;
};

const HeadCase kCases[] = {
    {0, 4, 512, 128, 0, 64, false}, {1, 4, 512, 32, 0, 64, false}, {1, 128, 512, 128, 0, 64, false},
    {1, 16, 128, 512, 0, 0, false}, {9, 4, 128, 512, 64, 0, true}, {33, 4, 512, 128, 0, 64, false},
    {70, 3, 48, 40, 8, 16, false},  {200, 2, 16, 512, 0, 0, true}, {16, 1, 64, 96, 0, 0, false},
};

class HeadFixture {
 public:
  HeadFixture(const HeadCase& c, DType type, Random& random)
      : shape(c),
        x_type(type),
        y_type(c.float_out ? DType::kFloat32 : type),
        x_head(c.k + c.x_gap),
        y_head(c.n + c.y_gap),
        weights(c.heads * c.n, c.k, random),
        x(RandomElements(int64_t{c.rows} * c.heads * x_head, type, random)) {}

  // Runs rows [first, first + rows).
  Guarded<uint8_t> Run(const KernelTable& table, const WeightMatrix& w, int64_t first, int32_t rows,
                       int workers, int32_t decode_rows, bool threads = false) const {
    Guarded<uint8_t> y(rows * shape.heads * y_head * SizeOf(y_type));
    const HeadLinearParams p = {
        .x = x.data() + first * shape.heads * x_head * SizeOf(x_type),
        .x_stride = shape.heads * x_head,
        .x_head_stride = x_head,
        .w = w,
        .y = y.data(),
        .y_stride = shape.heads * y_head,
        .y_head_stride = y_head,
        .x_type = x_type,
        .y_type = y_type,
        .rows = rows,
        .heads = shape.heads,
        .n = shape.n,
        .decode_rows = decode_rows,
    };
    threads ? RunThreads(table.head_linear, p, workers) : RunWorkers(table.head_linear, p, workers);
    CHECK(y.Damage() == "");
    return y;
  }

  // Elements between the heads of y stay as they were.
  std::vector<float> Floats(const Guarded<uint8_t>& y) const {
    return FloatsOf(y.data(), y_type, 0, y.size() / SizeOf(y_type));
  }
  int64_t row_bytes() const { return shape.heads * y_head * SizeOf(y_type); }

  const HeadCase shape;
  const DType x_type, y_type;
  const int64_t x_head, y_head;
  TestWeights weights;
  Guarded<uint8_t> x;
};

void TestHeadLinear(const KernelTable& table, Random& random) {
  for (const HeadCase& c : kCases) {
    INFO(c.rows << " rows, " << c.heads << " heads of " << c.n << " x " << c.k);
    const HeadFixture f(c, table.activation_type, random);
    for (WeightLayout layout : LayoutsOf(table)) {
      INFO("layout " << static_cast<int>(layout));
      const auto want = f.Run(Reference(), f.weights.Plain(layout), 0, c.rows, 1, c.rows);
      const bool exact = layout != WeightLayout::kFp8Blocks && f.y_type == DType::kFloat32;
      const double typical = 0.1 * std::sqrt(static_cast<double>(c.k));
      for (int32_t decode_rows : {c.rows, 0, c.rows / 3}) {
        const auto got = f.Run(table, f.weights.As(layout), 0, c.rows, 3, decode_rows);
        CHECK(Difference<float>(f.Floats(got), f.Floats(want), exact ? 3e-6 : 4e-3, f.y_head,
                                typical) == "");
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("head_linear agrees with the reference", TestHeadLinear)

void TestHeadLinearBits(const KernelTable& table, Random& random) {
  for (const HeadCase& c : kCases) {
    INFO(c.rows << " rows, " << c.heads << " heads of " << c.n << " x " << c.k);
    const HeadFixture f(c, table.activation_type, random);
    for (WeightLayout layout : LayoutsOf(table)) {
      const WeightMatrix w = f.weights.As(layout);
      const auto all = f.Run(table, w, 0, c.rows, 1, c.rows);
      for (int workers : {2, 7, 16}) {
        INFO(workers << " workers");
        const auto shared = f.Run(table, w, 0, c.rows, workers, c.rows, true);
        CHECK(BitDifference(shared.span(), all.span(), f.row_bytes()) == "");
      }
      for (int32_t rows : {1, 5, 17}) {
        for (int32_t first = 0; first + rows <= c.rows; first += 7 * rows) {
          INFO("rows " << first << " to " << first + rows << " alone");
          const auto some = f.Run(table, w, first, rows, 2, rows);
          const auto same = all.span().subspan(static_cast<size_t>(first * f.row_bytes()),
                                               static_cast<size_t>(rows * f.row_bytes()));
          CHECK(BitDifference(some.span(), same, f.row_bytes()) == "");
        }
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a row of head_linear has the same bits in any batch", TestHeadLinearBits)

TEST_CASE("the reference reads float32 and e4m3 weights", "[kernels]") {
  Random random(TestSeed());
  constexpr int32_t kN = 70, kK = 300, kRows = 3;
  const TestWeights w(kN, kK, random);
  const auto x = NormalBuffer<float>(kRows * kK, random);
  for (WeightLayout layout : {WeightLayout::kFloat32, WeightLayout::kFp8Blocks}) {
    Guarded<float> y(kRows * kN);
    const LinearParams p = {x.data(), w.As(layout), nullptr,         y.data(),
                            kRows,    kRows,        DType::kFloat32, false};
    RunWorkers(Reference().linear, p, 2);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t j = 0; j < kN; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < kK; ++i) {
          const double weight =
              layout == WeightLayout::kFloat32
                  ? double{w.values[j * kK + i]}
                  : double{w.scales[j / 32 * 3 + i / 128]} * E4M3ToFloat(w.fp8[j * kK + i]);
          sum += double{x[r * kK + i]} * weight;
        }
        REQUIRE(y[r * kN + j] == static_cast<float>(sum));
      }
    }
  }
}

}  // namespace
}  // namespace sluice::kernels
