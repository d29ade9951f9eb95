#include "src/profile/fluxion/predictor_training.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using Form = FluxionPredictor::Form;

constexpr std::array<int, 3> kHidden = {256, 256, 128};
constexpr std::array<float, 5> kLogBlocks = {0, 4, 5, 6, 7};  // of FluxionSample::budgets
constexpr float kLeastBudget = 1.0f / 4096;                   // of which a logarithm is taken
constexpr int kValidationStride = 5;

// The widths of all layers are padded with zeros to whole tiles of the product below. The padding
// gets no gradient, so it stays 0.
constexpr int64_t kTileRows = 4, kTileColumns = 8;
constexpr int64_t Padded(int64_t width) {
  return (width + kTileColumns - 1) / kTileColumns * kTileColumns;
}

// Neighbouring sums. Compilers left to find vectors themselves choose slow shuffles at -O3.
using Lanes = float __attribute__((vector_size(kTileColumns * sizeof(float) / 2)));

Lanes Load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// Adds a tile of kRows rows of a product. `b` is [depth][kTileColumns]. Every sum takes its terms
// in order.
template <int kRows>
void AddTile(int64_t depth, const float* a, int64_t row_step, int64_t depth_step, const float* b,
             float* c, int64_t columns) {
  constexpr int64_t kHalf = kTileColumns / 2;
  Lanes left[kRows], right[kRows];
  for (int r = 0; r < kRows; ++r) {
    left[r] = Load(c + r * columns);
    right[r] = Load(c + r * columns + kHalf);
  }
  for (int64_t d = 0; d < depth; ++d) {
    const Lanes b_left = Load(b + d * kTileColumns);
    const Lanes b_right = Load(b + d * kTileColumns + kHalf);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float factor = a[r * row_step + d * depth_step];
      left[r] += factor * b_left;
      right[r] += factor * b_right;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(c + r * columns, &left[r], sizeof(Lanes));
    std::memcpy(c + r * columns + kHalf, &right[r], sizeof(Lanes));
  }
}

// A matrix whose element [row][depth] is at row * row_step + depth * depth_step, so that a
// transposed one needs no copy.
struct Factor {
  const float* data;
  int64_t row_step, depth_step;
};

// Adds the product of `a`, [rows][depth], and `b`, [depth][columns], to `c`, [rows][columns].
void AddProduct(int64_t rows, int64_t depth, int64_t columns, const Factor& a, const float* b,
                float* c) {
  std::vector<float> panel(static_cast<size_t>(depth * kTileColumns));
  for (int64_t column = 0; column < columns; column += kTileColumns) {
    for (int64_t d = 0; d < depth; ++d) {
      std::copy_n(b + d * columns + column, kTileColumns, panel.data() + d * kTileColumns);
    }
    int64_t row = 0;
    for (; row + kTileRows <= rows; row += kTileRows) {
      AddTile<kTileRows>(depth, a.data + row * a.row_step, a.row_step, a.depth_step, panel.data(),
                         c + row * columns + column, columns);
    }
    for (; row < rows; ++row) {
      AddTile<1>(depth, a.data + row * a.row_step, a.row_step, a.depth_step, panel.data(),
                 c + row * columns + column, columns);
    }
  }
}

double Normal(SplitMix64& random) {
  const double radius = std::sqrt(-2 * std::log(1 - random.Uniform()));
  return radius * std::cos(2 * M_PI * random.Uniform());
}

// Numbers that Adam moves.
struct Trained {
  explicit Trained(int64_t count)
      : values(static_cast<size_t>(count)),
        gradient(values.size()),
        first(values.size()),
        second(values.size()) {}
  // `rate` has the corrections of both moments in it.
  void Step(float rate) {
    constexpr float kFirst = 0.9f, kSecond = 0.999f, kEpsilon = 1e-8f;
    for (size_t i = 0; i < values.size(); ++i) {
      first[i] = kFirst * first[i] + (1 - kFirst) * gradient[i];
      second[i] = kSecond * second[i] + (1 - kSecond) * gradient[i] * gradient[i];
      values[i] -= rate * first[i] / (std::sqrt(second[i]) + kEpsilon);
      gradient[i] = 0;
    }
  }
  std::vector<float> values, gradient, first, second;
};

struct Layer {
  // Weights start as He's, times `scale`.
  Layer(int64_t inputs, int64_t outputs, double scale, SplitMix64& random)
      : in(inputs),
        out(outputs),
        padded_in(Padded(inputs)),
        padded_out(Padded(outputs)),
        weights(padded_in * padded_out),
        bias(padded_out),
        transposed(weights.values.size()) {
    const double deviation = scale * std::sqrt(2 / static_cast<double>(in));
    for (int64_t o = 0; o < out; ++o) {
      for (int64_t i = 0; i < in; ++i) {
        weights.values[static_cast<size_t>(o * padded_in + i)] =
            static_cast<float>(deviation * Normal(random));
      }
    }
    Transpose();
  }
  void Transpose() {
    constexpr int64_t kBlock = 8;
    for (int64_t from = 0; from < padded_out; from += kBlock) {
      for (int64_t i = 0; i < padded_in; ++i) {
        for (int64_t o = from; o < from + kBlock; ++o) {
          transposed[static_cast<size_t>(i * padded_out + o)] =
              weights.values[static_cast<size_t>(o * padded_in + i)];
        }
      }
    }
  }
  int64_t in, out, padded_in, padded_out;
  Trained weights;  // [padded_out][padded_in]
  Trained bias;
  std::vector<float> transposed;  // [padded_in][padded_out], of the weights
};

// The network with a batch in it.
class Network {
 public:
  Network(int64_t outputs, int64_t most_rows, SplitMix64& random) {
    int64_t in = kernels::kFluxionFeatures;
    values_.emplace_back(static_cast<size_t>(most_rows * Padded(in)));
    for (const int hidden : kHidden) {
      Add(in, hidden, 1, most_rows, random);
      in = hidden;
    }
    // Outputs start near their bias. The slope of kLine is taken 7 times, and at full scale its
    // noise at the start costs epochs to unlearn.
    Add(in, outputs, 0.1, most_rows, random);
  }

  // A row of inputs, of Padded(kernels::kFluxionFeatures), to be filled before Forward.
  float* inputs(int64_t row) { return values_[0].data() + row * layers_[0].padded_in; }
  const float* outputs(int64_t row) const {
    return values_.back().data() + row * layers_.back().padded_out;
  }
  // A row of the loss's gradient by outputs, to be filled before Backward.
  float* output_gradients(int64_t row) {
    return gradients_.back().data() + row * layers_.back().padded_out;
  }
  std::vector<float>& output_bias() { return layers_.back().bias.values; }

  void Forward(int64_t rows) {
    for (size_t l = 0; l < layers_.size(); ++l) {
      const Layer& layer = layers_[l];
      float* const out = values_[l + 1].data();
      for (int64_t row = 0; row < rows; ++row) {
        std::copy_n(layer.bias.values.data(), layer.padded_out, out + row * layer.padded_out);
      }
      AddProduct(rows, layer.padded_in, layer.padded_out, {values_[l].data(), layer.padded_in, 1},
                 layer.transposed.data(), out);
      if (l + 1 < layers_.size()) Gelu(rows * layer.padded_out, out, slopes_[l].data());
    }
  }

  void Backward(int64_t rows) {
    for (size_t l = layers_.size(); l-- > 0;) {
      Layer& layer = layers_[l];
      const float* const of_out = gradients_[l].data();
      AddProduct(layer.padded_out, rows, layer.padded_in, {of_out, 1, layer.padded_out},
                 values_[l].data(), layer.weights.gradient.data());
      float* const of_bias = layer.bias.gradient.data();
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t o = 0; o < layer.padded_out; ++o) {
          of_bias[o] += of_out[row * layer.padded_out + o];
        }
      }
      if (l == 0) break;
      float* const of_in = gradients_[l - 1].data();
      std::fill_n(of_in, rows * layer.padded_in, 0.0f);
      AddProduct(rows, layer.padded_out, layer.padded_in, {of_out, layer.padded_out, 1},
                 layer.weights.values.data(), of_in);
      const float* const slopes = slopes_[l - 1].data();
      for (int64_t i = 0; i < rows * layer.padded_in; ++i) of_in[i] *= slopes[i];
    }
  }

  void Step(double rate) {
    first_decay_ *= 0.9;
    second_decay_ *= 0.999;
    const auto corrected =
        static_cast<float>(rate * std::sqrt(1 - second_decay_) / (1 - first_decay_));
    for (Layer& layer : layers_) {
      layer.weights.Step(corrected);
      layer.bias.Step(corrected);
      layer.Transpose();
    }
  }

  std::vector<FluxionPredictor::Layer> Layers() const {
    std::vector<FluxionPredictor::Layer> copies;
    for (const Layer& layer : layers_) {
      FluxionPredictor::Layer& copy = copies.emplace_back();
      copy.in = static_cast<int>(layer.in);
      copy.out = static_cast<int>(layer.out);
      for (int64_t o = 0; o < layer.out; ++o) {
        const auto row = layer.weights.values.begin() + o * layer.padded_in;
        copy.weights.insert(copy.weights.end(), row, row + layer.in);
      }
      copy.bias.assign(layer.bias.values.begin(), layer.bias.values.begin() + layer.out);
    }
    return copies;
  }

 private:
  void Add(int64_t in, int64_t out, double scale, int64_t most_rows, SplitMix64& random) {
    layers_.emplace_back(in, out, scale, random);
    const auto size = static_cast<size_t>(most_rows * Padded(out));
    values_.emplace_back(size);
    slopes_.emplace_back(size);
    gradients_.emplace_back(size);
  }

  static void Gelu(int64_t count, float* values, float* slopes) {
    for (int64_t i = 0; i < count; ++i) {
      const float x = values[i];
      const float share = 0.5f * (1 + std::erf(x * 0.70710678f));
      values[i] = x * share;
      slopes[i] = share + x * 0.39894228f * std::exp(-0.5f * x * x);
    }
  }

  std::vector<Layer> layers_;
  std::vector<std::vector<float>> values_;     // the inputs, then what each layer gives
  std::vector<std::vector<float>> slopes_;     // GELU's, by layers
  std::vector<std::vector<float>> gradients_;  // by what each layer gives, before GELU
  double first_decay_ = 1, second_decay_ = 1;
};

struct Loss {
  double budgets = 0, streaming = 0;
};

float LogBudget(float budget) { return std::log2(std::max(budget, kLeastBudget)); }

// Returns the losses of a sample. `gradient` gets those of its outputs; that of budgets is weighed
// by `budget_weight`, as only some samples have them.
Loss LossOf(const FluxionSample& sample, Form form, float quantile, float budget_weight,
            const float* outputs, float* gradient) {
  Loss loss;
  const int count = FluxionOutputs(form);
  std::fill_n(gradient, count, 0.0f);
  const float logit = outputs[count - 1];
  loss.streaming = double{std::max(logit, 0.0f) - (sample.streaming ? logit : 0) +
                          std::log1p(std::exp(-std::abs(logit)))};
  gradient[count - 1] = FluxionSigmoid(logit) - (sample.streaming ? 1.0f : 0.0f);
  if (sample.streaming) return loss;
  const auto pinball = [&](float want, float got, float share) {
    const float slope = want > got ? -quantile : 1 - quantile;
    loss.budgets += double{slope * (got - want) * share};
    return slope * share * budget_weight;
  };
  if (form == Form::kFour) {
    for (size_t i = 0; i < kernels::kFluxionLevels; ++i) {
      gradient[i] += pinball(LogBudget(sample.budgets[i + 1]), outputs[i], 0.25f);
    }
  } else {
    for (size_t i = 0; i < kLogBlocks.size(); ++i) {
      const float slope = pinball(sample.budgets[i], outputs[0] + outputs[1] * kLogBlocks[i], 0.2f);
      gradient[0] += slope;
      gradient[1] += slope * kLogBlocks[i];
    }
  }
  return loss;
}

// Samples as indices, with the number of those that need a budget.
struct Part {
  std::vector<size_t> samples;
  int64_t retrieval = 0;
};

absl::Status CheckOptions(const PredictorTrainingOptions& options) {
  const auto wrong = [](const char* name, const char* expected, double found) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": expected ", expected, ", found ", found));
  };
  if (!(options.quantile > 0 && options.quantile < 1)) {
    return wrong("quantile", "a number between 0 and 1", options.quantile);
  }
  if (options.epochs < 1) return wrong("epochs", "1 or more", options.epochs);
  if (options.batch < 1 || options.batch > 65536) {
    return wrong("batch", "1 to 65536", options.batch);
  }
  if (!(options.rate > 0 && options.rate <= 1)) {
    return wrong("rate", "a number above 0, at most 1", options.rate);
  }
  if (!(options.false_streaming >= 0 && options.false_streaming < 1)) {
    return wrong("false_streaming", "a number from 0 to less than 1", options.false_streaming);
  }
  if (!(options.tau >= 0 && options.tau <= 1)) return wrong("tau", "0 to 1", options.tau);
  return absl::OkStatus();
}

absl::Status CheckSample(const FluxionSample& sample, size_t index) {
  const auto wrong = [&](const char* list, size_t i, const char* expected, float found) {
    return absl::InvalidArgumentError(
        absl::StrCat("samples[", index, "]: ", list, "[", i, "]: expected ", expected, ", found ",
                     found, ": measure the texts of document ", sample.document, " again"));
  };
  for (size_t i = 0; i < sample.features.size(); ++i) {
    if (!std::isfinite(sample.features[i])) {
      return wrong("features", i, "a finite number", sample.features[i]);
    }
  }
  for (size_t i = 0; i < sample.budgets.size(); ++i) {
    if (!(sample.budgets[i] >= 0 && sample.budgets[i] <= 1)) {
      return wrong("budgets", i, "a share from 0 to 1", sample.budgets[i]);
    }
  }
  return absl::OkStatus();
}

absl::Status Divide(absl::Span<const FluxionSample> samples, Part* training, Part* validation) {
  std::set<int32_t> documents;
  for (const FluxionSample& sample : samples) documents.insert(sample.document);
  if (documents.size() < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("samples: they are of ", documents.size(),
                     " documents, training needs 2 or more, as one in ", kValidationStride,
                     " is kept for validation: give more texts"));
  }
  std::set<int32_t> kept;
  int index = 0;
  for (const int32_t document : documents) {
    if (index++ % kValidationStride == 0) kept.insert(document);
  }
  for (size_t i = 0; i < samples.size(); ++i) {
    Part& part = kept.contains(samples[i].document) ? *validation : *training;
    part.samples.push_back(i);
    part.retrieval += samples[i].streaming ? 0 : 1;
  }
  for (const auto& [part, name] : {std::pair(training, "training"), {validation, "validation"}}) {
    if (part->retrieval > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("samples: all ", part->samples.size(), " of ", name,
                     " stream, so no budget can be learnt: give more texts, or longer ones"));
  }
  return absl::OkStatus();
}

void SetScale(absl::Span<const FluxionSample> samples, const Part& training,
              FluxionPredictor* predictor) {
  const auto count = static_cast<double>(training.samples.size());
  for (size_t f = 0; f < static_cast<size_t>(kernels::kFluxionFeatures); ++f) {
    double sum = 0, squares = 0;
    for (const size_t i : training.samples) sum += double{samples[i].features[f]};
    const double mean = sum / count;
    for (const size_t i : training.samples) {
      const double off = double{samples[i].features[f]} - mean;
      squares += off * off;
    }
    const double deviation = std::sqrt(squares / count);
    // Less than this is the rounding of numbers that are the same.
    const bool varies = deviation > 1e-6 * std::abs(mean) && deviation > 1e-30;
    predictor->mean.push_back(static_cast<float>(mean));
    predictor->deviation.push_back(varies ? static_cast<float>(deviation) : 1.0f);
  }
}

class Trainer {
 public:
  Trainer(absl::Span<const FluxionSample> samples, const PredictorTrainingOptions& options,
          const Part& training, PredictorTraining* result)
      : samples_(samples),
        options_(options),
        result_(*result),
        random_(options.seed),
        network_(FluxionOutputs(options.form), options.batch, random_),
        budget_weight_(static_cast<float>(training.samples.size()) /
                       static_cast<float>(training.retrieval)) {
    // The network starts at the mean of budgets, which for logarithms is far from 0.
    const bool four = options.form == Form::kFour;
    std::vector<float>& bias = network_.output_bias();
    const size_t means = four ? kernels::kFluxionLevels : 1;
    for (size_t m = 0; m < means; ++m) {
      double sum = 0;
      for (const size_t i : training.samples) {
        if (samples[i].streaming) continue;
        const std::array<float, 5>& b = samples[i].budgets;
        sum += four ? double{LogBudget(b[m + 1])} : std::accumulate(b.begin(), b.end(), 0.0) / 5;
      }
      bias[m] = static_cast<float>(sum / static_cast<double>(training.retrieval));
    }
  }

  // Runs the samples in this order, and returns the mean loss.
  double Epoch(const Part& part, const std::function<double()>& next_rate) {
    Loss sum;
    const std::vector<float>& mean = result_.predictor.mean;
    const std::vector<float>& deviation = result_.predictor.deviation;
    const auto all = std::ssize(part.samples);
    for (int64_t begin = 0; begin < all; begin += options_.batch) {
      const int64_t rows = std::min<int64_t>(options_.batch, all - begin);
      const auto sample = [&](int64_t row) -> const FluxionSample& {
        return samples_[part.samples[static_cast<size_t>(begin + row)]];
      };
      for (int64_t row = 0; row < rows; ++row) {
        float* const inputs = network_.inputs(row);
        for (size_t f = 0; f < mean.size(); ++f) {
          inputs[f] = (sample(row).features[f] - mean[f]) / deviation[f];
        }
      }
      network_.Forward(rows);
      for (int64_t row = 0; row < rows; ++row) {
        float* const gradient = network_.output_gradients(row);
        const Loss loss = LossOf(sample(row), options_.form, static_cast<float>(options_.quantile),
                                 budget_weight_, network_.outputs(row), gradient);
        sum.budgets += loss.budgets;
        sum.streaming += loss.streaming;
        for (int i = 0; i < FluxionOutputs(options_.form); ++i) {
          gradient[i] /= static_cast<float>(rows);
        }
      }
      if (!next_rate) continue;
      network_.Backward(rows);
      network_.Step(next_rate());
    }
    return sum.budgets / static_cast<double>(part.retrieval) +
           sum.streaming / static_cast<double>(all);
  }

  void Run(Part training, const Part& validation,
           const std::function<void(int64_t, int64_t)>& progress) {
    const int64_t batches = (std::ssize(training.samples) + options_.batch - 1) / options_.batch;
    const auto steps = static_cast<double>(batches * options_.epochs);
    int64_t step = 0;
    const auto next_rate = [&] {
      return options_.rate * 0.5 * (1 + std::cos(M_PI * static_cast<double>(step++) / steps));
    };
    result_.validation_loss = std::numeric_limits<double>::infinity();
    for (int epoch = 1; epoch <= options_.epochs; ++epoch) {
      for (size_t i = training.samples.size(); i > 1; --i) {
        std::swap(training.samples[i - 1], training.samples[random_.Below(i)]);
      }
      const double training_loss = Epoch(training, next_rate);
      const double validation_loss = Epoch(validation, nullptr);
      if (validation_loss < result_.validation_loss) {
        result_.training_loss = training_loss;
        result_.validation_loss = validation_loss;
        result_.best_epoch = epoch;
        result_.predictor.layers = network_.Layers();
      }
      if (progress) progress(epoch, options_.epochs);
    }
  }

 private:
  absl::Span<const FluxionSample> samples_;
  const PredictorTrainingOptions& options_;
  PredictorTraining& result_;
  SplitMix64 random_;
  Network network_;
  float budget_weight_;
};

// Sets the threshold of streaming and judges it. It goes by the predictor's own outputs, whose
// rounding may differ from that of the network in training.
void SetThreshold(absl::Span<const FluxionSample> samples, const Part& validation,
                  double false_streaming, PredictorTraining* result) {
  std::vector<float> scores, retrieval;
  for (const size_t i : validation.samples) {
    scores.push_back(FluxionSigmoid(result->predictor.Outputs(samples[i].features).back()));
    if (!samples[i].streaming) retrieval.push_back(scores.back());
  }
  std::sort(retrieval.begin(), retrieval.end(), std::greater<>());
  const auto count = static_cast<double>(retrieval.size());
  const auto allowed = static_cast<size_t>(false_streaming * count);
  const float threshold = retrieval[std::min(allowed, retrieval.size() - 1)];
  result->predictor.streaming_threshold = threshold;
  int64_t right = 0, wrongly_streaming = 0;
  for (size_t k = 0; k < scores.size(); ++k) {
    const bool streams = scores[k] > threshold;
    const bool wanted = samples[validation.samples[k]].streaming;
    right += streams == wanted ? 1 : 0;
    wrongly_streaming += streams && !wanted ? 1 : 0;
  }
  result->streaming_accuracy = static_cast<double>(right) / static_cast<double>(scores.size());
  result->false_streaming = static_cast<double>(wrongly_streaming) / count;
}

}  // namespace

absl::StatusOr<PredictorTraining> TrainFluxionPredictor(
    absl::Span<const FluxionSample> samples, const PredictorTrainingOptions& options,
    const std::function<void(int64_t, int64_t)>& progress) {
  SLUICE_RETURN_IF_ERROR(CheckOptions(options));
  for (size_t i = 0; i < samples.size(); ++i) SLUICE_RETURN_IF_ERROR(CheckSample(samples[i], i));
  Part training, validation;
  SLUICE_RETURN_IF_ERROR(Divide(samples, &training, &validation));
  PredictorTraining result;
  result.predictor.form = options.form;
  result.predictor.tau = options.tau;
  SetScale(samples, training, &result.predictor);
  Trainer(samples, options, training, &result).Run(training, validation, progress);
  if (result.best_epoch == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rate: with ", options.rate, " the loss is not finite: use a lower rate"));
  }
  SetThreshold(samples, validation, options.false_streaming, &result);
  return result;
}

}  // namespace sluice
