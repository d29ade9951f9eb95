#include "src/bench/operators/timed_operator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"

namespace sluice::bench {

void FillFloat(std::span<float> out, float scale) {
  SplitMix64 random(54321);
  for (float& v : out) v = static_cast<float>(random.Uniform() * 2 - 1) * scale;
}

double RelativeError(std::span<const float> got, std::span<const float> want) {
  double error2 = 0, norm2 = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = double{got[i]} - double{want[i]};
    error2 += d * d;
    norm2 += double{want[i]} * double{want[i]};
  }
  return norm2 > 0 ? std::sqrt(error2 / norm2) : (error2 > 0 ? HUGE_VAL : 0.0);
}

namespace {

using namespace kernels;  // NOLINT: a file about them

// Rows to compare with the reference, which is slow.
constexpr int32_t kCheckedRows = 8;
// The arena's values have a standard deviation of about 1; a model's weights have about this one.
constexpr float kTypicalActivation = 0.05f;

const KernelTable& Reference() { return *FindKernelTable("reference"); }

uint16_t Bf16Near1(uint64_t bits) {
  return static_cast<uint16_t>((bits & 0x8000u) | (0x3F00u + (bits >> 24 & 0x7Fu)));
}

// Random activations of `count` elements, in both forms that a path may read.
class Activations {
 public:
  Activations(size_t count, DType type) : floats_(count * 4), bf16_(count * 2), type_(type) {
    FillFloat({floats_.as<float>(), count}, kTypicalActivation);
    SplitMix64 random(7);
    for (size_t i = 0; i < count; ++i) bf16_.as<uint16_t>()[i] = Bf16Near1(random());
  }
  const void* data() const { return type_ == DType::kFloat32 ? floats_.data() : bf16_.data(); }

 private:
  HugeBuffer floats_, bf16_;
  const DType type_;
};

class Linear : public TimedOperator {
 public:
  Linear(const LinearCase& c, const KernelTable& path, OperandArena* arena)
      : case_(c),
        path_(path),
        arena_(arena),
        elements_(static_cast<size_t>(PanelElements(c.n, c.k))),
        x_(static_cast<size_t>(c.rows) * static_cast<size_t>(c.k), path.activation_type),
        y_(static_cast<size_t>(c.rows) * static_cast<size_t>(c.n) * 4) {}

  std::string name() const override {
    return absl::StrCat("linear ", case_.n, " x ", case_.k, ", ", case_.rows,
                        case_.rows == 1 ? " row" : " rows");
  }
  double bytes() const override { return static_cast<double>(elements_) * 2; }
  double flops() const override { return 2.0 * case_.rows * case_.n * double(case_.k); }

  void Run(Crew& crew) override {
    const LinearParams p = Params(arena_->Next(elements_ * 2), y_.as<float>(), case_.rows);
    const std::function<void(int)> job = [&](int i) { path_.linear(p, {i, crew.count()}); };
    crew.Run(job);
  }

  double Error(Crew& crew) override {
    uint16_t* const w = arena_->Next(elements_ * 2);
    const LinearParams p = Params(w, y_.as<float>(), case_.rows);
    const std::function<void(int)> job = [&](int i) { path_.linear(p, {i, crew.count()}); };
    crew.Run(job);
    const int32_t rows = std::min(case_.rows, kCheckedRows);
    std::vector<float> want(static_cast<size_t>(rows) * static_cast<size_t>(case_.n));
    Reference().linear(Params(w, want.data(), rows), {0, 1});
    return RelativeError({y_.as<float>(), want.size()}, want);
  }
  double allowed_error() const override { return 1e-5; }

 private:
  LinearParams Params(const uint16_t* w, float* y, int32_t rows) const {
    return {x_.data(),
            {w, case_.n, case_.k, path_.weight_layout},
            nullptr,
            y,
            rows,
            rows,
            path_.activation_type,
            false};
  }

  const LinearCase case_;
  const KernelTable& path_;
  OperandArena* const arena_;
  const size_t elements_;
  const Activations x_;
  HugeBuffer y_;
};

// Attention of rows of one sequence, whose pages are scattered.
class Attention : public TimedOperator {
 public:
  Attention(const AttentionCase& c, const KernelTable& path, OperandArena* arena)
      : case_(c), path_(path), arena_(arena), rows_(static_cast<int32_t>(c.rows.size())) {
    for (const AttentionRow& row : c.rows) {
      SLUICE_CHECK(row.slot == 0, "one sequence");
      context_ = std::max(context_, row.position + 1);
      pairs_ += row.position + 1;
      slots_.push_back(0);
      positions_.push_back(row.position);
    }
    for (int32_t i = 0; i < (context_ + c.block_tokens - 1) / c.block_tokens; ++i) {
      pages_.push_back(i);
    }
    std::shuffle(pages_.begin(), pages_.end(), std::mt19937(1));
    page_bytes_ = int64_t{c.kv_heads} * 2 * c.block_tokens * c.head_dim * SizeOf(c.cache_type);
    width_ = static_cast<size_t>(c.heads) * static_cast<size_t>(c.head_dim);
    const size_t vectors = static_cast<size_t>(rows_) * width_;
    q_ = std::make_unique<HugeBuffer>(vectors * 4);
    out_ = std::make_unique<HugeBuffer>(vectors * 4);
    FillFloat({q_->as<float>(), vectors}, 1.0f);
    // As many as the engine gives a batch of decode rows; a prompt's rows use none.
    partial_rows_ = rows_ == 1 ? (context_ - 1) / kAttentionSplitTokens + 1 : 0;
    partial_ = std::make_unique<HugeBuffer>(static_cast<size_t>(partial_rows_ + 1) *
                                            static_cast<size_t>(c.heads * (c.head_dim + 1)) * 4);
  }

  std::string name() const override {
    return rows_ == 1 ? absl::StrCat("attention, ", case_.name)
                      : absl::StrCat("attention, ", case_.heads, "/", case_.kv_heads, " heads of ",
                                     case_.head_dim, ", ", case_.name, " of ", rows_);
  }
  double bytes() const override {
    return double(context_) * case_.kv_heads * 2 * case_.head_dim *
           static_cast<double>(SizeOf(case_.cache_type));
  }
  double flops() const override { return pairs_ * case_.heads * case_.head_dim * 4; }

  void Run(Crew& crew) override { Call(crew, NextCache()); }

  double Error(Crew& crew) override {
    void* const cache = NextCache();
    AttentionParams p = Params(cache, path_.activation_type);
    // Compares in float32, whatever type the path outputs: the check judges the operator, not its
    // last rounding.
    p.out_type = DType::kFloat32;
    Launch(crew, p);
    const int32_t rows = std::min(rows_, kCheckedRows);
    std::vector<float> want(static_cast<size_t>(rows) * width_);
    // The rows with the longest contexts.
    p.q = q_->as<float>() + static_cast<size_t>(rows_ - rows) * width_;
    p.slots = slots_.data() + (rows_ - rows);
    p.positions = positions_.data() + (rows_ - rows);
    p.rows = rows;
    p.out = want.data();
    p.partial_rows = 0;
    Reference().attention(p, {0, 1});
    Reference().attention_merge(p, {0, 1});
    return RelativeError(
        {out_->as<float>() + static_cast<size_t>(rows_ - rows) * width_, want.size()}, want);
  }
  double allowed_error() const override { return 1e-4; }

  void Call(Crew& crew, void* cache) { Launch(crew, Params(cache, path_.activation_type)); }

 private:
  void* NextCache() { return arena_->Next(pages_.size() * static_cast<size_t>(page_bytes_)); }
  void Launch(Crew& crew, const AttentionParams& p) const {
    const std::function<void(int)> attend = [&](int i) { path_.attention(p, {i, crew.count()}); };
    const std::function<void(int)> merge = [&](int i) {
      path_.attention_merge(p, {i, crew.count()});
    };
    crew.Run(attend);
    crew.Run(merge);
  }
  AttentionParams Params(void* cache, DType out_type) const {
    AttentionParams p = {};
    p.q = q_->as<float>();
    p.q_stride = static_cast<int64_t>(width_);
    p.slots = slots_.data();
    p.positions = positions_.data();
    p.cache = {cache,          pages_.data(),      static_cast<int64_t>(pages_.size()),
               page_bytes_,    case_.block_tokens, case_.kv_heads,
               case_.head_dim, case_.cache_type};
    p.out = out_->data();
    p.partial = partial_->as<float>();
    p.partial_rows = partial_rows_;
    p.rows = rows_;
    p.heads = case_.heads;
    p.scale = 1.0f / std::sqrt(static_cast<float>(case_.head_dim));
    p.out_type = out_type;
    return p;
  }

  const AttentionCase case_;
  const KernelTable& path_;
  OperandArena* const arena_;
  const int32_t rows_;
  int32_t context_ = 0;
  double pairs_ = 0;  // Pairs of a query row and a token that it attends to.
  std::vector<int32_t> slots_, positions_, pages_;
  int64_t page_bytes_ = 0, partial_rows_ = 0;
  size_t width_ = 0;
  std::unique_ptr<HugeBuffer> q_, out_, partial_;
};

class Sample : public TimedOperator {
 public:
  Sample(const SampleCase& c, const KernelTable& path, int workers)
      : case_(c),
        path_(path),
        logits_(count() * 4),
        scratch_(static_cast<size_t>(SampleScratchBytes(c.vocab)) * static_cast<size_t>(workers)),
        sampling_(static_cast<size_t>(c.rows)),
        ids_(static_cast<size_t>(c.rows) * kMaxLogitBias),
        values_(ids_.size()),
        tokens_(static_cast<size_t>(c.rows) * kHistory),
        out_tokens_(static_cast<size_t>(c.rows)),
        out_logprobs_(static_cast<size_t>(c.rows) * kMaxTopLogprobs) {
    FillLogits();
    for (int32_t row = 0; row < c.rows; ++row) {
      slots_.push_back(row);
      positions_.push_back(kHistory - 2);
      SamplingSlot& s = sampling_[static_cast<size_t>(row)];
      s = {};
      s.seed = static_cast<uint64_t>(row);
      s.temperature = c.temperature;
      s.top_k = c.top_k;
      s.top_p = c.top_p;
      s.repetition_penalty = 1;
      s.prompt_length = kHistory - 2;
    }
  }

  std::string name() const override {
    return absl::StrCat("sample, ", case_.name, ", ", case_.rows, " x ", case_.vocab);
  }
  double bytes() const override { return static_cast<double>(count()) * 4; }
  double flops() const override { return 0; }

  void Run(Crew& crew) override {
    const SampleParams p = Params();
    const std::function<void(int)> job = [&](int i) { path_.sample(p, {i, crew.count()}); };
    crew.Run(job);
  }

  // Returns the share of rows whose token differs from the reference's. Draws may differ if the
  // boundary of a nucleus falls between two rounding errors; these logits have no such ties.
  double Error(Crew& crew) override {
    Run(crew);
    const std::vector<int32_t> got = out_tokens_;
    FillLogits();
    Reference().sample(Params(), {0, 1});
    double wrong = 0;
    for (size_t i = 0; i < got.size(); ++i) wrong += got[i] != out_tokens_[i] ? 1 : 0;
    FillLogits();
    return wrong / static_cast<double>(got.size());
  }
  double allowed_error() const override { return 0; }

 private:
  static constexpr int32_t kHistory = 64;
  size_t count() const {
    return static_cast<size_t>(case_.rows) * static_cast<size_t>(case_.vocab);
  }
  // Makes logits as peaked as a language model's: a few tokens hold most of the probability.
  void FillLogits() {
    SplitMix64 random(11);
    for (size_t i = 0; i < count(); ++i) {
      logits_.as<float>()[i] = static_cast<float>(-3.0 * std::log(random.Uniform() + 1e-9));
    }
  }
  SampleParams Params() {
    SampleParams p = {};
    p.logits = logits_.as<float>();
    p.slots = slots_.data();
    p.positions = positions_.data();
    p.sampling = sampling_.data();
    p.stop_ids = ids_.data();
    p.bias_ids = ids_.data();
    p.bias_values = values_.data();
    p.tokens = tokens_.data();
    p.token_stride = kHistory;
    p.out_tokens = out_tokens_.data();
    p.out_logprobs = out_logprobs_.data();
    p.out_top_ids = ids_.data();
    p.out_top_logprobs = out_logprobs_.data();
    p.scratch = scratch_.data();
    p.rows = case_.rows;
    p.vocab = case_.vocab;
    return p;
  }

  const SampleCase case_;
  const KernelTable& path_;
  HugeBuffer logits_, scratch_;
  std::vector<SamplingSlot> sampling_;
  std::vector<int32_t> slots_, positions_, ids_;
  std::vector<float> values_;
  std::vector<int32_t> tokens_, out_tokens_;
  std::vector<float> out_logprobs_;
};

class PrefillLayer : public TimedOperator {
 public:
  PrefillLayer(int32_t tokens, bool attention, const KernelTable& path, OperandArena* arena)
      : tokens_(tokens), attention_(attention) {
    for (const LinearCase& c : LayerLinearCases(tokens)) {
      parts_.push_back(NewLinear(c, path, arena));
    }
    if (attention) parts_.push_back(NewAttention(PrefillCase(tokens), path, arena));
  }
  std::string name() const override {
    return absl::StrCat("prefill layer, ", tokens_, " tokens, ",
                        attention_ ? "products and attention" : "products alone");
  }
  double bytes() const override { return Sum(&TimedOperator::bytes); }
  double flops() const override { return Sum(&TimedOperator::flops); }
  void Run(Crew& crew) override {
    for (const auto& part : parts_) part->Run(crew);
  }
  double Error(Crew&) override { return 0; }
  double allowed_error() const override { return 0; }

 private:
  double Sum(double (TimedOperator::*of)() const) const {
    double sum = 0;
    for (const auto& part : parts_) sum += (part.get()->*of)();
    return sum;
  }
  const int32_t tokens_;
  const bool attention_;
  std::vector<std::unique_ptr<TimedOperator>> parts_;
};

}  // namespace

OperandArena::OperandArena(size_t bytes) : buffer_(bytes) {
  SplitMix64 random(12345);
  for (size_t i = 0; i < buffer_.bytes() / 2; i += 4) {
    uint64_t bits = random();
    for (size_t k = 0; k < 4; ++k, bits = std::rotl(bits, 16)) {
      buffer_.as<uint16_t>()[i + k] = Bf16Near1(bits);
    }
  }
}

uint16_t* OperandArena::Next(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  SLUICE_CHECK(bytes <= buffer_.bytes());
  if (at_ + bytes > buffer_.bytes()) at_ = 0;
  uint16_t* const out = buffer_.as<uint16_t>() + at_ / 2;
  at_ += bytes;
  return out;
}

std::unique_ptr<TimedOperator> NewLinear(const LinearCase& shape, const KernelTable& path,
                                         OperandArena* arena) {
  return std::make_unique<Linear>(shape, path, arena);
}

std::unique_ptr<TimedOperator> NewAttention(const AttentionCase& shape, const KernelTable& path,
                                            OperandArena* arena) {
  return std::make_unique<Attention>(shape, path, arena);
}

std::unique_ptr<TimedOperator> NewSample(const SampleCase& shape, const KernelTable& path,
                                         int workers) {
  return std::make_unique<Sample>(shape, path, workers);
}

std::unique_ptr<TimedOperator> NewPrefillLayer(int32_t tokens, bool attention,
                                               const KernelTable& path, OperandArena* arena) {
  return std::make_unique<PrefillLayer>(tokens, attention, path, arena);
}

}  // namespace sluice::bench
