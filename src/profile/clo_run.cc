#include "src/profile/clo_run.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/profile/head_math.h"

namespace sluice {
namespace {

constexpr double kWholeGate = 0.05;  // attention outside from which on a gate is 1

// Returns equation 10 of two rows' queries, [group][dim] each, with equal importance.
double Similarity(const float* a, const float* b, int64_t group, int64_t dim) {
  double inverse = 0;
  for (int64_t g = 0; g < group; ++g, a += dim, b += dim) {
    const double ab = std::inner_product(a, a + dim, b, 0.0);
    const double aa = std::inner_product(a, a + dim, a, 0.0);
    const double bb = std::inner_product(b, b + dim, b, 0.0);
    const double cosine = ab / std::sqrt(aa * bb);
    inverse += cosine > 0 ? 1 / cosine : INFINITY;
  }
  return static_cast<double>(group) / inverse;
}

}  // namespace

double GateOf(double outside) { return std::clamp(outside / kWholeGate, 0.0, 1.0); }

void MeasureCloHead(const HeadQueries& head, int64_t head_dim, const CloRunOptions& options,
                    CloHead* sums) {
  const int64_t tokens = static_cast<int64_t>(head.k.size()) / head_dim;
  const int64_t group = static_cast<int64_t>(head.q.size()) / head_dim / tokens;
  const auto queries = [&](int64_t row) { return head.q.data() + row * group * head_dim; };
  sums->outside.resize(static_cast<size_t>(group));
  const int64_t first_row = tokens / 2, stride = MeasuredRowStride(tokens - first_row);
  for (int64_t row = first_row; row < tokens; row += stride) {
    for (int64_t g = 0; g < group; ++g) {
      const std::vector<float> weights =
          AttentionWeights(queries(row) + g * head_dim, head.k, row + 1, head_dim);
      const auto end = weights.end() - std::min(options.newest_tokens, row + 1);
      const auto begin = weights.begin() + std::min<int64_t>(options.first_tokens, row + 1);
      if (begin < end) sums->outside[static_cast<size_t>(g)] += std::accumulate(begin, end, 0.0);
    }
    ++sums->rows;
  }
  int64_t label = first_row;
  for (int64_t row = first_row + 1; row < tokens; ++row) {
    sums->similarity += Similarity(queries(row), queries(row - 1), group, head_dim);
    const double of_label = Similarity(queries(row), queries(label), group, head_dim);
    const bool hit = of_label >= options.eta;
    sums->of_labels += of_label;
    if (!hit) label = row;
    sums->hits += hit ? 1 : 0;
    ++sums->lookups;
  }
}

absl::StatusOr<std::vector<CloHead>> MeasureClo(
    const CloRunOptions& options, Device* device, Model* model, absl::Span<const Prompt> prompts,
    const std::function<void(int64_t, int64_t)>& progress) {
  const auto lists =
      static_cast<size_t>(model->cache_layout().layers * model->cache_layout().kinds[0].heads);
  std::vector<CloHead> heads(lists);
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto tokens = static_cast<int64_t>(prompts[i].size());
    if (tokens <= 4 * options.newest_tokens) continue;
    SLUICE_ASSIGN_OR_RETURN(
        const CapturedQueries captured,
        CaptureQueries(device, model, {prompts[i]}, tokens, [](int64_t, int64_t) {}));
    for (size_t list = 0; list < lists; ++list) {
      MeasureCloHead(captured.heads[list], captured.head_dim, options, &heads[list]);
    }
    progress(static_cast<int64_t>(i + 1), static_cast<int64_t>(prompts.size()));
  }
  if (heads[0].rows == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no prompt is longer than ", 4 * options.newest_tokens,
        " tokens, so nothing says how heads of clo behave: take longer prompts (--context)"));
  }
  return heads;
}

}  // namespace sluice
