// LatentAppend and MlaQuery, which fill the latent cache and make the queries that read it; and the
// conversions of the packed form.
#include <set>

#include "kernels/kernel_cases.h"
#include "tests/kernels/latent_support.h"

namespace sluice::kernels {
namespace {

TEST_CASE("e4m3 rounds to the nearest value, ties to even", "[kernels]") {
  std::vector<float> values;
  for (int code = 0; code < 0x7F; ++code) {
    values.push_back(E4M3ToFloat(static_cast<uint8_t>(code)));
    REQUIRE(FloatToE4M3(values.back()) == code);
    REQUIRE(FloatToE4M3(-values.back()) == (code | 0x80));
  }
  CHECK(values[1] == 0x1p-9f);
  CHECK(values[8] == 0x1p-6f);
  CHECK(values.back() == 448.0f);
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    const float middle = (values[i] + values[i + 1]) / 2;
    const auto even = static_cast<uint8_t>(i % 2 == 0 ? i : i + 1);
    REQUIRE(FloatToE4M3(middle) == even);
    REQUIRE(FloatToE4M3(std::nextafter(middle, 0.0f)) == i);
    REQUIRE(FloatToE4M3(std::nextafter(middle, 1000.0f)) == i + 1);
  }
  CHECK(FloatToE4M3(1e9f) == 0x7E);
  CHECK(FloatToE4M3(-std::numeric_limits<float>::infinity()) == 0xFE);
  CHECK(std::isnan(E4M3ToFloat(FloatToE4M3(std::nanf("")))));
  const float zeros[4] = {0, -0.0f, 0, 0};
  uint8_t out[4];
  CHECK(QuantizeE4M3(zeros, 4, out) == 1.0f);
  const float some[4] = {1, -7, 3.5f, 0};
  CHECK(QuantizeE4M3(some, 4, out) == 7.0f / 448);
  CHECK(out[1] == 0xFE);
  CHECK(out[2] == FloatToE4M3(224));
}

struct AppendCase {
  const char* name;
  int32_t rank;
  int32_t rope;
  int32_t block_tokens;
  DType type;
  bool places;   // the cache is numbered by place
  bool cache;    // false: base is null
  bool written;  // entries are also written to `written`
};

const AppendCase kAppendCases[] = {
    {"packed", 512, 64, 16, DType::kFloat8E4M3, false, true, true},
    {"packed by place", 512, 64, 64, DType::kFloat8E4M3, true, true, false},
    {"packed, home alone", 512, 64, 32, DType::kFloat8E4M3, true, false, true},
    {"bf16", 512, 64, 32, DType::kBFloat16, false, true, true},
    {"bf16 by place", 512, 64, 16, DType::kBFloat16, true, true, true},
    {"float32", 512, 64, 32, DType::kFloat32, false, true, true},
    {"float32, small, by place", 96, 16, 16, DType::kFloat32, true, true, true},
    {"bf16, small", 64, 32, 16, DType::kBFloat16, false, true, false},
};

constexpr int32_t kSlots = 6, kTokens = 150;

// Rows of decoding and of prompts, with padded rows between.
std::vector<AttentionRow> AppendRows() {
  std::vector<AttentionRow> rows = {{-1, 3}, {2, 0}, {0, 149}, {-1, 0}, {4, 15}, {3, 16}};
  AppendRun(rows, 1, 20, 70);
  rows.push_back({5, 100});
  rows.push_back({-1, 9});
  return rows;
}

class AppendFixture {
 public:
  AppendFixture(const AppendCase& c, Random& random)
      : case_(c),
        rows_(static_cast<int64_t>(AppendRows().size())),
        kv_stride_(c.rank + c.rope + 5),
        slots_(rows_),
        positions_(rows_),
        kv_(NormalBuffer<float>(rows_ * kv_stride_, random, 3.0f)),
        norm_(NormalBuffer<float>(c.rank, random)),
        cos_sin_(NormalBuffer<float>(rows_ * c.rope, random)),
        cache(kSlots, kTokens, c.block_tokens, c.rank, c.rope, c.type, random),
        place_of_(kSlots, kTokens, 7, 1, 1, random) {
    for (int64_t r = 0; r < rows_; ++r) {
      const AttentionRow row = AppendRows()[static_cast<size_t>(r)];
      slots_[r] = row.slot;
      positions_[r] = row.position;
    }
    // A row whose values are all zero, and one of very large values.
    std::fill_n(kv_.data() + 8 * kv_stride_, c.rank + c.rope, 0.0f);
    for (int64_t i = 0; i < c.rank; ++i) kv_[9 * kv_stride_ + i] *= 1e15f;
    std::vector<int32_t> order(kTokens);
    std::iota(order.begin(), order.end(), 0);
    for (int32_t s = 0; s < kSlots; ++s) {
      std::shuffle(order.begin(), order.end(), random);
      for (int32_t t = 0; t < kTokens; ++t) {
        const int32_t place = order[static_cast<size_t>(t)];
        *place_of_.Row(s, t, 0) = place % 4 == 0 ? -1 : place;
      }
    }
  }

  struct Output {
    Guarded<uint8_t> cache, written;
  };

  Output Run(const KernelTable& table, int64_t first, int64_t rows, int workers) {
    Output out = {CopyOf(cache.data),
                  Guarded<uint8_t>(case_.written ? rows * cache.entry_bytes : 0)};
    PagedLatents view = cache.view;
    view.base = case_.cache ? out.cache.data() : nullptr;
    const LatentAppendParams p = {
        .kv = kv_.data() + first * kv_stride_,
        .kv_stride = kv_stride_,
        .norm = norm_.data(),
        .cos_sin = cos_sin_.data() + first * case_.rope,
        .slots = slots_.data() + first,
        .positions = positions_.data() + first,
        .cache = view,
        .place_of = case_.places ? place_of_.view : PagedRows{},
        .written = case_.written ? out.written.data() : nullptr,
        .rows = static_cast<int32_t>(rows),
        .epsilon = 1e-6f,
        .decode_rows = static_cast<int32_t>(rows / 2),
    };
    RunWorkers(table.latent_append, p, workers);
    CHECK(out.cache.Damage() + out.written.Damage() == "");
    return out;
  }

  // Entries of the arena that a run of all rows has written; the others' bytes must be as before.
  std::vector<int64_t> Written() {
    std::vector<int64_t> entries;
    for (int64_t r = 0; r < rows_ && case_.cache; ++r) {
      if (slots_[r] < 0) continue;
      int64_t entry = positions_[r];
      if (case_.places) entry = *place_of_.Row(slots_[r], entry, 0);
      if (entry >= 0)
        entries.push_back(EntryOffset(cache.view, slots_[r], entry) / cache.entry_bytes);
    }
    return entries;
  }
  bool padded(int64_t r) const { return slots_[r] < 0; }
  int64_t rows() const { return rows_; }

 private:
  const AppendCase case_;
  const int64_t rows_, kv_stride_;
  Guarded<int32_t> slots_, positions_;
  Guarded<float> kv_, norm_, cos_sin_;

 public:
  TestLatents cache;

 private:
  TestRows<int32_t> place_of_;
};

void TestLatentAppend(const KernelTable& table, Random& random) {
  for (const AppendCase& c : kAppendCases) {
    INFO(c.name);
    AppendFixture f(c, random);
    const auto got = f.Run(table, 0, f.rows(), 3);
    const auto want = f.Run(Reference(), 0, f.rows(), 1);
    const std::vector<int64_t> entries = f.Written();
    CHECK(EntryDifference(got.cache.data(), want.cache.data(), f.cache.view, entries) == "");
    const std::set<int64_t> written(entries.begin(), entries.end());
    for (int64_t e = 0; e < got.cache.size() / f.cache.entry_bytes; ++e) {
      if (written.contains(e)) continue;
      const auto at = static_cast<size_t>(e * f.cache.entry_bytes);
      const auto bytes = static_cast<size_t>(f.cache.entry_bytes);
      INFO("entry " << e << " of the arena, which no row writes");
      REQUIRE(BitDifference(got.cache.span().subspan(at, bytes),
                            std::span<const uint8_t>(f.cache.data.span()).subspan(at, bytes),
                            f.cache.entry_bytes) == "");
    }
    if (!c.written) continue;
    std::vector<int64_t> rows;
    for (int64_t r = 0; r < f.rows(); ++r) {
      if (!f.padded(r)) rows.push_back(r);
    }
    CHECK(EntryDifference(got.written.data(), want.written.data(), f.cache.view, rows) == "");
    for (int64_t r = 0; r < f.rows(); ++r) {
      for (int64_t b = 0; f.padded(r) && b < f.cache.entry_bytes; ++b) {
        REQUIRE(got.written[r * f.cache.entry_bytes + b] == 0xFF);
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("latent_append agrees with the reference", TestLatentAppend)

void TestLatentAppendBits(const KernelTable& table, Random& random) {
  for (const AppendCase& c : kAppendCases) {
    if (!c.written) continue;
    INFO(c.name);
    AppendFixture f(c, random);
    const auto all = f.Run(table, 0, f.rows(), 1);
    const auto shared = f.Run(table, 0, f.rows(), 7);
    CHECK(BitDifference(shared.cache.span(), all.cache.span(), f.cache.entry_bytes) == "");
    for (int64_t r = 0; r < f.rows(); r += 3) {
      INFO("row " << r << " alone");
      const auto alone = f.Run(table, r, 1, 2);
      const auto bytes = static_cast<size_t>(f.cache.entry_bytes);
      CHECK(BitDifference(alone.written.span(),
                          all.written.span().subspan(static_cast<size_t>(r) * bytes, bytes),
                          f.cache.entry_bytes) == "");
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("an entry has the same bits in any batch", TestLatentAppendBits)

struct QueryCase {
  int32_t rows;
  int32_t heads;
  int32_t nope;
  int32_t rope;
  int32_t rank;
};

void TestMlaQuery(const KernelTable& table, Random& random) {
  for (const QueryCase& c : {QueryCase{0, 4, 128, 64, 512}, QueryCase{1, 128, 128, 64, 512},
                             QueryCase{19, 4, 32, 64, 512}, QueryCase{5, 1, 16, 8, 96}}) {
    INFO(c.rows << " rows of " << c.heads << " heads");
    const auto q = NormalBuffer<float>(int64_t{c.rows} * c.heads * (c.nope + c.rope), random);
    const auto cos_sin = NormalBuffer<float>(int64_t{c.rows} * c.rope, random);
    const DType type = table.activation_type;
    struct Output {
      Guarded<uint8_t> nope, out;
    };
    const auto run = [&](const KernelTable& path, int64_t first, int32_t rows, int workers) {
      Output o = {Guarded<uint8_t>(int64_t{rows} * c.heads * c.nope * SizeOf(type)),
                  Guarded<uint8_t>(int64_t{rows} * c.heads * (c.rank + c.rope) * SizeOf(type))};
      const MlaQueryParams p = {.q = q.data() + first * c.heads * (c.nope + c.rope),
                                .cos_sin = cos_sin.data() + first * c.rope,
                                .nope = o.nope.data(),
                                .out = o.out.data(),
                                .type = type,
                                .rows = rows,
                                .heads = c.heads,
                                .nope_dim = c.nope,
                                .rope = c.rope,
                                .rank = c.rank};
      RunWorkers(path.mla_query, p, workers);
      CHECK(o.nope.Damage() + o.out.Damage() == "");
      return o;
    };
    const auto floats = [&](const Guarded<uint8_t>& bytes) {
      return FloatsOf(bytes.data(), type, 0, bytes.size() / SizeOf(type));
    };
    const Output got = run(table, 0, c.rows, 3), want = run(Reference(), 0, c.rows, 1);
    CHECK(BitDifference(got.nope.span(), want.nope.span(), c.nope * SizeOf(type)) == "");
    // The latent parts, which another operator writes, are left as they are: NaN.
    const double relative = type == DType::kFloat32 ? 1e-6 : 3e-4;
    CHECK(Difference<float>(floats(got.out), floats(want.out), relative, c.rank + c.rope) == "");
    if (c.rows < 2) continue;
    const int64_t bytes = int64_t{c.heads} * (c.rank + c.rope) * SizeOf(type);
    const Output alone = run(table, c.rows - 1, 1, 1);
    CHECK(BitDifference(alone.out.span(), got.out.span().last(static_cast<size_t>(bytes)), bytes) ==
          "");
  }
}
SLUICE_TEST_ON_EVERY_PATH("mla_query agrees with the reference", TestMlaQuery)

}  // namespace
}  // namespace sluice::kernels
