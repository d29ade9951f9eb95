#include "src/bench/workload/latent_drift.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/fp8.h"
#include "kernels/latent_params.h"
#include "src/base/dtype.h"
#include "src/base/status_macros.h"
#include "src/bench/workload/topic_path.h"
#include "src/model/dummy_weights.h"
#include "src/model/parallel.h"
#include "src/model/tensor_list.h"

namespace sluice::bench {
namespace {

// The residual's dimensions, in order: the part that layers write, the paths, the token's identity,
// and one constant dimension, which feeds the indexer's per-head weights.
struct Dimensions {
  Dimensions(const ModelConfig& config, int paths)
      : identity(config.hidden_size / 16),
        path((config.hidden_size / 2) / paths),
        work(config.hidden_size - paths * path - identity - 1) {}
  int64_t PathBegin(int p) const { return work + p * path; }

  int64_t identity, path, work;
};

constexpr double kIdentity = 0.3;  // Magnitude of a token's identity; that of the topics is 1.
constexpr double kConstant = 4;
constexpr float kOutput = 0.1f;  // Scale of the layers' output relative to the dummy formula.

class LatentDriftSource : public WeightSource {
 public:
  LatentDriftSource(const ModelConfig& config, const LatentDrift& options)
      : config_(config),
        options_(options),
        at_(config, options.paths),
        // The dimensions of an index key that RoPE leaves alone.
        features_(kernels::kIndexDim - config.latent->rope_dim),
        plain_(DummyWeights(config)) {
    for (int p = 0; p < options.paths; ++p) {
      paths_.push_back({options.seed, absl::StrCat("path ", p, " "), options.topics,
                        DriftOfPath(options, p), options.noise});
    }
  }

  std::optional<kernels::WeightFormula> Formula(const std::string& name) const override {
    if (Kind(name) != Tensor::kPlain) return std::nullopt;
    std::optional<kernels::WeightFormula> formula = plain_->Formula(name);
    if (!formula.has_value()) return formula;
    formula->state ^= options_.seed * 0x9E3779B97F4A7C15ull;
    const int64_t columns = OutputColumns(name);
    if (columns > 0) {  // Later rows would write to the dimensions of topics and identities.
      formula->scale *= kOutput;
      formula->live = static_cast<uint64_t>(at_.work * columns);
    }
    return formula;
  }
  bool IsFp8(const std::string& name) const override { return plain_->IsFp8(name); }

  absl::StatusOr<MatrixView> Matrix(const std::string& name, int64_t rows, int64_t cols) override {
    if (Formula(name).has_value()) return FromFormula(name, rows, cols);
    if (IsFp8(name)) return MadeFp8(name, rows, cols);
    auto owned = std::make_unique_for_overwrite<uint16_t[]>(static_cast<size_t>(rows * cols));
    ParallelFor(rows, [&](int64_t row) {
      std::vector<double> values(static_cast<size_t>(cols));
      FillRow(name, row, absl::MakeSpan(values));
      for (int64_t c = 0; c < cols; ++c) {
        owned[Index(row, cols, c)] = FloatToBFloat16(static_cast<float>(values[Index(0, 0, c)]));
      }
    });
    return MatrixView::Owned(std::move(owned), rows, cols);
  }

  absl::StatusOr<std::vector<float>> Vector(const std::string& name, int64_t n) override {
    const bool bias = absl::EndsWith(name, "bias");  // This includes the router's correction.
    return std::vector<float>(static_cast<size_t>(n), bias ? 0.0f : 1.0f);
  }

  absl::Status ReadBFloat16(const std::string& name, absl::Span<const int64_t> shape, int64_t first,
                            absl::Span<uint16_t> out) override {
    if (const auto formula = Formula(name); formula.has_value()) {
      kernels::FillWeights(*formula, first, static_cast<int64_t>(out.size()), out.data());
      return absl::OkStatus();
    }
    const int64_t cols = shape.back();
    std::vector<double> values(static_cast<size_t>(cols), shape.size() == 1 ? 1.0 : 0.0);
    int64_t filled = shape.size() == 1 ? 0 : -1;
    for (size_t i = 0; i < out.size(); ++i) {
      const int64_t at = first + static_cast<int64_t>(i);
      if (at / cols != filled) {
        std::fill(values.begin(), values.end(), 0.0);
        FillRow(name, filled = at / cols, absl::MakeSpan(values));
      }
      out[i] = FloatToBFloat16(static_cast<float>(values[static_cast<size_t>(at % cols)]));
    }
    return absl::OkStatus();
  }

  void Release(MatrixView) override {}
  absl::Status CheckNoLeftovers() override { return absl::OkStatus(); }

 private:
  enum class Tensor { kPlain, kEmbedding, kHead, kIndexKey, kQueryRank, kIndexQuery, kIndexWeight };
  static Tensor Kind(const std::string& name) {
    if (name == kEmbeddingTensor) return Tensor::kEmbedding;
    if (name == kHeadTensor) return Tensor::kHead;
    if (absl::EndsWith(name, "indexer.wk.weight")) return Tensor::kIndexKey;
    if (absl::EndsWith(name, "q_a_proj.weight")) return Tensor::kQueryRank;
    if (absl::EndsWith(name, "indexer.wq_b.weight")) return Tensor::kIndexQuery;
    if (absl::EndsWith(name, "indexer.weights_proj.weight")) return Tensor::kIndexWeight;
    return Tensor::kPlain;
  }
  int PathOf(const std::string& name) const {
    int layer = 0;
    while (!absl::StartsWith(name, LayerTensor(layer, ""))) ++layer;
    return PathOfLayer(options_, layer);
  }

  // Returns the columns of a matrix whose product is added to the residual, or 0 for any other
  // matrix.
  int64_t OutputColumns(const std::string& name) const {
    const LatentConfig& latent = *config_.latent;
    if (absl::EndsWith(name, "o_proj.weight")) return int64_t{config_.heads} * latent.v_dim;
    if (!absl::EndsWith(name, "down_proj.weight")) return 0;
    if (absl::StrContains(name, "shared_experts")) return latent.experts.shared_size();
    if (absl::StrContains(name, "experts")) return latent.experts.intermediate;
    return config_.intermediate_size;
  }

  absl::StatusOr<MatrixView> FromFormula(const std::string& name, int64_t rows, int64_t cols) {
    const kernels::WeightFormula formula = *Formula(name);
    const auto count = static_cast<size_t>(rows * cols);
    if (!IsFp8(name)) {
      auto owned = std::make_unique_for_overwrite<uint16_t[]>(count);
      kernels::FillWeights(formula, 0, rows * cols, owned.get());
      return MatrixView::Owned(std::move(owned), rows, cols);
    }
    auto owned = std::make_unique_for_overwrite<uint8_t[]>(count);
    kernels::FillWeights(formula, 0, rows * cols, owned.get());
    std::vector<float> scales(static_cast<size_t>(ScaleCount(rows, cols)),
                              kernels::FormulaScale(formula));
    return MatrixView::OwnedFp8(std::move(owned), std::move(scales), rows, cols);
  }

  static int64_t Blocks(int64_t n) { return (n + kScaleBlock - 1) / kScaleBlock; }

  // Returns an FP8 matrix with one scale for each 128 x 128 block.
  MatrixView MadeFp8(const std::string& name, int64_t rows, int64_t cols) const {
    auto owned = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(rows * cols));
    std::vector<float> scales(static_cast<size_t>(ScaleCount(rows, cols)));
    ParallelFor(Blocks(rows), [&](int64_t block) {
      const int64_t begin = block * kScaleBlock, end = std::min(begin + kScaleBlock, rows);
      std::vector<double> values(static_cast<size_t>((end - begin) * cols));
      for (int64_t row = begin; row < end; ++row) {
        FillRow(name, row, {values.data() + (row - begin) * cols, static_cast<size_t>(cols)});
      }
      for (int64_t column = 0; column < cols; column += kScaleBlock) {
        const int64_t width = std::min(kScaleBlock, cols - column);
        double largest = 0;
        for (int64_t row = begin; row < end; ++row) {
          for (int64_t c = column; c < column + width; ++c) {
            largest = std::max(largest, std::abs(values[Index(row - begin, cols, c)]));
          }
        }
        const float scale = kernels::E4M3Scale(static_cast<float>(largest));
        scales[static_cast<size_t>(block * Blocks(cols) + column / kScaleBlock)] = scale;
        for (int64_t row = begin; row < end; ++row) {
          for (int64_t c = column; c < column + width; ++c) {
            owned[Index(row, cols, c)] = kernels::FloatToE4M3(
                static_cast<float>(values[Index(row - begin, cols, c)]) / scale);
          }
        }
      }
    });
    return MatrixView::OwnedFp8(std::move(owned), std::move(scales), rows, cols);
  }
  static size_t Index(int64_t row, int64_t cols, int64_t column) {
    return static_cast<size_t>(row * cols + column);
  }

  // Adds feature `feature` of the path that the layer of tensor `name` sees to a row over the
  // residual.
  void AddProjection(const std::string& name, int64_t feature, absl::Span<double> row) const {
    const int p = PathOf(name);
    AddUniformRow(
        absl::StrCat("projection ", p), options_.seed, feature,
        1 / std::sqrt(static_cast<double>(at_.path)),
        row.subspan(static_cast<size_t>(at_.PathBegin(p)), static_cast<size_t>(at_.path)));
  }

  // Fills row `row` of a matrix that is not plain. REQUIRES: `out` holds zeros.
  void FillRow(const std::string& name, int64_t row, absl::Span<double> out) const {
    const auto part = [&](int64_t begin, int64_t count) {
      return out.subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
    };
    const int64_t identity = config_.hidden_size - 1 - at_.identity;
    const int64_t rope = config_.latent->rope_dim;
    switch (Kind(name)) {
      case Tensor::kEmbedding:
        AddUniformRow("work", options_.seed, row, 1, part(0, at_.work));
        for (int p = 0; p < options_.paths; ++p) {
          paths_[static_cast<size_t>(p)].Add(row, part(at_.PathBegin(p), at_.path));
        }
        AddUniformRow("identity", options_.seed, row, kIdentity, part(identity, at_.identity));
        out.back() = kConstant;
        break;
      case Tensor::kHead:
        AddUniformRow("identity", options_.seed, row > 0 ? row - 1 : config_.vocab_size - 1,
                      1 / (kIdentity * std::sqrt(static_cast<double>(at_.identity))),
                      part(identity, at_.identity));
        break;
      case Tensor::kIndexKey:
        if (row >= rope) AddProjection(name, row - rope, out);
        break;
      case Tensor::kQueryRank:
        if (row < features_) {
          AddProjection(name, row, out);
        } else {
          AddUniformRow(name, options_.seed, row,
                        1 / std::sqrt(static_cast<double>(config_.hidden_size)), out);
        }
        break;
      case Tensor::kIndexQuery: {
        const int64_t feature = row % kernels::kIndexDim - rope;
        if (feature < 0) break;
        AddUniformRow(name, options_.seed, row,
                      options_.head_change / std::sqrt(static_cast<double>(features_)),
                      part(0, features_));
        out[static_cast<size_t>(feature)] += 1;
        break;
      }
      case Tensor::kIndexWeight:
        out.back() = 1;
        break;
      case Tensor::kPlain:
        SLUICE_CHECK(false, "a plain tensor has its formula");
    }
  }

  const ModelConfig config_;
  const LatentDrift options_;
  const Dimensions at_;
  const int64_t features_;
  const std::unique_ptr<WeightSource> plain_;
  std::vector<TopicPath> paths_;
};

}  // namespace

int PathOfLayer(const LatentDrift& options, int layer) {
  int step = 3;  // Neighbouring layers get paths that lie far apart.
  while (std::gcd(step, options.paths) != 1) ++step;
  return layer * step % options.paths;
}

double DriftOfPath(const LatentDrift& options, int path) {
  if (options.paths == 1) return options.slowest;
  return options.slowest *
         std::pow(options.fastest / options.slowest, double(path) / (options.paths - 1));
}

absl::StatusOr<std::unique_ptr<WeightSource>> LatentDriftWeights(const ModelConfig& config,
                                                                 const LatentDrift& options) {
  if (!config.latent.has_value() || !config.latent->indexer.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "topic drift of an indexer needs a model that has one, found ", config.architecture));
  }
  if (config.tie_word_embeddings) {
    return absl::InvalidArgumentError(
        "topic drift needs a head of its own: tie_word_embeddings is true in config.json");
  }
  // Dimensions needs 128 for each path and 64 for identities.
  const int least = std::max(2 * options.paths, 8) * kernels::kIndexDim;
  if (options.paths < 1 || config.hidden_size < least) {
    return absl::InvalidArgumentError(absl::StrCat("topic drift: ", options.paths,
                                                   " paths need a hidden_size of at least ", least,
                                                   ", found ", config.hidden_size));
  }
  if (!(options.slowest > 0) || options.fastest < options.slowest) {
    return absl::InvalidArgumentError(
        absl::StrCat("topic drift: the slowest path's must be above 0 and at most the fastest's, ",
                     "found ", options.slowest, " and ", options.fastest));
  }
  if (config.latent->q_rank < kernels::kIndexDim - config.latent->rope_dim) {
    return absl::InvalidArgumentError(absl::StrCat("topic drift needs a q_lora_rank of at least ",
                                                   kernels::kIndexDim - config.latent->rope_dim,
                                                   ", found ", config.latent->q_rank));
  }
  return std::make_unique<LatentDriftSource>(config, options);
}

}  // namespace sluice::bench
