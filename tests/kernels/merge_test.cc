#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kHeads = 3, kDim = 64;

struct Parts {
  Parts(int32_t part_count, int32_t row_count, Random& random)
      : parts(part_count),
        rows(row_count),
        o(NormalBuffer<float>(int64_t{parts} * rows * kHeads * kDim, random)),
        lse(NormalBuffer<float>(int64_t{parts} * rows * kHeads, random, 3.0f)) {}

  // Says that head h of row r of a part is empty, so that its o must not be read.
  void Empty(int64_t part, int64_t item) {
    const int64_t at = part * rows * kHeads + item;
    lse[at] = kNegativeInfinity;
    std::fill_n(o.data() + at * kDim, kDim, std::numeric_limits<float>::quiet_NaN());
  }

  int32_t parts, rows;
  Guarded<float> o, lse;
};

struct Merged {
  Guarded<float> out, lse;
};

Merged Run(const KernelTable& table, const Parts& in, int workers) {
  Merged m{Guarded<float>(int64_t{in.rows} * kHeads * kDim), Guarded<float>(in.rows * kHeads)};
  const MergeParams p = {in.o.data(), in.lse.data(), m.out.data(), m.lse.data(),   in.parts,
                         in.rows,     kHeads,        kDim,         DType::kFloat32};
  RunWorkers(table.merge, p, workers);
  CHECK(m.out.Damage() == "");
  CHECK(m.lse.Damage() == "");
  return m;
}

void CheckAgainstReference(const KernelTable& table, const Parts& in) {
  const Merged want = Run(*FindKernelTable("reference"), in, 1);
  const Merged got = Run(table, in, 2);
  CHECK(Difference(got.out.span(), want.out.span(), 1e-6, kDim) == "");
  CHECK(Difference(got.lse.span(), want.lse.span(), 1e-6, kHeads) == "");
}

void TestMerge(const KernelTable& table, Random& random) {
  for (int32_t rows : {0, 1, 5}) {
    for (int32_t parts : {1, 2, 7}) {
      INFO(rows << " rows, " << parts << " parts");
      Parts in(parts, rows, random);
      for (int64_t i = 0; i < in.rows * kHeads; i += 2) in.Empty(i % parts, i);
      CheckAgainstReference(table, in);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("merge agrees with the reference, empty parts included", TestMerge)

void TestMergeEdges(const KernelTable& table, Random& random) {
  Parts empty(3, 1, random);
  for (int64_t part = 0; part < 3; ++part) {
    for (int64_t i = 0; i < kHeads; ++i) empty.Empty(part, i);
  }
  const Merged none = Run(table, empty, 1);
  for (float v : none.out.span()) REQUIRE(v == 0.0f);
  for (float v : none.lse.span()) REQUIRE(v == kNegativeInfinity);

  Parts huge(3, 2, random);
  for (int64_t i = 0; i < huge.lse.size(); ++i) huge.lse[i] = 3e4f + static_cast<float>(i % 5);
  CheckAgainstReference(table, huge);
  Parts tiny(3, 2, random);
  for (int64_t i = 0; i < tiny.lse.size(); ++i) tiny.lse[i] = -3e4f - static_cast<float>(i % 5);
  CheckAgainstReference(table, tiny);
  Parts apart(2, 2, random);
  for (int64_t i = 0; i < apart.lse.size(); ++i) apart.lse[i] = i % 2 == 0 ? 500.0f : -500.0f;
  CheckAgainstReference(table, apart);

  Parts zero(2, 1, random);
  for (int64_t i = 0; i < zero.lse.size(); ++i) zero.lse[i] = 0.0f;
  CheckAgainstReference(table, zero);
  const Merged half = Run(table, zero, 1);
  CHECK(half.lse[0] == Approx(std::log(2.0)));
  CHECK(half.out[0] == Approx((zero.o[0] + zero.o[kHeads * kDim]) / 2));

  Parts one(1, 2, random);
  const Merged same = Run(table, one, 1);
  CHECK(BitDifference(same.out.span(), one.o.span(), kDim) == "");
  CHECK(BitDifference(same.lse.span(), one.lse.span(), kHeads) == "");
}
SLUICE_TEST_ON_EVERY_PATH("merge of all-empty, huge, tiny, far apart, zero and single parts",
                          TestMergeEdges)

}  // namespace
}  // namespace sluice::kernels
