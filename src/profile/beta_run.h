// Measures the thresholds of policy hgca (HGCA, algorithm 1, line 20): with which beta the tokens
// that a row selects hold a wanted share of the attention that the rows behind it pay to tokens
// outside the window. Prompts run under full attention, so that nothing depends on a selection.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/device/device.h"
#include "src/model/model.h"
#include "src/profile/query_capture.h"
#include "src/profile/traffic.h"

namespace sluice {

struct BetaRunOptions {
  int64_t block_tokens = 32;
  int64_t window_tokens = 512;
  int64_t following = 0;  // PolicyOptions::Hgca::following
  int64_t rows = 64;      // rows behind the judging one, at the prompt's end
  double share = 0.99;
};

// A token outside the window: with a smaller beta it is selected, and then it holds that much of
// the attention of later rows.
struct JudgedToken {
  float beta = 0;
  float mass = 0;
};
// Judges one head of a prompt by the row `options.rows` before its end. Returns nothing if no token
// is outside its window.
std::vector<JudgedToken> JudgeTokens(const HeadQueries& head, int64_t head_dim,
                                     const BetaRunOptions& options);

struct FoundBeta {
  float beta = 0;       // the largest with which the selection holds the share
  double selected = 0;  // share of the tokens that it selects
  double captured = 0;  // share of the mass
};
FoundBeta BetaFor(std::vector<JudgedToken> tokens, double share);

// Returns the result of every layer and KV head, [layers * kv_heads]. `progress(done, all)` gets
// numbers of prompts. Memory holds a whole prompt's queries and keys of all layers in float32.
// INVALID_ARGUMENT: no prompt is long enough for the window. REQUIRES, errors: CaptureQueries.
absl::StatusOr<std::vector<FoundBeta>> MeasureBetas(
    const BetaRunOptions& options, Device* device, Model* model, absl::Span<const Prompt> prompts,
    const std::function<void(int64_t, int64_t)>& progress);

}  // namespace sluice
