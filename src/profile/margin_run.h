// Measures the margins of policy recall (InfiniGen's alpha): how far below a row's largest partial
// score a token may lie, so that the tokens within the margin hold a wanted share of all judged
// rows' attention together. Prompts run under full attention, so that nothing depends on a
// selection, and rows are judged by their real queries, which the policy only predicts.
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

struct MarginRunOptions {
  int64_t ring_tokens = 32;  // newest tokens, which are attended to whatever they score
  int64_t rows = 64;         // rows at a prompt's end that are judged
  double share = 0.99;       // of a row's attention
  int64_t rank = 0;          // columns of the projection
  // [layers][kv_heads][head_dim][rank]; empty: PlainProjection.
  absl::Span<const float> projection;
};

// How the attention of rows of one KV head is divided by how far below a row's largest partial
// score its tokens lie. A group's query heads count alike, and the group's score of a token is the
// largest of theirs (GroupReduction::kMax).
struct MarginHistogram {
  static constexpr int kBins = 1024;
  static constexpr float kBinWidth = 1.0f / 16;  // The last bin holds what lies below as well.

  std::vector<double> mass = std::vector<double>(kBins);
  std::vector<int64_t> tokens = std::vector<int64_t>(kBins);
  double held = 0;  // Mass of the ring and of the row's own token.
};

// Adds the judged rows of one prompt. `projection` is that of the head, [head_dim][rank].
void AddRows(const HeadQueries& head, int64_t head_dim, absl::Span<const float> projection,
             const MarginRunOptions& options, MarginHistogram* histogram);

// Returns the least margin of one bin or more with which the tokens within it hold the share.
float MarginFor(const MarginHistogram& histogram, double share);

struct FoundMargin {
  float margin = 0;     // the largest that one of the layer's KV heads needs
  double selected = 0;  // share of the tokens outside the ring that it selects
  double captured = 0;  // share of the attention that these, the ring and the own token hold
};

// Returns the result of every layer. `progress(done, all)` gets numbers of prompts. Memory holds a
// whole prompt's queries and keys of all layers in float32. INVALID_ARGUMENT: no prompt has tokens
// outside the ring. REQUIRES, errors: CaptureQueries.
absl::StatusOr<std::vector<FoundMargin>> MeasureMargins(
    const MarginRunOptions& options, Device* device, Model* model, absl::Span<const Prompt> prompts,
    const std::function<void(int64_t, int64_t)>& progress);

}  // namespace sluice
