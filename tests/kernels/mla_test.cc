// SparseMla against the reference over random latents and lists.
#include "kernels/latent_cases.h"
#include "tests/kernels/latent_support.h"

namespace sluice::kernels {
namespace {

// Random caches and lists of a case. Entries that no list names are NaN.
class MlaFixture {
 public:
  MlaFixture(const MlaCase& c, DType q_type, Random& random)
      : case_(c),
        rows_(static_cast<int64_t>(c.rows.size())),
        q_type_(q_type),
        out_type_(c.float_out ? DType::kFloat32 : q_type),
        width_(int64_t{c.heads} * (c.rank + c.rope)),
        out_width_(int64_t{c.heads} * c.rank),
        slots_(rows_),
        counts_(rows_),
        q_(RandomElements(rows_ * width_, q_type, random)) {
    int32_t slots = 1;
    for (const MlaRow& row : c.rows) {
      slots = std::max(slots, row.slot + 1);
      capacity_ = std::max(capacity_, int64_t{row.entries});
    }
    const int32_t entries = static_cast<int32_t>(capacity_) * 3 / 2 + 3;
    cache_ = std::make_unique<TestLatents>(slots, entries, c.block_tokens, c.rank, c.rope, c.type,
                                           random);
    lists_ = Guarded<int32_t>(rows_ * capacity_);
    std::vector<int32_t> numbers(static_cast<size_t>(entries));
    std::iota(numbers.begin(), numbers.end(), 0);
    for (int64_t r = 0; r < rows_; ++r) {
      const MlaRow& row = c.rows[static_cast<size_t>(r)];
      slots_[r] = row.slot;
      // Counts outside the list's room are cut to it.
      counts_[r] = row.entries;
      if (row.entries == 0 && r % 2 == 0) counts_[r] = -3;
      if (row.entries == capacity_) counts_[r] += 5;
      if (c.numbered) std::shuffle(numbers.begin(), numbers.end(), random);
      for (int32_t i = 0; i < row.entries; ++i) {
        const int32_t entry = numbers[static_cast<size_t>(i)];
        lists_[r * capacity_ + i] = entry;
        if (row.slot >= 0) cache_->FillEntry(cache_->Entry(row.slot, entry), random, 1.0f);
      }
    }
    MakeOther(random);
  }

  struct Output {
    std::vector<float> out;
    Guarded<uint8_t> bytes;
    Guarded<float> lse;
  };

  // Runs with scratch for `scratch_rows` rows.
  Output Run(const KernelTable& table, int64_t first, int64_t rows, int workers,
             int64_t scratch_rows, bool threads = false) {
    Output o = {{},
                Guarded<uint8_t>(rows * out_width_ * SizeOf(out_type_)),
                Guarded<float>(rows * case_.heads)};
    // The CUDA kernel for packed entries folds a row's pieces in scratch.
    if (IsCuda(table)) scratch_rows = std::max(int64_t{1}, scratch_rows);
    const int64_t pieces = (capacity_ + kMlaSplitEntries - 1) / kMlaSplitEntries;
    Guarded<float> scratch(scratch_rows * pieces * case_.heads * (case_.rank + 1));
    const SparseMlaParams p = Params(first, rows, &o, scratch);
    threads ? RunThreads(table.sparse_mla, p, workers) : RunWorkers(table.sparse_mla, p, workers);
    threads ? RunThreads(table.sparse_mla_merge, p, workers)
            : RunWorkers(table.sparse_mla_merge, p, workers);
    CHECK(o.bytes.Damage() + o.lse.Damage() + scratch.Damage() == "");
    o.out = FloatsOf(o.bytes.data(), out_type_, 0, rows * out_width_);
    return o;
  }

  // Runs all rows, each list in two: the entries before and from `cuts`, in one call or in two.
  Output RunTwo(const KernelTable& table, std::span<const int32_t> cuts, bool one_call,
                int64_t scratch_rows) {
    Output o = {{},
                Guarded<uint8_t>(rows_ * out_width_ * SizeOf(out_type_)),
                Guarded<float>(rows_ * case_.heads)};
    Guarded<float> other_o(rows_ * out_width_), other_lse(rows_ * case_.heads);
    const int64_t pieces = (capacity_ + kMlaSplitEntries - 1) / kMlaSplitEntries;
    Guarded<float> scratch(scratch_rows * pieces * case_.heads * (case_.rank + 1));
    Guarded<int32_t> counts(rows_), then_counts(rows_), then(rows_ * capacity_);
    for (int64_t r = 0; r < rows_; ++r) {
      const int32_t entries = case_.rows[static_cast<size_t>(r)].entries;
      counts[r] = cuts[static_cast<size_t>(r)];
      then_counts[r] = entries - counts[r];
      for (int32_t i = counts[r]; i < entries; ++i) {
        then[r * capacity_ + i - counts[r]] = lists_[r * capacity_ + i];
      }
    }
    SparseMlaParams p = Params(0, rows_, &o, scratch);
    p.counts = counts.data();
    p.then_entries = then.data();
    p.then_counts = then_counts.data();
    p.other_o = other_o.data();
    p.other_lse = other_lse.data();
    const auto run = [&](const SparseMlaParams& part) {
      RunWorkers(table.sparse_mla, part, 1);
      RunWorkers(table.sparse_mla_merge, part, 1);
    };
    if (one_call) {
      run(p);
    } else {
      run(FirstOfTwo(p));
      run(SecondOfTwo(p));
    }
    CHECK(o.bytes.Damage() + o.lse.Damage() + scratch.Damage() + other_o.Damage() == "");
    o.out = FloatsOf(o.bytes.data(), out_type_, 0, rows_ * out_width_);
    return o;
  }

  std::string BitsDiffer(const Output& some, int64_t first, const Output& all) const {
    const auto bytes = static_cast<size_t>(out_width_ * SizeOf(out_type_));
    const auto heads = static_cast<size_t>(case_.heads), at = static_cast<size_t>(first);
    const auto same = all.bytes.span().subspan(at * bytes, some.bytes.span().size());
    const auto same_lse = all.lse.span().subspan(at * heads, some.lse.span().size());
    return BitDifference(some.bytes.span(), same, static_cast<int64_t>(bytes)) +
           BitDifference(some.lse.span(), same_lse, case_.heads);
  }

  int64_t rows() const { return rows_; }
  int64_t out_width() const { return out_width_; }

 private:
  SparseMlaParams Params(int64_t first, int64_t rows, Output* o, Guarded<float>& scratch) {
    const bool other = case_.other != MlaOther::kNone;
    return {
        .q = q_.data() + first * width_ * SizeOf(q_type_),
        .slots = slots_.data() + first,
        .cache = cache_->view,
        .entries = case_.numbered ? lists_.data() + first * capacity_ : nullptr,
        .counts = counts_.data() + first,
        .then_entries = nullptr,
        .then_counts = nullptr,
        .capacity = capacity_,
        .other_o = other ? other_o_.data() + first * out_width_ : nullptr,
        .other_lse = other ? other_lse_.data() + first * case_.heads : nullptr,
        .out = o->bytes.data(),
        .lse = o->lse.data(),
        .scratch = scratch.data(),
        .scratch_bytes = scratch.size() * 4,
        .rows = static_cast<int32_t>(rows),
        .decode_rows = static_cast<int32_t>(rows),
        .heads = case_.heads,
        .spare_processors = 0,
        .scale = 0.06f,
        .q_type = q_type_,
        .out_type = out_type_,
    };
  }

  void MakeOther(Random& random) {
    if (case_.other == MlaOther::kNone) return;
    other_o_ = NormalBuffer<float>(rows_ * out_width_, random);
    other_lse_ = NormalBuffer<float>(rows_ * case_.heads, random, 2.0f);
    for (int64_t r = 0; r < rows_; ++r) {
      if (case_.other == MlaOther::kAll || r % 3 != 0) continue;
      std::fill_n(other_lse_.data() + r * case_.heads, case_.heads, kNegativeInfinity);
      std::fill_n(other_o_.data() + r * out_width_, out_width_,
                  std::numeric_limits<float>::quiet_NaN());
    }
  }

  const MlaCase& case_;
  const int64_t rows_;
  const DType q_type_, out_type_;
  const int64_t width_, out_width_;
  int64_t capacity_ = 1;
  Guarded<int32_t> slots_, counts_, lists_{0};
  Guarded<uint8_t> q_;
  Guarded<float> other_o_{0}, other_lse_{0};
  std::unique_ptr<TestLatents> cache_;
};

// Paths with bf16 activations round weights of attention, and entries times their scales, to bf16.
double Tolerance(const KernelTable& table, const MlaCase& c) {
  if (table.activation_type == DType::kFloat32) return 5e-6;
  return c.type == DType::kFloat8E4M3 ? 7e-3 : 4e-3;
}

void TestSparseMla(const KernelTable& table, Random& random) {
  for (const MlaCase& c : MlaCases()) {
    INFO(c.name);
    MlaFixture f(c, table.activation_type, random);
    const auto want = f.Run(Reference(), 0, f.rows(), 1, 0);
    for (int64_t scratch_rows : {f.rows(), int64_t{0}, f.rows() / 3}) {
      INFO("scratch for " << scratch_rows << " rows");
      const auto got = f.Run(table, 0, f.rows(), 3, scratch_rows);
      const double relative = Tolerance(table, c);
      CHECK(Difference<float>(got.out, want.out, relative, f.out_width()) == "");
      CHECK(Difference(got.lse.span(), want.lse.span(), relative, c.heads, 1.0) == "");
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("sparse_mla agrees with the reference", TestSparseMla)

void TestSparseMlaBits(const KernelTable& table, Random& random) {
  for (const MlaCase& c : MlaCases()) {
    INFO(c.name);
    MlaFixture f(c, table.activation_type, random);
    const auto all = f.Run(table, 0, f.rows(), 1, f.rows());
    for (int workers : {2, 5, 16}) {
      INFO(workers << " workers");
      for (int64_t scratch_rows : {f.rows(), int64_t{2}}) {
        const auto shared = f.Run(table, 0, f.rows(), workers, scratch_rows, true);
        CHECK(f.BitsDiffer(shared, 0, all) == "");
      }
    }
    for (int64_t r = 0; r < f.rows(); ++r) {
      INFO("row " << r << " alone");
      const auto alone = f.Run(table, r, 1, 3, r % 2);
      CHECK(f.BitsDiffer(alone, r, all) == "");
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a row of sparse_mla has the same bits in any batch", TestSparseMlaBits)

// One call over two lists (on the device that has it; the others' kernel sets make two calls), and
// two calls. Whatever the first list is, the result is that of the whole list.
void TestTwoLists(const KernelTable& table, Random& random) {
  for (MlaCase c : MlaCases()) {
    if (!c.numbered) continue;
    INFO(c.name);
    c.other = MlaOther::kNone;
    MlaFixture f(c, table.activation_type, random);
    const auto want = f.Run(Reference(), 0, f.rows(), 1, 0);
    for (const char* cut : {"nothing", "all", "anywhere", "at a tile"}) {
      INFO("the first list has " << cut);
      std::vector<int32_t> cuts;
      for (const MlaRow& row : c.rows) {
        int32_t at = std::uniform_int_distribution<int32_t>(0, row.entries)(random);
        if (cut[0] == 'n') at = 0;
        if (cut[0] == 'a' && cut[1] == 'l') at = row.entries;
        if (cut[0] == 'a' && cut[1] == 't') at = at / 64 * 64;
        cuts.push_back(at);
      }
      const auto two = f.RunTwo(table, cuts, false, f.rows());
      const double relative = Tolerance(table, c);
      CHECK(Difference<float>(two.out, want.out, relative, f.out_width()) == "");
      CHECK(Difference(two.lse.span(), want.lse.span(), relative, c.heads, 1.0) == "");
      if (!IsCuda(table)) continue;
      for (int64_t scratch_rows : {f.rows(), int64_t{2}}) {
        const auto one = f.RunTwo(table, cuts, true, std::max(int64_t{1}, scratch_rows));
        CHECK(f.BitsDiffer(one, 0, two) == "");
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("sparse_mla over two lists equals sparse_mla over one", TestTwoLists)

// Scores so large that only their differences can be told from infinity, and other results far
// above and below.
void TestSparseMlaExtremes(const KernelTable& table, Random& random) {
  constexpr int32_t kHeads = 4, kRank = 512, kRope = 64, kEntries = 300;
  TestLatents cache(1, kEntries, 64, kRank, kRope, DType::kBFloat16, random);
  for (int64_t e = 0; e < kEntries; ++e) cache.FillEntry(cache.Entry(0, e), random, 1.0f);
  const DType type = table.activation_type;
  const auto q = RandomElements(kHeads * (kRank + kRope), type, random, 8.0f);
  const auto slots = BufferOf<int32_t>({0}), counts = BufferOf<int32_t>({kEntries});
  auto other_o = NormalBuffer<float>(kHeads * kRank, random);
  auto other_lse = BufferOf<float>({-1e30f, 1e30f, kNegativeInfinity, 0.0f});
  const auto run = [&](const KernelTable& path) {
    Guarded<float> out(kHeads * kRank), lse(kHeads), scratch(2 * kHeads * (kRank + 1));
    const SparseMlaParams p = {.q = q.data(),
                               .slots = slots.data(),
                               .cache = cache.view,
                               .entries = nullptr,
                               .counts = counts.data(),
                               .then_entries = nullptr,
                               .then_counts = nullptr,
                               .capacity = kEntries,
                               .other_o = other_o.data(),
                               .other_lse = other_lse.data(),
                               .out = out.data(),
                               .lse = lse.data(),
                               .scratch = scratch.data(),
                               .scratch_bytes = scratch.size() * 4,
                               .rows = 1,
                               .decode_rows = 1,
                               .heads = kHeads,
                               .spare_processors = 0,
                               .scale = 3.0f,
                               .q_type = type,
                               .out_type = DType::kFloat32};
    RunWorkers(path.sparse_mla, p, 2);
    RunWorkers(path.sparse_mla_merge, p, 2);
    return std::pair(std::move(out), std::move(lse));
  };
  const auto got = run(table), want = run(Reference());
  for (int64_t h = 0; h < kHeads; ++h) {
    INFO("head " << h);
    for (int64_t i = 0; i < kRank; ++i) REQUIRE(std::isfinite(got.first[h * kRank + i]));
  }
  const double relative = type == DType::kFloat32 ? 1e-3 : 1e-2;
  CHECK(Difference(got.first.span(), want.first.span(), relative, kRank) == "");
  CHECK(Difference(got.second.span(), want.second.span(), relative, kHeads) == "");
  // The other result is the result where it outweighs everything.
  for (int64_t i = 0; i < kRank; ++i) CHECK(got.first[kRank + i] == other_o[kRank + i]);
}
SLUICE_TEST_ON_EVERY_PATH("sparse_mla bears large scores", TestSparseMlaExtremes)

}  // namespace
}  // namespace sluice::kernels
