#include "tests/kernels/unit_list_support.h"

namespace sluice::kernels {
namespace {

struct Result {
  Guarded<float> o, lse;
};

struct Part {
  int64_t first = 0;
  int64_t rows = 0;
  int32_t kv_head_begin = 0;
  int32_t kv_head_end = 0;
};

template <typename Fixture>
Part Everything(const SparseCase& c, const Fixture& fixture) {
  return {0, fixture.rows(), 0, c.kv_heads};
}

struct Tolerance {
  double o;
  double lse;
};

// As in attention_test.cc: a GPU's tensor cores take queries and weights as sums of two bf16, which
// keep 16 bits of each.
Tolerance ToleranceOf(const KernelTable& path, const SparseCase& c) {
  const bool tensor_cores = std::string_view(path.name) == "cuda" &&
                            c.cache_type == DType::kBFloat16 &&
                            (c.head_dim == 64 || c.head_dim == 128) && c.heads / c.kv_heads <= 16;
  return tensor_cores ? Tolerance{2e-5, 1e-5} : Tolerance{3e-6, 1e-6};
}

// Results start as NaN; results that are not computed stay so.
template <typename Fixture>
Result Run(const KernelTable& path, const SparseCase& c, Fixture& fixture, const Part& part,
           int workers, bool threads = false) {
  Result result{Guarded<float>(part.rows * fixture.width()), Guarded<float>(part.rows * c.heads)};
  SparseAttentionParams p =
      fixture.Params(part.first, part.rows, result.o.data(), result.lse.data());
  p.kv_head_begin = part.kv_head_begin;
  p.kv_head_end = part.kv_head_end;
  threads ? RunThreads(path.sparse_attention, p, workers)
          : RunWorkers(path.sparse_attention, p, workers);
  CHECK(result.o.Damage() == "");
  CHECK(result.lse.Damage() == "");
  return result;
}

void CheckSame(const Result& got, const Result& want, const SparseCase& c) {
  CHECK(BitDifference(got.o.span(), want.o.span(), int64_t{c.heads} * c.head_dim) == "");
  CHECK(BitDifference(got.lse.span(), want.lse.span(), c.heads) == "");
}

void TestReference(const KernelTable& path, Random& random) {
  ForEachSparseCase(SparseCases(), random, [&](const SparseCase& c, auto& fixture) {
    const Part all = Everything(c, fixture);
    const Tolerance tolerance = ToleranceOf(path, c);
    const Result want = Run(*FindKernelTable("reference"), c, fixture, all, 1);
    const Result got = Run(path, c, fixture, all, 2);
    CHECK(Difference(got.o.span(), want.o.span(), tolerance.o, fixture.width()) == "");
    CHECK(Difference(got.lse.span(), want.lse.span(), tolerance.lse, c.heads) == "");
  });
}
SLUICE_TEST_ON_EVERY_PATH("sparse attention agrees with the reference", TestReference)

void TestSharing(const KernelTable& path, Random& random) {
  ForEachSparseCase(SparseCases(), random, [&](const SparseCase& c, auto& fixture) {
    const Part all = Everything(c, fixture);
    const Result want = Run(path, c, fixture, all, 1);
    for (int workers : {2, 3, 16}) {
      INFO(workers << " workers");
      CheckSame(Run(path, c, fixture, all, workers, workers == 3), want, c);
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH("sparse attention has the same bits with any workers", TestSharing)

void TestAlone(const KernelTable& path, Random& random) {
  ForEachSparseCase(SparseCases(), random, [&](const SparseCase& c, auto& fixture) {
    const Result all = Run(path, c, fixture, Everything(c, fixture), 1);
    const int64_t group = c.heads / c.kv_heads;
    for (int64_t r = 0; r < fixture.rows(); ++r) {
      for (int32_t h = 0; h < c.kv_heads; ++h) {
        INFO("row " << r << ", KV head " << h);
        const Result one = Run(path, c, fixture, {r, 1, h, h + 1}, 1);
        for (int64_t head = 0; head < c.heads; ++head) {
          const bool computed = head / group == h;
          const int64_t at = r * c.heads + head;
          const float* o = one.o.data() + head * c.head_dim;
          if (!computed) {
            REQUIRE(std::isnan(one.lse[head]));
            REQUIRE(std::all_of(o, o + c.head_dim, [](float v) { return std::isnan(v); }));
            continue;
          }
          REQUIRE(std::memcmp(&one.lse[head], &all.lse[at], sizeof(float)) == 0);
          REQUIRE(std::memcmp(o, all.o.data() + at * c.head_dim,
                              static_cast<size_t>(c.head_dim) * sizeof(float)) == 0);
        }
      }
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH(
    "a row and KV head of sparse attention has the same bits alone, and leaves the others as they "
    "are",
    TestAlone)

void TestEmpty(const KernelTable& path, Random& random) {
  int empty = 0, padded = 0;
  ForEachSparseCase(SparseCases(), random, [&](const SparseCase& c, auto& fixture) {
    const Result all = Run(path, c, fixture, Everything(c, fixture), 2);
    for (int64_t r = 0; r < fixture.rows(); ++r) {
      const SparseRow& row = c.rows[static_cast<size_t>(r)];
      for (int64_t i = 0; i < c.heads; ++i) {
        const bool none = row.slot < 0 || row.units == 0;
        REQUIRE(std::isinf(all.lse[r * c.heads + i]) == none);
      }
      if (row.slot >= 0 && row.units != 0) continue;
      ++(row.slot < 0 ? padded : empty);
      for (int64_t i = 0; i < fixture.width(); ++i) REQUIRE(all.o[r * fixture.width() + i] == 0);
    }
  });
  CHECK(empty > 10);
  CHECK(padded > 10);
}
SLUICE_TEST_ON_EVERY_PATH("an empty list and a padded row give zeros and -inf", TestEmpty)

// Every row of a case has all its units at their own places.
std::vector<SparseCase> WholeCases() {
  std::vector<SparseCase> cases;
  for (SparseCase c : SparseCases()) {
    if (c.places != SparsePlaces::kOwn) continue;
    for (SparseRow& row : c.rows) row.units = -1;
    cases.push_back(c);
  }
  return cases;
}

void TestDense(const KernelTable& path, Random& random) {
  ForEachSparseCase(WholeCases(), random, [&](const SparseCase& c, auto& fixture) {
    const Result sparse = Run(path, c, fixture, Everything(c, fixture), 1);
    Result dense{Guarded<float>(sparse.o.size()), Guarded<float>(sparse.lse.size())};
    const SparseAttentionParams p = fixture.Params(0, fixture.rows(), nullptr, nullptr);
    const AttentionParams of_dense = {
        p.q,     p.q_stride, p.slots, p.positions, p.cache, dense.o.data(), dense.lse.data(),
        nullptr, 0,          p.rows,  p.rows,      p.heads, p.scale,        DType::kFloat32};
    RunWorkers(path.attention, of_dense, 1);
    const Tolerance tolerance = ToleranceOf(path, c);
    CHECK(Difference(sparse.o.span(), dense.o.span(), tolerance.o, fixture.width()) == "");
    CHECK(Difference(sparse.lse.span(), dense.lse.span(), tolerance.lse, c.heads) == "");
  });
}
SLUICE_TEST_ON_EVERY_PATH("a list of everything is attention", TestDense)

// Leaves of every list, which `units`, `places` and `counts` have, the entries whose index is
// `rest` modulo 2.
template <typename Fixture>
void Halve(const std::vector<int32_t>& units, const std::vector<int32_t>& places,
           const std::vector<int32_t>& counts, int64_t rest, Fixture& fixture) {
  for (size_t list = 0; list < counts.size(); ++list) {
    const int64_t begin = static_cast<int64_t>(list) * fixture.capacity();
    int64_t kept = begin;
    for (int64_t i = begin + rest; i < begin + counts[list]; i += 2, ++kept) {
      fixture.units()[kept] = units[static_cast<size_t>(i)];
      fixture.places()[kept] = places[static_cast<size_t>(i)];
    }
    fixture.counts()[static_cast<int64_t>(list)] = static_cast<int32_t>(kept - begin);
  }
}

void TestMerge(const KernelTable& path, Random& random) {
  std::vector<SparseCase> cases;
  for (const SparseCase& c : SparseCases()) {
    if (c.places != SparsePlaces::kUnnumbered) cases.push_back(c);
  }
  ForEachSparseCase(cases, random, [&](const SparseCase& c, auto& fixture) {
    const Result whole = Run(path, c, fixture, Everything(c, fixture), 1);
    const std::vector<int32_t> units(fixture.units().begin(), fixture.units().end());
    const std::vector<int32_t> places(fixture.places().begin(), fixture.places().end());
    const std::vector<int32_t> counts(fixture.counts().begin(), fixture.counts().end());
    Guarded<float> o(2 * whole.o.size()), lse(2 * whole.lse.size());
    for (int64_t half = 0; half < 2; ++half) {
      Halve(units, places, counts, half, fixture);
      const Result part = Run(path, c, fixture, Everything(c, fixture), 1);
      std::copy_n(part.o.data(), part.o.size(), o.data() + half * part.o.size());
      std::copy_n(part.lse.data(), part.lse.size(), lse.data() + half * part.lse.size());
    }
    Result merged{Guarded<float>(whole.o.size()), Guarded<float>(whole.lse.size())};
    const MergeParams p = {o.data(),          lse.data(), merged.o.data(),
                           merged.lse.data(), 2,          static_cast<int32_t>(fixture.rows()),
                           c.heads,           c.head_dim, DType::kFloat32};
    RunWorkers(path.merge, p, 1);
    const Tolerance tolerance = ToleranceOf(path, c);
    CHECK(Difference(merged.o.span(), whole.o.span(), tolerance.o, fixture.width()) == "");
    CHECK(Difference(merged.lse.span(), whole.lse.span(), tolerance.lse, c.heads) == "");
  });
}
SLUICE_TEST_ON_EVERY_PATH("two disjoint lists merge into the whole", TestMerge)

}  // namespace
}  // namespace sluice::kernels
