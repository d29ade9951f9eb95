#include "src/profile/beta_run.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "src/attention/policies/hgca/window.h"
#include "src/base/status_macros.h"
#include "src/profile/head_math.h"

namespace sluice {
std::vector<JudgedToken> JudgeTokens(const HeadQueries& head, int64_t head_dim,
                                     const BetaRunOptions& options) {
  const int64_t tokens = static_cast<int64_t>(head.k.size()) / head_dim;
  const int64_t group =
      static_cast<int64_t>(head.q.size()) / head_dim / std::max<int64_t>(tokens, 1);
  const int64_t first_row = tokens - options.rows;  // the first row behind the judging one
  const HgcaWindow window{options.block_tokens, options.window_tokens / options.block_tokens};
  if (first_row < 1) return {};
  const int64_t outside = window.BlocksOutside(first_row) * options.block_tokens;
  std::vector<JudgedToken> judged(static_cast<size_t>(outside));
  if (outside == 0) return judged;
  const auto query = [&](int64_t row, int64_t g) {
    return head.q.data() + (row * group + g) * head_dim;
  };
  for (int64_t g = 0; g < group; ++g) {
    const std::vector<float> weights =
        AttentionWeights(query(first_row - 1, g), head.k, outside, head_dim);
    for (size_t t = 0; t < judged.size(); ++t) {
      judged[t].beta = std::max(judged[t].beta, weights[t] * static_cast<float>(outside));
    }
  }
  // A token is selected with any of those before it that it follows.
  for (int64_t t = outside - 1; t > 0; --t) {
    const int64_t before = std::min(options.following, t % options.block_tokens);
    for (int64_t i = 1; i <= before; ++i) {
      judged[static_cast<size_t>(t)].beta =
          std::max(judged[static_cast<size_t>(t)].beta, judged[static_cast<size_t>(t - i)].beta);
    }
  }
  const int64_t stride = MeasuredRowStride(options.rows);
  for (int64_t row = first_row; row < tokens; row += stride) {
    for (int64_t g = 0; g < group; ++g) {
      const std::vector<float> weights = AttentionWeights(query(row, g), head.k, row + 1, head_dim);
      for (size_t t = 0; t < judged.size(); ++t) judged[t].mass += weights[t];
    }
  }
  return judged;
}

FoundBeta BetaFor(std::vector<JudgedToken> tokens, double share) {
  FoundBeta found;
  std::sort(tokens.begin(), tokens.end(),
            [](const JudgedToken& a, const JudgedToken& b) { return a.beta > b.beta; });
  double all = 0, held = 0;
  for (const JudgedToken& token : tokens) all += double{token.mass};
  size_t count = 0;
  while (count < tokens.size() && held < share * all) held += double{tokens[count++].mass};
  // Equal ones are selected together.
  while (count > 0 && count < tokens.size() && tokens[count].beta == tokens[count - 1].beta) {
    held += double{tokens[count++].mass};
  }
  if (count == 0) return found;
  found.beta = std::nextafter(tokens[count - 1].beta, 0.0f);
  found.selected = static_cast<double>(count) / static_cast<double>(tokens.size());
  found.captured = all > 0 ? held / all : 1;
  return found;
}

absl::StatusOr<std::vector<FoundBeta>> MeasureBetas(
    const BetaRunOptions& options, Device* device, Model* model, absl::Span<const Prompt> prompts,
    const std::function<void(int64_t, int64_t)>& progress) {
  const auto lists =
      static_cast<size_t>(model->cache_layout().layers * model->cache_layout().kinds[0].heads);
  std::vector<std::vector<JudgedToken>> tokens(lists);
  for (size_t i = 0; i < prompts.size(); ++i) {
    SLUICE_ASSIGN_OR_RETURN(
        const CapturedQueries captured,
        CaptureQueries(device, model, {prompts[i]}, static_cast<int64_t>(prompts[i].size()),
                       [](int64_t, int64_t) {}));
    for (size_t list = 0; list < lists; ++list) {
      const std::vector<JudgedToken> more =
          JudgeTokens(captured.heads[list], captured.head_dim, options);
      tokens[list].insert(tokens[list].end(), more.begin(), more.end());
    }
    progress(static_cast<int64_t>(i + 1), static_cast<int64_t>(prompts.size()));
  }
  if (tokens[0].empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no prompt has tokens outside a window of ", options.window_tokens, " and ", options.rows,
        " rows behind the one that judges them: take longer prompts or a smaller --hgca-window"));
  }
  std::vector<FoundBeta> found;
  for (std::vector<JudgedToken>& of : tokens)
    found.push_back(BetaFor(std::move(of), options.share));
  return found;
}

}  // namespace sluice
