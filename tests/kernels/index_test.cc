// The indexer of sparse attention: IndexAppend, IndexQuery, IndexLogits.
#include <set>

#include "kernels/kernel_cases.h"
#include "tests/kernels/latent_support.h"

namespace sluice::kernels {
namespace {

constexpr DType kTypes[] = {DType::kFloat8E4M3, DType::kBFloat16, DType::kFloat32};

std::vector<AttentionRow> AppendRows() {
  std::vector<AttentionRow> rows = {{-1, 3}, {2, 0}, {0, 149}, {-1, 0}, {4, 15}, {3, 16}};
  AppendRun(rows, 1, 20, 40);
  return rows;
}

// Rows of keys to append: index keys of five sequences of up to 150 tokens.
class KeyFixture {
 public:
  KeyFixture(DType type, int32_t rope_dim, int32_t block_tokens, Random& random)
      : rope_dim_(rope_dim),
        rows_(static_cast<int64_t>(AppendRows().size())),
        k_(NormalBuffer<float>(rows_ * kStride, random, 2.0f)),
        weight_(NormalBuffer<float>(kIndexDim, random)),
        bias_(NormalBuffer<float>(kIndexDim, random)),
        cos_sin_(NormalBuffer<float>(rows_ * rope_dim, random)),
        slots_(rows_),
        positions_(rows_),
        keys(5, 150, block_tokens, type, random) {
    for (int64_t r = 0; r < rows_; ++r) {
      slots_[r] = AppendRows()[static_cast<size_t>(r)].slot;
      positions_[r] = AppendRows()[static_cast<size_t>(r)].position;
    }
    // One case is far from zero beside its deviation, another has no deviation.
    for (int32_t i = 0; i < kIndexDim; ++i) k_[7 * kStride + i] += 100;
    std::fill_n(k_.data() + 8 * kStride, kIndexDim, 3.0f);
  }

  struct Output {
    Guarded<uint8_t> cache, written;
  };

  Output Run(const KernelTable& table, int64_t first, int64_t rows, int workers, bool cache,
             bool written) {
    Output out = {CopyOf(keys.data),
                  Guarded<uint8_t>(written ? rows * IndexKeyBytes(keys.view.type) : 0)};
    PagedIndexKeys view = keys.view;
    view.base = cache ? out.cache.data() : nullptr;
    const IndexAppendParams p = {.k = k_.data() + first * kStride,
                                 .k_stride = kStride,
                                 .norm_weight = weight_.data(),
                                 .norm_bias = bias_.data(),
                                 .cos_sin = cos_sin_.data() + first * rope_dim_,
                                 .slots = slots_.data() + first,
                                 .positions = positions_.data() + first,
                                 .cache = view,
                                 .written = written ? out.written.data() : nullptr,
                                 .rows = static_cast<int32_t>(rows),
                                 .rope_dim = rope_dim_,
                                 .epsilon = 1e-6f,
                                 .decode_rows = static_cast<int32_t>(rows)};
    RunWorkers(table.index_append, p, workers);
    CHECK(out.cache.Damage() + out.written.Damage() == "");
    return out;
  }

  // Returns how the keys in two arenas differ; keys that no row writes must be as before in `got`.
  std::string CacheDifference(const Guarded<uint8_t>& got, const Guarded<uint8_t>& want) {
    const PagedIndexKeys& c = keys.view;
    const bool packed = c.type == DType::kFloat8E4M3;
    QuantisedDifference quantised;
    std::vector<float> got_values, want_values;
    std::set<int64_t> bytes;
    for (int64_t r = 0; r < rows_; ++r) {
      if (slots_[r] < 0) continue;
      const int64_t at = IndexKeyOffset(c, slots_[r], positions_[r]);
      const int64_t scale_at = IndexScaleOffset(c, slots_[r], positions_[r]);
      for (int64_t b = 0; b < kIndexDim * SizeOf(c.type); ++b) bytes.insert(at + b);
      for (int64_t b = 0; packed && b < 4; ++b) bytes.insert(scale_at + b);
      if (packed) {
        quantised.Group(got.data() + at, FloatsOf(got.data() + scale_at, DType::kFloat32, 0, 1)[0],
                        want.data() + at,
                        FloatsOf(want.data() + scale_at, DType::kFloat32, 0, 1)[0], kIndexDim,
                        "row " + std::to_string(r));
        continue;
      }
      for (float v : FloatsOf(got.data() + at, c.type, 0, kIndexDim)) got_values.push_back(v);
      for (float v : FloatsOf(want.data() + at, c.type, 0, kIndexDim)) want_values.push_back(v);
    }
    for (int64_t b = 0; b < got.size(); ++b) {
      if (!bytes.contains(b) && got[b] != keys.data[b]) {
        return "byte " + std::to_string(b) + " was written";
      }
    }
    if (packed) return quantised.Result();
    return Difference<float>(got_values, want_values, c.type == DType::kFloat32 ? 2e-6 : 3e-4,
                             kIndexDim);
  }

  int64_t slot(int64_t r) const { return slots_[r]; }
  int64_t rows() const { return rows_; }

 private:
  static constexpr int64_t kStride = 200;
  const int32_t rope_dim_;
  const int64_t rows_;
  Guarded<float> k_, weight_, bias_, cos_sin_;
  Guarded<int32_t> slots_, positions_;

 public:
  TestIndexKeys keys;
};

void TestIndexAppend(const KernelTable& table, Random& random) {
  for (DType type : kTypes) {
    for (int32_t rope_dim : {64, 16, 128}) {
      INFO(NameOf(type) << ", RoPE of " << rope_dim);
      KeyFixture f(type, rope_dim, rope_dim == 64 ? 64 : 16, random);
      const auto got = f.Run(table, 0, f.rows(), 3, true, true);
      const auto want = f.Run(Reference(), 0, f.rows(), 1, true, true);
      CHECK(f.CacheDifference(got.cache, want.cache) == "");
      const int64_t bytes = IndexKeyBytes(type);
      for (int64_t r = 0; r < f.rows(); ++r) {
        INFO("row " << r);
        // `written` has the same key, with the scale behind its values.
        const uint8_t* written = got.written.data() + r * bytes;
        if (f.slot(r) < 0) {
          REQUIRE(std::all_of(written, written + bytes, [](uint8_t b) { return b == 0xFF; }));
          continue;
        }
        const auto alone = f.Run(table, r, 1, 2, false, true);
        REQUIRE(std::equal(written, written + bytes, alone.written.data()));
      }
      const auto without = f.Run(table, 0, f.rows(), 1, true, false);
      CHECK(BitDifference(without.cache.span(), got.cache.span(), bytes) == "");
      const auto only = f.Run(table, 0, f.rows(), 2, false, true);
      CHECK(BitDifference(only.cache.span(), f.keys.data.span(), bytes) == "");
      CHECK(BitDifference(only.written.span(), got.written.span(), bytes) == "");
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("index_append agrees with the reference", TestIndexAppend)

void TestIndexQuery(const KernelTable& table, Random& random) {
  for (DType type : kTypes) {
    for (const auto& [rows, heads, rope_dim] : {std::tuple{0, 4, 64}, std::tuple{1, 64, 64},
                                                std::tuple{13, 4, 64}, std::tuple{3, 1, 16}}) {
      INFO(NameOf(type) << ", " << rows << " rows of " << heads << " heads");
      const bool packed = type == DType::kFloat8E4M3;
      const DType out_type = packed ? type : DType::kFloat32;
      const int64_t stride = heads + 3;
      auto q = NormalBuffer<float>(int64_t{rows} * heads * kIndexDim, random, 2.0f);
      if (rows > 2) std::fill_n(q.data() + heads * kIndexDim, kIndexDim, 0.0f);
      const auto weights = NormalBuffer<float>(rows * stride, random);
      const auto cos_sin = NormalBuffer<float>(int64_t{rows} * rope_dim, random);
      struct Output {
        Guarded<uint8_t> q;
        Guarded<float> weights;
      };
      const auto run = [&, rope = rope_dim, of_row = heads](const KernelTable& path, int64_t first,
                                                            int32_t count, int workers) {
        Output o = {Guarded<uint8_t>(int64_t{count} * of_row * kIndexDim * SizeOf(out_type)),
                    Guarded<float>(int64_t{count} * of_row)};
        const IndexQueryParams p = {.q = q.data() + first * of_row * kIndexDim,
                                    .weights = weights.data() + first * stride,
                                    .weights_stride = stride,
                                    .cos_sin = cos_sin.data() + first * rope,
                                    .out = o.q.data(),
                                    .out_weights = o.weights.data(),
                                    .type = type,
                                    .rows = count,
                                    .heads = of_row,
                                    .rope_dim = rope,
                                    .weight_scale = 0.3f};
        RunWorkers(path.index_query, p, workers);
        CHECK(o.q.Damage() + o.weights.Damage() == "");
        return o;
      };
      const Output got = run(table, 0, rows, 3), want = run(Reference(), 0, rows, 1);
      CHECK(Difference(got.weights.span(), want.weights.span(), 1e-5, heads) == "");
      if (packed) {
        // The scales are in the weights, which agree.
        QuantisedDifference difference;
        difference.Group(got.q.data(), 1, want.q.data(), 1, got.q.size(), "queries");
        CHECK(difference.Result() == "");
      } else {
        const int64_t count = got.q.size() / 4;
        CHECK(Difference<float>(FloatsOf(got.q.data(), out_type, 0, count),
                                FloatsOf(want.q.data(), out_type, 0, count), 2e-6,
                                heads * kIndexDim) == "");
      }
      if (rows == 0) continue;
      const Output alone = run(table, rows - 1, 1, 2);
      const int64_t bytes = int64_t{heads} * kIndexDim * SizeOf(out_type);
      CHECK(BitDifference(alone.q.span(), got.q.span().last(static_cast<size_t>(bytes)), bytes) ==
            "");
      CHECK(BitDifference(alone.weights.span(), got.weights.span().last(static_cast<size_t>(heads)),
                          heads) == "");
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("index_query agrees with the reference", TestIndexQuery)

struct LogitsCase {
  DType type;
  int32_t block_tokens;
  int32_t heads;
  std::vector<AttentionRow> rows;
};

std::vector<AttentionRow> LogitsRows() {
  std::vector<AttentionRow> rows;
  int32_t slot = 0;
  for (int32_t context : {1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 500, 1500}) {
    rows.push_back({slot++, context - 1});
    if (slot % 4 == 0) rows.push_back({-1, 5});
  }
  // These are rows of a prompt.
  AppendRun(rows, 11, 300, 9);
  // These are rows of drafts, across the cut of a tile, and one behind a gap.
  AppendRun(rows, 10, 62, 4);
  rows.push_back({10, 70});
  AppendRun(rows, 9, 126, 3);
  return rows;
}

class LogitsFixture {
 public:
  LogitsFixture(const LogitsCase& c, Random& random)
      : case_(c),
        rows_(static_cast<int64_t>(c.rows.size())),
        q_type_(c.type == DType::kFloat8E4M3 ? c.type : DType::kFloat32),
        stride_(1500 + 7),
        q_(RandomElements(rows_ * c.heads * kIndexDim, q_type_, random)),
        weights_(NormalBuffer<float>(rows_ * c.heads, random)),
        slots_(rows_),
        positions_(rows_),
        keys_(12, 1500, c.block_tokens, c.type, random) {
    for (int64_t r = 0; r < rows_; ++r) {
      slots_[r] = c.rows[static_cast<size_t>(r)].slot;
      positions_[r] = c.rows[static_cast<size_t>(r)].position;
    }
    std::vector<int32_t> tokens(12, 0);
    for (const AttentionRow& row : c.rows) {
      if (row.slot < 0) continue;
      int32_t& of_slot = tokens[static_cast<size_t>(row.slot)];
      for (; of_slot <= row.position; ++of_slot) keys_.FillKey(row.slot, of_slot, random);
    }
  }

  Guarded<float> Run(const KernelTable& table, int64_t first, int64_t rows, int workers,
                     bool threads = false, int32_t sequence_rows = 1) {
    Guarded<float> scores(rows * stride_);
    const IndexLogitsParams p = {.q = q_.data() + first * case_.heads * kIndexDim * SizeOf(q_type_),
                                 .weights = weights_.data() + first * case_.heads,
                                 .slots = slots_.data() + first,
                                 .positions = positions_.data() + first,
                                 .cache = keys_.view,
                                 .scores = scores.data(),
                                 .score_stride = stride_,
                                 .rows = static_cast<int32_t>(rows),
                                 .heads = case_.heads,
                                 .spare_processors = workers - 1,
                                 .sequence_rows = sequence_rows};
    threads ? RunThreads(table.index_logits, p, workers)
            : RunWorkers(table.index_logits, p, workers);
    CHECK(scores.Damage() == "");
    return scores;
  }

  std::span<const float> Row(const Guarded<float>& scores, int64_t r) const {
    return scores.span().subspan(static_cast<size_t>(r * stride_), static_cast<size_t>(stride_));
  }
  int64_t rows() const { return rows_; }
  int64_t stride() const { return stride_; }

 private:
  const LogitsCase& case_;
  const int64_t rows_;
  const DType q_type_;
  const int64_t stride_;
  Guarded<uint8_t> q_;
  Guarded<float> weights_;
  Guarded<int32_t> slots_, positions_;
  TestIndexKeys keys_;
};

const LogitsCase kLogitsCases[] = {
    {DType::kFloat8E4M3, 64, 64, LogitsRows()},
    {DType::kFloat8E4M3, 32, 4, LogitsRows()},
    {DType::kFloat8E4M3, 16, 32, LogitsRows()},
    {DType::kBFloat16, 32, 64, LogitsRows()},
    {DType::kBFloat16, 16, 4, LogitsRows()},
    {DType::kFloat32, 64, 8, LogitsRows()},
    {DType::kFloat32, 32, 4, {}},
    {DType::kFloat8E4M3, 64, 64, {{-1, 0}, {-1, 4}}},
};

void TestIndexLogits(const KernelTable& table, Random& random) {
  for (const LogitsCase& c : kLogitsCases) {
    INFO(NameOf(c.type) << ", " << c.heads << " heads, blocks of " << c.block_tokens);
    LogitsFixture f(c, random);
    const auto got = f.Run(table, 0, f.rows(), 3), want = f.Run(Reference(), 0, f.rows(), 1);
    // Scores past a row's position are NaN on either side. Tensor cores add up e4m3 products to
    // fewer places.
    CHECK(Difference(got.span(), want.span(), IsCuda(table) ? 2e-3 : 5e-6, f.stride()) == "");
  }
}
SLUICE_TEST_ON_EVERY_PATH("index_logits agrees with the reference", TestIndexLogits)

// Prompts with so many rows of so few keys that a thread that loads rows ahead is many rows ahead.
void TestIndexLogitsPrompts(const KernelTable& table, Random& random) {
  LogitsCase c = {DType::kFloat8E4M3, 32, 4, {}};
  for (int32_t slot = 0; slot < 4; ++slot) AppendRun(c.rows, slot, 0, 256);
  LogitsFixture f(c, random);
  const auto want = f.Run(Reference(), 0, f.rows(), 1);
  for (int run = 0; run < (IsCuda(table) ? 20 : 1); ++run) {
    const auto got = f.Run(table, 0, f.rows(), 3, false, run % 2 == 0 ? 1 : kMaxNewTokens);
    CHECK(Difference(got.span(), want.span(), IsCuda(table) ? 2e-3 : 5e-6, f.stride()) == "");
  }
}
SLUICE_TEST_ON_EVERY_PATH("index_logits of many short rows agrees with the reference",
                          TestIndexLogitsPrompts)

void TestIndexLogitsBits(const KernelTable& table, Random& random) {
  for (const LogitsCase& c : kLogitsCases) {
    INFO(NameOf(c.type) << ", " << c.heads << " heads, blocks of " << c.block_tokens);
    LogitsFixture f(c, random);
    const auto all = f.Run(table, 0, f.rows(), 1);
    for (int workers : {2, 5, 16}) {
      INFO(workers << " workers");
      const auto shared = f.Run(table, 0, f.rows(), workers, true);
      CHECK(BitDifference(shared.span(), all.span(), f.stride()) == "");
    }
    for (int32_t sequence_rows : {2, 16}) {
      INFO(sequence_rows << " rows a sequence");
      for (int workers : {1, 3, 120}) {
        const auto together = f.Run(table, 0, f.rows(), workers, false, sequence_rows);
        CHECK(BitDifference(together.span(), all.span(), f.stride()) == "");
      }
    }
    for (int64_t r = 0; r < f.rows(); ++r) {
      INFO("row " << r << " alone");
      const auto alone = f.Run(table, r, 1, 2);
      CHECK(BitDifference(alone.span(), f.Row(all, r), f.stride()) == "");
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a row's index logits have the same bits in any batch",
                          TestIndexLogitsBits)

// Equal tokens at any positions of the context have equal logits, so that TopK's ties are real.
void TestIndexLogitsPlaces(const KernelTable& table, Random& random) {
  for (DType type : kTypes) {
    INFO(NameOf(type));
    const bool packed = type == DType::kFloat8E4M3;
    constexpr int32_t kContext = 333, kHeads = 16;
    TestIndexKeys keys(1, kContext, 16, type, random);
    keys.FillKey(0, 0, random);
    for (int64_t t = 1; t < kContext; ++t) {
      std::copy_n(keys.data.data() + IndexKeyOffset(keys.view, 0, 0), kIndexDim * SizeOf(type),
                  keys.data.data() + IndexKeyOffset(keys.view, 0, t));
      if (!packed) continue;
      std::copy_n(keys.data.data() + IndexScaleOffset(keys.view, 0, 0), 4,
                  keys.data.data() + IndexScaleOffset(keys.view, 0, t));
    }
    const auto q = RandomElements(kHeads * kIndexDim, packed ? type : DType::kFloat32, random);
    const auto weights = NormalBuffer<float>(kHeads, random);
    const auto slots = BufferOf<int32_t>({0}), positions = BufferOf<int32_t>({kContext - 1});
    Guarded<float> scores(kContext);
    const IndexLogitsParams p = {.q = q.data(),
                                 .weights = weights.data(),
                                 .slots = slots.data(),
                                 .positions = positions.data(),
                                 .cache = keys.view,
                                 .scores = scores.data(),
                                 .score_stride = kContext,
                                 .rows = 1,
                                 .heads = kHeads,
                                 .spare_processors = 0};
    RunWorkers(table.index_logits, p, 3);
    for (int64_t t = 0; t < kContext; ++t) REQUIRE(scores[t] == scores[0]);
  }
}
SLUICE_TEST_ON_EVERY_PATH("equal index keys have equal logits", TestIndexLogitsPlaces)

}  // namespace
}  // namespace sluice::kernels
