// Networks, rows and anchors of any shape for the tests of PredictBudgets.
#pragma once

#include "kernels/fluxion_params.h"
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Shape {
  int32_t heads, kv_heads, head_dim;
};
const Shape kShapes[] = {{32, 8, 128}, {28, 4, 64}, {6, 2, 48}, {5, 5, 16}, {3, 1, 256}};

void FillUniform(float* out, int64_t count, float low, float high, Random& random) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = low + (high - low) * static_cast<float>(random() % 65536) / 65536;
  }
}

double LengthOf(const float* x, int64_t dim) {
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += double{x[d]} * double{x[d]};
  return std::sqrt(sum);
}

// A network with weights of He's scale, so that what layers give stays of one size.
struct TestNetwork {
  TestNetwork(FluxionForm form, std::vector<int32_t> hidden, Random& random)
      : values(Size(hidden, form)) {
    view.form = form;
    view.values = values.data();
    view.threshold = 0.5f;
    for (const int32_t width : hidden) view.widths[++view.layers] = width;
    view.widths[++view.layers] = form == FluxionForm::kLine ? 3 : 5;
    view.widths[0] = kFluxionFeatures;
    float* at = values.data();
    std::fill_n(at, kFluxionFeatures, 0.0f);
    std::fill_n(at + kFluxionFeatures, kFluxionFeatures, 1.0f);
    at += 2 * kFluxionFeatures;
    for (int32_t l = 0; l < view.layers; ++l) {
      const int64_t in = view.widths[l], out = view.widths[l + 1];
      const bool last = l + 1 == view.layers;
      const float scale = std::sqrt((last ? 0.3f : 2.0f) / static_cast<float>(in));
      const auto size = static_cast<size_t>((in + 1) * out);
      FillNormal(std::span<float>(at, size), random, scale);
      at += size;
    }
    bias = values.data() + values.size() - view.widths[view.layers];
    if (form == FluxionForm::kFour) {
      std::fill_n(bias, kFluxionLevels, -2.0f);
      return;
    }
    // The slope counts four to seven times, so it is smaller.
    for (float* row = bias - 3 * int64_t{view.widths[view.layers - 1]}; row <= bias; row += 3) {
      row[1] *= 0.1f;
    }
    bias[0] = 0.5f;
  }
  static int64_t Size(const std::vector<int32_t>& hidden, FluxionForm form) {
    int64_t size = 2 * kFluxionFeatures, in = kFluxionFeatures;
    for (const int32_t width : hidden) {
      size += (in + 1) * width;
      in = width;
    }
    return size + (in + 1) * (form == FluxionForm::kLine ? 3 : 5);
  }
  // Scales features as training does, so that those of all kinds weigh the same.
  void Fit(std::span<const float> features) {
    for (size_t f = 0; f < size_t{kFluxionFeatures}; ++f) {
      double sum = 0, squares = 0, count = 0;
      for (size_t i = f; i < features.size(); i += kFluxionFeatures) {
        if (!std::isfinite(features[i])) continue;
        sum += double{features[i]};
        squares += double{features[i]} * double{features[i]};
        ++count;
      }
      const double mean = sum / count, variance = squares / count - mean * mean;
      values[static_cast<int64_t>(f)] = static_cast<float>(mean);
      values[static_cast<int64_t>(f) + kFluxionFeatures] =
          variance > 1e-6 * mean * mean ? static_cast<float>(std::sqrt(variance)) : 1.0f;
    }
  }
  // Makes the last layer's outputs these, whatever the features are.
  void Set(std::initializer_list<float> outputs) {
    const int32_t out = view.widths[view.layers], in = view.widths[view.layers - 1];
    std::fill_n(bias - int64_t{in} * out, int64_t{in} * out, 0.0f);
    std::copy(outputs.begin(), outputs.end(), bias);
  }

  FluxionNetwork view = {};
  Guarded<float> values;
  float* bias;  // of the last layer
};

struct Prediction {
  Prediction(int64_t rows, int64_t heads)
      : features(rows * heads * kFluxionFeatures),
        budgets(rows * heads * kFluxionLevels),
        streaming(rows * heads) {}
  std::string Damage() const { return features.Damage() + budgets.Damage() + streaming.Damage(); }
  Guarded<float> features, budgets;
  Guarded<int32_t> streaming;
};

// Rows of every kind, two of them padded. The last three have no cpu segment, and the last one has
// no local tokens.
struct BudgetInput {
  static constexpr int32_t kRows = 9, kSlots = 7, kLayer = 5;

  BudgetInput(const Shape& of, Random& random)
      : shape(of),
        q_stride(int64_t{of.heads} * of.head_dim + 3),
        slots(BufferOf<int32_t>({3, 0, -1, 1, 5, -1, 4, 2, 6})),
        positions(BufferOf<int32_t>({100000, 700, 9, 2345, 1048575, 0, 319, 64, 50})),
        q(NormalBuffer<float>(kRows * q_stride, random)),
        sink_o(NormalBuffer<float>(kRows * of.heads * int64_t{of.head_dim}, random, 0.3f)),
        local_o(NormalBuffer<float>(kRows * of.heads * int64_t{of.head_dim}, random, 0.5f)),
        sink_lse(NormalBuffer<float>(kRows * of.heads, random, 4)),
        local_lse(NormalBuffer<float>(kRows * of.heads, random, 4)),
        kv(int64_t{kSlots} * of.kv_heads * (kAnchorKvNumbers + of.head_dim)),
        anchors(int64_t{kSlots} * of.heads * (kAnchorHeadNumbers + of.head_dim)),
        resident(kSlots) {
    const int64_t dim = of.head_dim;
    for (int64_t i = 0; i < kSlots * of.kv_heads; ++i) {
      float* const numbers = kv.data() + i * (kAnchorKvNumbers + dim);
      FillUniform(numbers, kAnchorKvNumbers, 0.5f, 20, random);
      FillNormal(std::span<float>(numbers + kAnchorKvNumbers, static_cast<size_t>(dim)), random);
    }
    for (int64_t i = 0; i < kSlots * of.heads; ++i) {
      float* const numbers = anchors.data() + i * (kAnchorHeadNumbers + dim);
      float* const anchor_q = numbers + kAnchorHeadNumbers;
      FillNormal(std::span<float>(anchor_q, static_cast<size_t>(dim)), random);
      FillNormal(std::span<float>(numbers, 10), random);
      FillUniform(numbers + 1, 1, 0.001f, 0.05f, random);
      numbers[10] = static_cast<float>(LengthOf(anchor_q, dim));
      FillUniform(numbers + 11, kFluxionLevels, 0, 1, random);
    }
    FillUniform(resident.data(), kSlots, 1, 3, random);
    const int64_t last = (kRows - 1) * of.heads;
    std::fill_n(local_lse.data() + last, of.heads, -kInfinity);
    std::fill_n(local_o.data() + last * dim, of.heads * dim, 0.0f);
  }

  PredictBudgetsParams Params(const FluxionNetwork& network, Prediction& to) {
    return {.q = q.data(),
            .q_stride = q_stride,
            .slots = slots.data(),
            .positions = positions.data(),
            .sink_o = sink_o.data(),
            .sink_lse = sink_lse.data(),
            .local_o = local_o.data(),
            .local_lse = local_lse.data(),
            .anchors = {kv.data(), anchors.data(), resident.data()},
            .network = network,
            .features = to.features.data(),
            .budgets = to.budgets.data(),
            .streaming = to.streaming.data(),
            .rows = kRows,
            .heads = shape.heads,
            .kv_heads = shape.kv_heads,
            .head_dim = shape.head_dim,
            .layer = kLayer};
  }
  // Returns the parameters of row r alone.
  PredictBudgetsParams Row(const FluxionNetwork& network, int64_t r, Prediction& to) {
    PredictBudgetsParams p = Params(network, to);
    const int64_t first = r * shape.heads;
    p.q += r * q_stride;
    p.slots += r;
    p.positions += r;
    p.sink_o += first * shape.head_dim;
    p.local_o += first * shape.head_dim;
    p.sink_lse += first;
    p.local_lse += first;
    p.rows = 1;
    return p;
  }
  Prediction Predict(const KernelTable& table, const FluxionNetwork& network, int workers = 1) {
    Prediction result(kRows, shape.heads);
    RunWorkers(table.predict_budgets, Params(network, result), workers);
    CHECK(result.Damage() == "");
    return result;
  }

  Shape shape;
  int64_t q_stride;
  Guarded<int32_t> slots, positions;
  Guarded<float> q, sink_o, local_o, sink_lse, local_lse, kv, anchors, resident;
};

}  // namespace
}  // namespace sluice::kernels
