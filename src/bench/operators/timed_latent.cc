// Times operators of latent attention at DeepSeek-V3.2's geometry: attention to lists of entries
// anywhere in a sequence as large as the arena, index logits of long contexts, and the selection of
// 2,048 tokens.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/bench/operators/timed_latent.h"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: a file about them

constexpr float kScale = 1.0f / 512;  // The scale of every group of e4m3 values.

const KernelTable& Reference() { return *FindKernelTable("reference"); }

// Turns any bytes into a valid entry: no value is NaN, and scales are kScale.
void MakePacked(uint8_t* entry) {
  for (int i = 0; i < kPackedRank; ++i) entry[i] &= 0xF7;
  for (int g = 0; g < kPackedRank / kPackedScaleTokens; ++g) {
    std::memcpy(entry + kPackedRank + g * 4, &kScale, 4);
  }
}

class SparseMla : public TimedOperator {
 public:
  SparseMla(const TimedMlaCase& c, const KernelTable& path, OperandArena* arena)
      : case_(c),
        path_(path),
        arena_(arena->buffer()),
        q_(static_cast<size_t>(c.rows) * static_cast<size_t>(c.heads) * kWidth,
           path.activation_type) {
    // The arena holds one sequence.
    const int64_t page_bytes = int64_t{kBlockTokens} * kPackedEntryBytes;
    const int64_t blocks = static_cast<int64_t>(arena_.bytes()) / page_bytes;
    pages_.resize(static_cast<size_t>(blocks));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::mt19937 random(1);
    std::shuffle(pages_.begin(), pages_.end(), random);
    for (int64_t e = 0; e < blocks * kBlockTokens; ++e) {
      MakePacked(arena_.as<uint8_t>() + e * kPackedEntryBytes);
    }
    // No two lists share an entry; there are as many lists as the sequence allows.
    entries_.resize(static_cast<size_t>(blocks * kBlockTokens));
    std::iota(entries_.begin(), entries_.end(), 0);
    std::shuffle(entries_.begin(), entries_.end(), random);
    sets_ = std::ssize(entries_) / (int64_t{c.rows} * c.entries);
    SLUICE_CHECK(sets_ > 0, "the arena holds the lists of one call");
    for (int64_t list = 0; list < sets_ * c.rows; ++list) {
      const auto begin = entries_.begin() + list * c.entries;
      std::sort(begin, begin + c.entries);
    }
    slots_.assign(static_cast<size_t>(c.rows), 0);
    counts_.assign(static_cast<size_t>(c.rows), c.entries);
    out_.resize(static_cast<size_t>(c.rows) * static_cast<size_t>(c.heads) * kPackedRank);
    lse_.resize(static_cast<size_t>(c.rows) * static_cast<size_t>(c.heads));
    const int64_t pieces = (c.entries + kMlaSplitEntries - 1) / kMlaSplitEntries;
    scratch_.resize(static_cast<size_t>(c.rows * pieces * c.heads * (kPackedRank + 1)));
  }

  std::string name() const override {
    return absl::StrCat("sparse MLA, ", case_.heads, " heads, ", case_.rows, " x ", case_.entries,
                        " entries");
  }
  double bytes() const override { return double(case_.rows) * case_.entries * kPackedEntryBytes; }
  double flops() const override {
    return double(case_.rows) * case_.entries * case_.heads * (kWidth + kPackedRank) * 2;
  }
  void Run(Crew& crew) override {
    const SparseMlaParams p = Params(out_.data(), case_.rows);
    set_ = (set_ + 1) % sets_;
    RunAll(crew, path_.sparse_mla, p);
    RunAll(crew, path_.sparse_mla_merge, p);
  }
  double Error(Crew& crew) override {
    std::vector<float> want(static_cast<size_t>(case_.heads) * kPackedRank);
    const SparseMlaParams p = Params(want.data(), 1);
    Run(crew);
    Reference().sparse_mla(p, {0, 1});
    return RelativeError({out_.data(), want.size()}, want);
  }
  double allowed_error() const override {
    return path_.activation_type == DType::kFloat32 ? 1e-5 : 7e-3;
  }

 private:
  static constexpr int64_t kWidth = kPackedRank + kPackedRope;
  static constexpr int32_t kBlockTokens = 64;

  SparseMlaParams Params(float* out, int32_t rows) {
    SparseMlaParams p = {};
    p.q = q_.data();
    p.slots = slots_.data();
    p.cache = {arena_.data(),
               pages_.data(),
               static_cast<int64_t>(pages_.size()),
               int64_t{kBlockTokens} * kPackedEntryBytes,
               kBlockTokens,
               kPackedRank,
               kPackedRope,
               DType::kFloat8E4M3};
    p.entries = entries_.data() + set_ * case_.rows * case_.entries;
    p.counts = counts_.data();
    p.capacity = case_.entries;
    p.out = out;
    p.lse = lse_.data();
    p.scratch = scratch_.data();
    p.scratch_bytes = static_cast<int64_t>(scratch_.size()) * 4;
    p.rows = p.decode_rows = rows;
    p.heads = case_.heads;
    p.scale = 1.0f / std::sqrt(static_cast<float>(kWidth));
    p.q_type = path_.activation_type;
    p.out_type = DType::kFloat32;
    return p;
  }

  const TimedMlaCase case_;
  const KernelTable& path_;
  const HugeBuffer& arena_;
  const LatentActivations q_;
  int64_t sets_ = 0, set_ = 0;
  std::vector<int32_t> pages_, entries_, slots_, counts_;
  std::vector<float> out_, lse_, scratch_;
};

// Index logits of rows of as many sequences, whose keys follow one another in the arena.
class IndexLogits : public TimedOperator {
 public:
  IndexLogits(const TimedLogitsCase& c, const KernelTable& path, OperandArena* arena)
      : case_(c), path_(path), arena_(arena->buffer()) {
    const int64_t blocks = static_cast<int64_t>(arena_.bytes()) / kPageBytes;
    stride_ = (c.context + kBlockTokens - 1) / kBlockTokens;
    sets_ = blocks / (stride_ * c.rows);
    SLUICE_CHECK(sets_ > 0, "the arena holds the keys of one call");
    pages_.resize(static_cast<size_t>(blocks));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), std::mt19937(1));
    for (int64_t page = 0; page < blocks; ++page) {
      uint8_t* keys = arena_.as<uint8_t>() + page * kPageBytes;
      for (int64_t i = 0; i < kBlockTokens * kIndexDim; ++i) keys[i] &= 0xF7;
      for (int64_t t = 0; t < kBlockTokens; ++t) {
        std::memcpy(keys + kBlockTokens * kIndexDim + t * 4, &kScale, 4);
      }
    }
    q_.resize(static_cast<size_t>(c.rows) * static_cast<size_t>(c.heads) * kIndexDim);
    std::mt19937 random(2);
    for (uint8_t& v : q_) v = static_cast<uint8_t>(random() & 0xF7);
    weights_.resize(static_cast<size_t>(c.rows) * static_cast<size_t>(c.heads));
    FillFloat(weights_, 1.0f / 512);
    for (int32_t r = 0; r < c.rows; ++r) slots_.push_back(r);
    positions_.assign(static_cast<size_t>(c.rows), c.context - 1);
    scores_.resize(static_cast<size_t>(c.rows) * static_cast<size_t>(c.context));
  }

  std::string name() const override {
    return absl::StrCat("index logits, ", case_.heads, " heads, ", case_.rows, " x ", case_.context,
                        " keys");
  }
  double bytes() const override { return double(case_.rows) * case_.context * (kIndexDim + 4); }
  double flops() const override {
    return double(case_.rows) * case_.context * case_.heads * (kIndexDim + 1) * 2;
  }
  void Run(Crew& crew) override {
    const IndexLogitsParams p = Params(scores_.data(), case_.rows);
    set_ = (set_ + 1) % sets_;
    RunAll(crew, path_.index_logits, p);
  }
  double Error(Crew& crew) override {
    std::vector<float> want(static_cast<size_t>(case_.context));
    const IndexLogitsParams p = Params(want.data(), 1);
    Run(crew);
    Reference().index_logits(p, {0, 1});
    return RelativeError({scores_.data(), want.size()}, want);
  }
  double allowed_error() const override { return 1e-5; }

 private:
  static constexpr int64_t kBlockTokens = 64;
  static constexpr int64_t kPageBytes = kBlockTokens * (kIndexDim + 4);

  IndexLogitsParams Params(float* scores, int32_t rows) {
    IndexLogitsParams p = {};
    p.q = q_.data();
    p.weights = weights_.data();
    p.slots = slots_.data();
    p.positions = positions_.data();
    p.cache = {arena_.data(), pages_.data() + set_ * stride_ * case_.rows, stride_,
               kPageBytes,    static_cast<int32_t>(kBlockTokens),          DType::kFloat8E4M3};
    p.scores = scores;
    p.score_stride = case_.context;
    p.rows = rows;
    p.heads = case_.heads;
    return p;
  }

  const TimedLogitsCase case_;
  const KernelTable& path_;
  const HugeBuffer& arena_;
  int64_t stride_ = 0, sets_ = 0, set_ = 0;
  std::vector<int32_t> pages_, slots_, positions_;
  std::vector<uint8_t> q_;
  std::vector<float> weights_, scores_;
};

class TopK : public TimedOperator {
 public:
  TopK(const TimedTopKCase& c, const KernelTable& path) : case_(c), path_(path) {
    scores_.resize(static_cast<size_t>(c.rows) * static_cast<size_t>(c.units));
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (float& score : scores_) score = std::max(0.0f, normal(random));
    for (int32_t r = 0; r < c.rows; ++r) slots_.push_back(r);
    positions_.assign(static_cast<size_t>(c.rows), c.units - 1);
    units_.resize(static_cast<size_t>(c.rows) * static_cast<size_t>(c.k));
    counts_.resize(static_cast<size_t>(c.rows));
  }

  std::string name() const override {
    return absl::StrCat("top ", case_.k, " of ", case_.units, ", ", case_.rows,
                        case_.rows == 1 ? " row" : " rows");
  }
  double bytes() const override { return double(case_.rows) * case_.units * 4; }
  double flops() const override { return 0; }
  void Run(Crew& crew) override { RunAll(crew, path_.top_k, Params(units_.data())); }
  double Error(Crew& crew) override {
    Run(crew);
    std::vector<int32_t> want(units_.size());
    Reference().top_k(Params(want.data()), {0, 1});
    return want == units_ ? 0 : 1;
  }
  double allowed_error() const override { return 0; }

 private:
  TopKParams Params(int32_t* units) {
    TopKParams p = {};
    p.scores = scores_.data();
    p.score_stride = case_.units;
    p.slots = slots_.data();
    p.positions = positions_.data();
    p.selected = {units, counts_.data(), case_.k};
    p.rows = case_.rows;
    p.kv_heads = 1;
    p.unit_tokens = 1;
    p.k = case_.k;
    p.margin = HUGE_VALF;
    return p;
  }

  const TimedTopKCase case_;
  const KernelTable& path_;
  std::vector<float> scores_;
  std::vector<int32_t> slots_, positions_, units_, counts_;
};

}  // namespace

std::vector<std::function<std::unique_ptr<TimedOperator>()>> LatentOperators(
    const KernelTable& path, OperandArena* arena) {
  std::vector<std::function<std::unique_ptr<TimedOperator>()>> operators =
      ProductOperators(path, arena);
  for (const auto& c : TimedMlaCases()) {
    operators.push_back([=, &path] { return std::make_unique<SparseMla>(c, path, arena); });
  }
  for (const auto& c : TimedLogitsCases()) {
    operators.push_back([=, &path] { return std::make_unique<IndexLogits>(c, path, arena); });
  }
  for (const auto& c : TimedTopKCases()) {
    operators.push_back([=, &path] { return std::make_unique<TopK>(c, path); });
  }
  return operators;
}

}  // namespace sluice::bench
