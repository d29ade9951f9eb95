#include "src/profile/margin_run.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "src/attention/policies/recall/projection.h"
#include "src/base/status_macros.h"
#include "src/profile/head_math.h"

namespace sluice {
void AddRows(const HeadQueries& head, int64_t head_dim, absl::Span<const float> projection,
             const MarginRunOptions& options, MarginHistogram* histogram) {
  const int64_t tokens = std::ssize(head.k) / head_dim;
  const int64_t group = std::ssize(head.q) / head_dim / std::max<int64_t>(tokens, 1);
  const int64_t rank = std::ssize(projection) / head_dim;
  const int64_t first_row = std::max<int64_t>(tokens - options.rows, options.ring_tokens);
  const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
  const std::vector<double> columns(projection.begin(), projection.end());
  const std::vector<double> keys = Times(head.k, tokens, columns, head_dim, rank);
  const int64_t stride = MeasuredRowStride(options.rows);
  std::vector<double> scores, weights;
  for (int64_t row = first_row; row < tokens; row += stride) {
    // The newest token has no partial key yet when its row's scores are made.
    scores.assign(static_cast<size_t>(row), -INFINITY);
    weights.assign(static_cast<size_t>(row + 1), 0);
    const absl::Span<const float> queries = absl::MakeConstSpan(head.q).subspan(
        static_cast<size_t>(row * group * head_dim), static_cast<size_t>(group * head_dim));
    const std::vector<double> partial = Times(queries, group, columns, head_dim, rank);
    for (int64_t g = 0; g < group; ++g) {
      const auto query = partial.begin() + g * rank;
      for (int64_t t = 0; t < row; ++t) {
        double& score = scores[static_cast<size_t>(t)];
        score = std::max(
            score, scale * std::inner_product(query, query + rank, keys.begin() + t * rank, 0.0));
      }
      const std::vector<float> of =
          AttentionWeights(queries.data() + g * head_dim, head.k, row + 1, head_dim);
      for (size_t t = 0; t < of.size(); ++t) weights[t] += double{of[t]};
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    const int64_t outside = row + 1 - options.ring_tokens;
    for (int64_t t = 0; t <= row; ++t) {
      const double mass = weights[static_cast<size_t>(t)];
      if (t >= outside) {
        histogram->held += mass;
        continue;
      }
      const double depth =
          (largest - scores[static_cast<size_t>(t)]) / double{MarginHistogram::kBinWidth};
      const auto bin = static_cast<size_t>(
          std::clamp(std::ceil(depth) - 1, 0.0, double{MarginHistogram::kBins - 1}));
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
