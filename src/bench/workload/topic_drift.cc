#include "src/bench/workload/topic_drift.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/dtype.h"
#include "src/base/status_macros.h"
#include "src/bench/workload/topic_path.h"
#include "src/model/dummy_weights.h"
#include "src/model/parallel.h"
#include "src/model/rope.h"
#include "src/model/tensor_list.h"

namespace sluice::bench {
namespace {

constexpr double kFast = 0.05;  // Scale of a row whose dimension RoPE turns: next to nothing.
// Approximate size of the additions of a dummy layer's attention and MLP to a residual of any size.
constexpr double kPlainAttention = 0.8;
constexpr double kPlainMlp = 1;
// The MLP's share of layer_change. It is small because an MLP turns two similar inputs further
// apart.
constexpr double kMlpShare = 0.25;
// The dimensions of the residual that hold the token's identity, and their magnitude, which is so
// low that neither norms nor MLPs notice.
constexpr int kIdentityFraction = 8;  // One dimension in so many.
constexpr double kIdentity = 0.1;     // The topic's elements have magnitude 1.

// The second path's least part in a head that turns, and its most in one that does not.
constexpr double kTurning = 0.5;
constexpr double kStill = 0.1;

class TopicDriftSource : public WeightSource {
 public:
  TopicDriftSource(const ModelConfig& config, const TopicDrift& options, std::vector<bool> slow)
      : config_(config),
        options_(options),
        path_{options.seed, "", options.topics, options.drift, options.noise, options.jump},
        turning_{options.seed,    "turning",     options.topics,
                 options.turning, options.noise, options.jump},
        slow_(std::move(slow)),
        plain_(DummyWeights(config)),
        topic_dims_(config.hidden_size - config.hidden_size / kIdentityFraction) {}

  std::optional<kernels::WeightFormula> Formula(const std::string& name) const override {
    if (Kind(name) != Tensor::kPlain) return std::nullopt;
    std::optional<kernels::WeightFormula> formula = plain_->Formula(name);
    if (formula.has_value()) {
      formula->state ^= options_.seed * 0x9E3779B97F4A7C15ull;
      if (const double scale = OutputScale(name); scale != 0) {
        formula->scale *= static_cast<float>(scale);
        // The last rows write to the dimensions of the token's identity.
        const int64_t columns =
            absl::EndsWith(name, "o_proj.weight") ? config_.q_size() : config_.intermediate_size;
        formula->live = static_cast<uint64_t>(topic_dims_ * columns);
      }
    }
    return formula;
  }

  bool IsFp8(const std::string&) const override { return false; }

  absl::StatusOr<MatrixView> Matrix(const std::string& name, int64_t rows, int64_t cols) override {
    auto owned = std::make_unique_for_overwrite<uint16_t[]>(static_cast<size_t>(rows * cols));
    if (const auto formula = Formula(name); formula.has_value()) {
      kernels::FillWeights(*formula, 0, rows * cols, owned.get());
      return MatrixView::Owned(std::move(owned), rows, cols);
    }
    // An embedding of Qwen3-14B has 778 M values, each of which takes three hashes.
    ParallelFor(rows, [&](int64_t row) {
      FillRow(name, row, {owned.get() + row * cols, static_cast<size_t>(cols)});
    });
    return MatrixView::Owned(std::move(owned), rows, cols);
  }

  absl::StatusOr<std::vector<float>> Vector(const std::string& name, int64_t n) override {
    if (absl::EndsWith(name, "bias")) return std::vector<float>(static_cast<size_t>(n));
    // After their norms, queries and keys have length sqrt(head_dim) times this.
    const bool head_norm = absl::StrContains(name, "q_norm") || absl::StrContains(name, "k_norm");
    return std::vector<float>(static_cast<size_t>(n), head_norm ? Gain() : 1.0f);
  }

  absl::Status ReadBFloat16(const std::string& name, absl::Span<const int64_t> shape, int64_t first,
                            absl::Span<uint16_t> out) override {
    if (shape.size() == 1) {
      SLUICE_ASSIGN_OR_RETURN(const std::vector<float> all, Vector(name, shape[0]));
      for (size_t i = 0; i < out.size(); ++i) {
        out[i] = FloatToBFloat16(all[static_cast<size_t>(first) + i]);
      }
      return absl::OkStatus();
    }
    if (const auto formula = Formula(name); formula.has_value()) {
      kernels::FillWeights(*formula, first, static_cast<int64_t>(out.size()), out.data());
      return absl::OkStatus();
    }
    const int64_t cols = shape[1];
    std::vector<uint16_t> row(static_cast<size_t>(cols));
    int64_t filled = -1;
    for (size_t i = 0; i < out.size(); ++i) {
      const int64_t at = first + static_cast<int64_t>(i);
      if (at / cols != filled) FillRow(name, filled = at / cols, absl::MakeSpan(row));
      out[i] = row[static_cast<size_t>(at % cols)];
    }
    return absl::OkStatus();
  }

  void Release(MatrixView) override {}
  absl::Status CheckNoLeftovers() override { return absl::OkStatus(); }

 private:
  enum class Tensor { kPlain, kEmbedding, kHead, kQuery, kKey };
  static Tensor Kind(const std::string& name) {
    if (name == kEmbeddingTensor) return Tensor::kEmbedding;
    if (name == kHeadTensor) return Tensor::kHead;
    if (absl::EndsWith(name, "q_proj.weight")) return Tensor::kQuery;
    if (absl::EndsWith(name, "k_proj.weight")) return Tensor::kKey;
    return Tensor::kPlain;
  }

  float Gain() const {
    return static_cast<float>(std::sqrt(options_.sharpness / std::sqrt(config_.head_dim)));
  }

  // Returns the scale of o_proj and down_proj, which allows for the growth of the residual in
  // earlier layers, and 0 for other tensors.
  double OutputScale(const std::string& name) const {
    const bool attention = absl::EndsWith(name, "o_proj.weight");
    if (!attention && !absl::EndsWith(name, "down_proj.weight")) return 0;
    const double r = options_.layer_change;
    const double growth = 1 + r * r * (1 + kMlpShare * kMlpShare);
    for (int layer = 0; layer < config_.layers; ++layer) {
      if (absl::StartsWith(name, LayerTensor(layer, ""))) {
        return (attention ? r / kPlainAttention : kMlpShare * r / kPlainMlp) *
               std::pow(growth, 0.5 * layer);
      }
    }
    return 0;
  }

  void FillRow(const std::string& name, int64_t row, absl::Span<uint16_t> out) const {
    std::vector<double> values(out.size());
    const auto topic = absl::MakeSpan(values).subspan(0, static_cast<size_t>(topic_dims_));
    const auto identity = absl::MakeSpan(values).subspan(topic.size());
    const double by_columns = 1 / std::sqrt(static_cast<double>(out.size()));
    const int64_t dim = config_.head_dim;
    switch (Kind(name)) {
      case Tensor::kEmbedding:
        if (options_.turning_heads > 0) {
          path_.Add(row, topic.subspan(0, topic.size() / 2));
          turning_.Add(row, topic.subspan(topic.size() / 2));
        } else {
          path_.Add(row, topic);
        }
        AddUniformRow("identity", options_.seed, row, kIdentity, identity);
        break;
      case Tensor::kHead:
        AddUniformRow("identity", options_.seed, row > 0 ? row - 1 : config_.vocab_size - 1,
                      by_columns / kIdentity, identity);
        break;
      case Tensor::kKey:
        AddProjection(name, row, by_columns * RowScale(row), Turning(name, row / dim), topic);
        break;
      case Tensor::kQuery: {
        const int64_t head = row / dim;
        const int64_t group = config_.heads / config_.kv_heads;
        const std::string key(absl::StrCat(name.substr(0, name.rfind("q_proj")), "k_proj.weight"));
        const double scale =
            by_columns * RowScale(row) / std::sqrt(1 + options_.head_change * options_.head_change);
        const double turning = Turning(key, head / group);
        AddProjection(key, head / group * dim + row % dim, scale, turning, topic);
        AddProjection(name, row, scale * options_.head_change, turning, topic);
        break;
      }
      case Tensor::kPlain:
        SLUICE_CHECK(false, "a plain tensor has its formula");
    }
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = FloatToBFloat16(static_cast<float>(values[i]));
    }
  }
  // Adds a row of a projection of the topic. Of the length of what it gives, squared, `turning` is
  // from the second path.
  void AddProjection(const std::string& name, int64_t row, double scale, double turning,
                     absl::Span<double> topic) const {
    if (options_.turning_heads == 0) return AddUniformRow(name, options_.seed, row, scale, topic);
    const size_t half = topic.size() / 2;
    AddUniformRow(name, options_.seed, row, scale * std::sqrt(2 * (1 - turning)),
                  topic.subspan(0, half));
    AddUniformRow(absl::StrCat(name, " turning"), options_.seed, row,
                  scale * std::sqrt(2 * turning), topic.subspan(half));
  }
  // Draws how much of a KV head's queries and keys comes from the second path: most of it in the
  // heads that turn, little in the others.
  double Turning(const std::string& key, int64_t kv_head) const {
    if (options_.turning_heads == 0) return 0;
    float drawn[2];  // from -1 to 1
    DummyUniform(absl::StrCat(key, " turns"), options_.seed, 2 * kv_head, absl::MakeSpan(drawn));
    const double which = 0.5 + 0.5 * double{drawn[0]}, part = 0.5 + 0.5 * double{drawn[1]};
    return which < options_.turning_heads ? kTurning + (1 - kTurning) * part : kStill * part;
  }
  // Returns the scale of a row of W_q or W_k: nearly all lies in the dimensions that RoPE leaves
  // alone, with the length that norms would give.
  double RowScale(int64_t row) const {
    const bool slow = slow_[static_cast<size_t>(row % config_.head_dim)];
    const auto count = static_cast<double>(std::count(slow_.begin(), slow_.end(), true));
    const double length = config_.qk_norm ? 1 : Gain() * std::sqrt(config_.head_dim / count);
    return slow ? length : kFast * length;
  }

  const ModelConfig config_;
  const TopicDrift options_;
  const TopicPath path_, turning_;
  const std::vector<bool> slow_;  // [head_dim]
  const std::unique_ptr<WeightSource> plain_;
  // Topic dimensions of the residual; the others hold the token's identity.
  const int64_t topic_dims_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WeightSource>> TopicDriftWeights(const ModelConfig& config,
                                                                const TopicDrift& options) {
  if (config.tie_word_embeddings) {
    return absl::InvalidArgumentError(
        "topic drift needs a head of its own: tie_word_embeddings is true in config.json");
  }
  const std::vector<float> frequencies = RopeInverseFrequencies(config.rope, config.head_dim);
  const size_t half = frequencies.size();
  std::vector<bool> slow(2 * half);
  for (size_t i = 0; i < half; ++i) {
    slow[i] = slow[half + i] = double{frequencies[i]} * options.max_context < 1;
  }
  if (std::count(slow.begin(), slow.end(), true) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("topic drift needs dimensions that RoPE turns by less than a radian over ",
                     options.max_context,
                     " tokens, and this geometry has none: take a larger rope_theta, or "
                     "shorter contexts"));
  }
  return std::make_unique<TopicDriftSource>(config, options, std::move(slow));
}

std::vector<int32_t> TopicDriftContext(const ModelConfig& config, const TopicDrift& options,
                                       int tokens, int more, SplitMix64& random) {
  std::vector<int32_t> out;
  while (static_cast<int>(out.size()) < tokens) {
    const int left = tokens - static_cast<int>(out.size());
    const int length = std::min(options.segment, left);
    const int follows = length == left ? more : 0;
    SLUICE_CHECK(config.vocab_size > length + follows + 1, "the path is longer than that");
    const auto first = static_cast<int32_t>(
        1 + random.Below(static_cast<uint64_t>(config.vocab_size - length - follows - 1)));
    for (int i = 0; i < length; ++i) out.push_back(first + i);
  }
  return out;
}

}  // namespace sluice::bench
