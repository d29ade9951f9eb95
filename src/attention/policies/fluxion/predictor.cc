#include "src/attention/policies/fluxion/predictor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "src/base/checked_file.h"
#include "src/base/config_reader.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using nlohmann::json;

// Versions 1 to 3 were trained by budgets of other digests.
constexpr CheckedFormat kFormat = {"sluice-fluxion-predictor",
                                   4,
                                   "a predictor of policy fluxion",
                                   "sluice-profile fluxion trained",
                                   "train the predictor again with sluice-profile fluxion",
                                   int64_t{64} << 20};  // real ones: half a MiB
constexpr size_t kMostLayers = kernels::kFluxionMostLayers;
constexpr int64_t kMostWidth = kernels::kFluxionMostWidth;
constexpr size_t kFingerprintDigits = 64;
constexpr char kRemedy[] = ": train the predictor again with sluice-profile fluxion";

bool AllFinite(absl::Span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

float Gelu(float x) { return x * (0.5f * (1 + std::erf(x * 0.70710678f))); }

// Returns W x + b. Neighbouring outputs are summed side by side, as a sum in order has to wait for
// each of its terms.
std::vector<float> Apply(const FluxionPredictor::Layer& layer, const std::vector<float>& x) {
  constexpr size_t kSideBySide = 8;
  const size_t in = x.size();
  std::vector<float> sums = layer.bias;
  size_t o = 0;
  for (; o + kSideBySide <= sums.size(); o += kSideBySide) {
    std::array<float, kSideBySide> some;
    std::copy_n(sums.begin() + static_cast<int64_t>(o), kSideBySide, some.begin());
    const float* const weights = layer.weights.data() + o * in;
    for (size_t i = 0; i < in; ++i) {
      for (size_t j = 0; j < kSideBySide; ++j) some[j] += weights[j * in + i] * x[i];
    }
    std::copy(some.begin(), some.end(), sums.begin() + static_cast<int64_t>(o));
  }
  for (; o < sums.size(); ++o) {
    for (size_t i = 0; i < in; ++i) sums[o] += layer.weights[o * in + i] * x[i];
  }
  return sums;
}

const char* NameOf(FluxionPredictor::Form form) {
  return form == FluxionPredictor::Form::kLine ? "line" : "four";
}

json HeaderOf(const FluxionPredictor& predictor) {
  json widths = json::array({kernels::kFluxionFeatures});
  for (const FluxionPredictor::Layer& layer : predictor.layers) widths.push_back(layer.out);
  return {{"model_fingerprint", predictor.model_fingerprint},
          {"form", NameOf(predictor.form)},
          {"tau", predictor.tau},
          {"streaming_threshold", predictor.streaming_threshold},
          {"layers", widths},
          {"mean", predictor.mean},
          {"deviation", predictor.deviation}};
}

absl::Status WithRemedy(const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(status.message(), kRemedy));
}

absl::Status ParseFeatures(const ConfigReader& reader, const char* key,
                           std::vector<float>* values) {
  if (!reader.Has(key) || !reader.At(key).is_array() ||
      reader.At(key).size() != static_cast<size_t>(kernels::kFluxionFeatures) ||
      !std::all_of(reader.At(key).begin(), reader.At(key).end(),
                   [](const json& v) { return v.is_number(); })) {
    return reader.Wrong(key, absl::StrCat("a list of ", kernels::kFluxionFeatures, " numbers"));
  }
  *values = reader.At(key).get<std::vector<float>>();
  return absl::OkStatus();
}

absl::Status ParseLayers(const ConfigReader& reader, FluxionPredictor* predictor) {
  const auto is_width = [](const json& v) {
    return v.is_number_integer() && v.get<int64_t>() >= 1 && v.get<int64_t>() <= kMostWidth;
  };
  const std::string expected = absl::StrCat(
      "a list of 2 to ", kMostLayers + 1, " widths from 1 to ", kMostWidth, ", the first of them ",
      kernels::kFluxionFeatures, " and the last ", FluxionOutputs(predictor->form));
  if (!reader.Has("layers")) return reader.Wrong("layers", expected);
  const json& widths = reader.At("layers");
  if (!widths.is_array() || widths.size() < 2 || widths.size() > kMostLayers + 1 ||
      !std::all_of(widths.begin(), widths.end(), is_width) ||
      widths.front() != kernels::kFluxionFeatures ||
      widths.back() != FluxionOutputs(predictor->form)) {
    return reader.Wrong("layers", expected);
  }
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    predictor->layers.push_back({widths[i].get<int>(), widths[i + 1].get<int>(), {}, {}});
  }
  return absl::OkStatus();
}

// Fills in what the header tells, and the shapes of layers.
absl::Status ParseHeader(const ConfigReader& reader, FluxionPredictor* predictor) {
  SLUICE_ASSIGN_OR_RETURN(predictor->model_fingerprint, reader.StringOr("model_fingerprint", ""));
  SLUICE_ASSIGN_OR_RETURN(const std::string form, reader.StringOr("form", ""));
  if (form != "line" && form != "four") return reader.Wrong("form", "\"line\" or \"four\"");
  predictor->form = form == "line" ? FluxionPredictor::Form::kLine : FluxionPredictor::Form::kFour;
  SLUICE_ASSIGN_OR_RETURN(predictor->tau, reader.Number("tau", 0, 1));
  SLUICE_ASSIGN_OR_RETURN(const double threshold, reader.Number("streaming_threshold", 0, 1));
  predictor->streaming_threshold = static_cast<float>(threshold);
  SLUICE_RETURN_IF_ERROR(ParseFeatures(reader, "mean", &predictor->mean));
  SLUICE_RETURN_IF_ERROR(ParseFeatures(reader, "deviation", &predictor->deviation));
  return ParseLayers(reader, predictor);
}

}  // namespace

int FluxionOutputs(FluxionPredictor::Form form) {
  return form == FluxionPredictor::Form::kLine ? 3 : 5;
}

float FluxionSigmoid(float logit) { return 1 / (1 + std::exp(-logit)); }

std::vector<float> FluxionPredictor::Outputs(absl::Span<const float> features) const {
  SLUICE_CHECK(features.size() == static_cast<size_t>(kernels::kFluxionFeatures));
  std::vector<float> values(features.begin(), features.end());
  for (size_t i = 0; i < values.size(); ++i) values[i] = (values[i] - mean[i]) / deviation[i];
  for (size_t i = 0; i < layers.size(); ++i) {
    if (i > 0) std::transform(values.begin(), values.end(), values.begin(), Gelu);
    values = Apply(layers[i], values);
  }
  return values;
}

FluxionPredictor::Head FluxionPredictor::Predict(absl::Span<const float> features) const {
  Head head{{1, 1, 1, 1}, false};
  if (!AllFinite(features)) return head;
  const std::vector<float> outputs = Outputs(features);
  head.streaming = AllFinite(outputs) && FluxionSigmoid(outputs.back()) > streaming_threshold;
  for (size_t i = 0; i < head.budgets.size(); ++i) {
    const float budget =
        form == Form::kLine
            ? outputs[0] + outputs[1] * std::log2(static_cast<float>(
                                            kernels::LevelTokens(static_cast<int32_t>(i))))
            : std::exp2(outputs[i]);
    // A very low logarithm is a budget of 0, but minus infinity is a sum that went wrong.
    const bool finite = std::isfinite(budget) && (form == Form::kLine || std::isfinite(outputs[i]));
    head.budgets[i] = finite ? std::clamp(budget, 0.0f, 1.0f) : 1.0f;
    head.streaming = head.streaming && finite;
  }
  return head;
}

int64_t FluxionPredictor::parameters() const {
  int64_t sum = 0;
  for (const Layer& layer : layers) sum += std::ssize(layer.weights) + std::ssize(layer.bias);
  return sum;
}

absl::Status ValidFluxionPredictor(const FluxionPredictor& predictor, const std::string& what) {
  const auto wrong = [&what](const std::string& message) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", message, kRemedy));
  };
  if (predictor.model_fingerprint.size() != kFingerprintDigits ||
      predictor.model_fingerprint.find_first_not_of("0123456789abcdefABCDEF") !=
          std::string::npos) {
    return wrong(absl::StrCat("model_fingerprint: expected ", kFingerprintDigits,
                              " hexadecimal digits, found \"", Shown(predictor.model_fingerprint),
                              "\""));
  }
  if (!(predictor.tau >= 0 && predictor.tau <= 1)) {
    return wrong(absl::StrCat("tau: expected 0 to 1, found ", predictor.tau));
  }
  if (!(predictor.streaming_threshold >= 0 && predictor.streaming_threshold <= 1)) {
    return wrong(absl::StrCat("streaming_threshold: expected 0 to 1, found ",
                              predictor.streaming_threshold));
  }
  if (predictor.mean.size() != static_cast<size_t>(kernels::kFluxionFeatures) ||
      !AllFinite(predictor.mean)) {
    return wrong(absl::StrCat("mean: expected ", kernels::kFluxionFeatures, " finite numbers"));
  }
  const std::vector<float>& deviation = predictor.deviation;
  if (deviation.size() != static_cast<size_t>(kernels::kFluxionFeatures) || !AllFinite(deviation) ||
      !std::all_of(deviation.begin(), deviation.end(), [](float v) { return v > 0; })) {
    return wrong(
        absl::StrCat("deviation: expected ", kernels::kFluxionFeatures, " numbers above 0"));
  }
  if (predictor.layers.empty() || predictor.layers.size() > kMostLayers) {
    return wrong(
        absl::StrCat("layers: expected 1 to ", kMostLayers, ", found ", predictor.layers.size()));
  }
  int in = kernels::kFluxionFeatures;
  for (size_t i = 0; i < predictor.layers.size(); ++i) {
    const FluxionPredictor::Layer& layer = predictor.layers[i];
    const bool last = i + 1 == predictor.layers.size();
    if (layer.in != in || layer.out < 1 || layer.out > kMostWidth ||
        (last && layer.out != FluxionOutputs(predictor.form)) ||
        std::ssize(layer.weights) != int64_t{layer.in} * layer.out ||
        std::ssize(layer.bias) != layer.out) {
      return wrong(absl::StrCat("layers[", i, "]: ", layer.in, " to ", layer.out, " with ",
                                layer.weights.size(), " weights and ", layer.bias.size(),
                                " biases does not fit the layers beside it"));
    }
    if (!AllFinite(layer.weights) || !AllFinite(layer.bias)) {
      return wrong(absl::StrCat("layers[", i, "]: a weight is not finite"));
    }
    in = layer.out;
  }
  return absl::OkStatus();
}

absl::Status WriteFluxionPredictor(const FluxionPredictor& predictor, const std::string& path) {
  SLUICE_RETURN_IF_ERROR(ValidFluxionPredictor(predictor, path));
  std::string payload;
  for (const FluxionPredictor::Layer& layer : predictor.layers) {
    for (const std::vector<float>* values : {&layer.weights, &layer.bias}) {
      payload.append(reinterpret_cast<const char*>(values->data()), values->size() * sizeof(float));
    }
  }
  return WriteCheckedFile(kFormat, HeaderOf(predictor), payload, path);
}

absl::StatusOr<FluxionPredictor> ReadFluxionPredictor(const std::string& path) {
  SLUICE_ASSIGN_OR_RETURN(const CheckedFile file, ReadCheckedFile(kFormat, path));
  const ConfigReader reader(path, file.header);
  FluxionPredictor predictor;
  if (const absl::Status status = ParseHeader(reader, &predictor); !status.ok()) {
    return WithRemedy(status);
  }
  int64_t want = 0;
  for (const FluxionPredictor::Layer& layer : predictor.layers) {
    want += (int64_t{layer.in} + 1) * layer.out * static_cast<int64_t>(sizeof(float));
  }
  SLUICE_RETURN_IF_ERROR(CheckWhole(kFormat, file, want, "layers", "weights"));
  const char* from = file.payload.data();
  for (FluxionPredictor::Layer& layer : predictor.layers) {
    layer.weights.resize(static_cast<size_t>(layer.in) * static_cast<size_t>(layer.out));
    layer.bias.resize(static_cast<size_t>(layer.out));
    for (std::vector<float>* values : {&layer.weights, &layer.bias}) {
      std::memcpy(values->data(), from, values->size() * sizeof(float));
      from += values->size() * sizeof(float);
    }
  }
  SLUICE_RETURN_IF_ERROR(ValidFluxionPredictor(predictor, path));
  return predictor;
}

absl::Status CheckFluxionPredictor(const FluxionPredictor& predictor,
                                   const std::string& model_fingerprint) {
  if (predictor.model_fingerprint == model_fingerprint) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("model_fingerprint: the predictor of policy fluxion was trained for the model ",
                   Shown(predictor.model_fingerprint), ", this one is ", Shown(model_fingerprint),
                   ": train a predictor for this model with sluice-profile"));
}

absl::StatusOr<std::shared_ptr<const FluxionPredictor>> LoadFluxionPredictor(
    const std::string& path, const std::string& model_fingerprint) {
  SLUICE_ASSIGN_OR_RETURN(FluxionPredictor read, ReadFluxionPredictor(path));
  if (!model_fingerprint.empty()) {
    SLUICE_RETURN_IF_ERROR(CheckFluxionPredictor(read, model_fingerprint));
  }
  return std::make_shared<const FluxionPredictor>(std::move(read));
}

}  // namespace sluice
