#include "src/profile/margin_run.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "src/attention/policies/recall/projection.h"
#include "src/base/status_macros.h"
#include "src/profile/attention_weights.h"

namespace sluice {
namespace {

// Rows whose attention is measured; they are spread evenly over those that there are.
constexpr int64_t kMeasuredRows = 32;

// Returns the first `rows` vectors times the projection [head_dim][rank], as [rows][rank].
std::vector<float> Projected(const float* vectors, int64_t rows, int64_t head_dim,
                             absl::Span<const float> projection) {
  const int64_t rank = std::ssize(projection) / head_dim;
  std::vector<float> out(static_cast<size_t>(rows * rank));
  for (int64_t row = 0; row < rows; ++row) {
    float* const to = out.data() + row * rank;
    for (int64_t d = 0; d < head_dim; ++d) {
      const float value = vectors[row * head_dim + d];
      for (int64_t r = 0; r < rank; ++r)
        to[r] += value * projection[static_cast<size_t>(d * rank + r)];
    }
  }
  return out;
}

}  // namespace

void AddRows(const HeadQueries& head, int64_t head_dim, absl::Span<const float> projection,
             const MarginRunOptions& options, MarginHistogram* histogram) {
  const int64_t tokens = std::ssize(head.k) / head_dim;
  const int64_t group = std::ssize(head.q) / head_dim / std::max<int64_t>(tokens, 1);
  const int64_t rank = std::ssize(projection) / head_dim;
  const int64_t first_row = std::max<int64_t>(tokens - options.rows, options.ring_tokens);
  const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
  const std::vector<float> keys = Projected(head.k.data(), tokens, head_dim, projection);
  const int64_t stride = std::max<int64_t>(1, options.rows / kMeasuredRows);
  std::vector<float> scores, weights;
  for (int64_t row = first_row; row < tokens; row += stride) {
    // The newest token has no partial key yet when its row's scores are made.
    scores.assign(static_cast<size_t>(row), -INFINITY);
    weights.assign(static_cast<size_t>(row + 1), 0);
    const float* const queries = head.q.data() + row * group * head_dim;
    const std::vector<float> partial = Projected(queries, group, head_dim, projection);
    for (int64_t g = 0; g < group; ++g) {
      for (int64_t t = 0; t < row; ++t) {
        float dot = 0;
        for (int64_t r = 0; r < rank; ++r)
          dot +=
              partial[static_cast<size_t>(g * rank + r)] * keys[static_cast<size_t>(t * rank + r)];
        scores[static_cast<size_t>(t)] = std::max(scores[static_cast<size_t>(t)], dot * scale);
      }
      const std::vector<float> of =
          AttentionWeights(queries + g * head_dim, head.k, row + 1, head_dim);
      for (size_t t = 0; t < of.size(); ++t) weights[t] += of[t];
    }
    const float largest = *std::max_element(scores.begin(), scores.end());
    const int64_t outside = row + 1 - options.ring_tokens;
    for (int64_t t = 0; t <= row; ++t) {
      const double mass = double{weights[static_cast<size_t>(t)]};
      if (t >= outside) {
        histogram->held += mass;
        continue;
      }
      const float depth = (largest - scores[static_cast<size_t>(t)]) / MarginHistogram::kBinWidth;
      const auto bin = static_cast<size_t>(
          std::clamp(std::ceil(depth) - 1, 0.0f, float{MarginHistogram::kBins - 1}));
      histogram->mass[bin] += mass;
      ++histogram->tokens[bin];
    }
  }
}

float MarginFor(const MarginHistogram& histogram, double share) {
  double all = histogram.held;
  for (const double mass : histogram.mass) all += mass;
  double held = histogram.held;
  int bins = 0;
  while (bins < MarginHistogram::kBins && held < share * all) {
    held += histogram.mass[static_cast<size_t>(bins++)];
  }
  return static_cast<float>(std::max(bins, 1)) * MarginHistogram::kBinWidth;
}

absl::StatusOr<std::vector<FoundMargin>> MeasureMargins(
    const MarginRunOptions& options, Device* device, Model* model, absl::Span<const Prompt> prompts,
    const std::function<void(int64_t, int64_t)>& progress) {
  const int64_t layers = model->cache_layout().layers, heads = model->config().kv_heads;
  const int64_t head_dim = model->config().head_dim, rank = options.rank;
  std::vector<float> plain;
  if (options.projection.empty()) plain = PlainProjection({layers, heads, head_dim, rank});
  const absl::Span<const float> projection =
      options.projection.empty() ? absl::MakeConstSpan(plain) : options.projection;
  std::vector<MarginHistogram> histograms(static_cast<size_t>(layers * heads));
  for (size_t i = 0; i < prompts.size(); ++i) {
    SLUICE_ASSIGN_OR_RETURN(
        const CapturedQueries captured,
        CaptureQueries(device, model, {prompts[i]}, static_cast<int64_t>(prompts[i].size()),
                       [](int64_t, int64_t) {}));
    const auto size = static_cast<size_t>(head_dim * rank);
    for (size_t list = 0; list < histograms.size(); ++list) {
      AddRows(captured.heads[list], head_dim, projection.subspan(list * size, size), options,
              &histograms[list]);
    }
    progress(static_cast<int64_t>(i + 1), static_cast<int64_t>(prompts.size()));
  }
  std::vector<FoundMargin> found(static_cast<size_t>(layers));
  int64_t judged = 0;
  for (int64_t layer = 0; layer < layers; ++layer) {
    FoundMargin& of = found[static_cast<size_t>(layer)];
    const absl::Span<const MarginHistogram> its =
        absl::MakeConstSpan(histograms)
            .subspan(static_cast<size_t>(layer * heads), static_cast<size_t>(heads));
    for (const MarginHistogram& head : its) {
      of.margin = std::max(of.margin, MarginFor(head, options.share));
    }
    const auto bins = static_cast<int>(std::lround(of.margin / MarginHistogram::kBinWidth));
    int64_t tokens = 0, selected = 0;
    double mass = 0, held = 0;
    for (const MarginHistogram& head : its) {
      mass += head.held;
      held += head.held;
      for (int bin = 0; bin < MarginHistogram::kBins; ++bin) {
        const auto at = static_cast<size_t>(bin);
        tokens += head.tokens[at];
        mass += head.mass[at];
        if (bin >= bins) continue;
        selected += head.tokens[at];
        held += head.mass[at];
      }
    }
    judged += tokens;
    if (tokens > 0) of.selected = static_cast<double>(selected) / static_cast<double>(tokens);
    if (mass > 0) of.captured = held / mass;
  }
  if (judged == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("no prompt has tokens beside the newest ", options.ring_tokens,
                     ", so there is nothing to take a margin from: take longer prompts"));
  }
  return found;
}

}  // namespace sluice
