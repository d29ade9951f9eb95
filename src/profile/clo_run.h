// Measures what policy clo has to know of heads: how much of its attention a query head pays to
// tokens that are neither first nor new, and how similar a KV head's queries in neighbouring steps
// are. Prompts run under full attention.
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

struct CloRunOptions {
  int64_t first_tokens = 4, newest_tokens = 64;  // what a streaming head attends to (CLO, 3.1)
  double eta = 0.8;                              // cosine from which on a selection is kept
};

// The sums of one KV head over the measured rows.
struct CloHead {
  std::vector<double> outside;  // by query head of the group: attention to the other tokens
  int64_t rows = 0;             // rows of `outside`
  double similarity = 0;        // of each row's queries with those of the row before
  double of_labels = 0;         // of each row's queries with the label of their lookup
  int64_t hits = 0, lookups = 0;

  double MeanSimilarity() const {
    return lookups == 0 ? 1 : similarity / static_cast<double>(lookups);
  }
  double MeanLabelSimilarity() const {
    return lookups == 0 ? 1 : of_labels / static_cast<double>(lookups);
  }
  double MissShare() const {
    return lookups == 0 ? 0 : 1 - static_cast<double>(hits) / static_cast<double>(lookups);
  }
};

// Adds a prompt's rows. The rows of the second half count. Similarities are those of equation 10
// with equal importance; a label is renewed when it misses eta.
void MeasureCloHead(const HeadQueries& head, int64_t head_dim, const CloRunOptions& options,
                    CloHead* sums);

// Returns the gate, from 0 to 1, of a query head that pays `outside` of its attention to tokens
// that are neither first nor new: the outside over 5 %, or 1. It stands for the trained gates of
// DuoAttention, which need a training. It is 1 for every head whose output such tokens could change
// by more than a few percent, so that a selection is never kept longer for any of these.
double GateOf(double outside);

// Returns the sums of every layer and KV head, [layers * kv_heads]. `progress(done, all)` gets
// numbers of prompts. Memory holds a whole prompt's queries and keys of all layers in float32.
// INVALID_ARGUMENT: no prompt is longer than four times the newest tokens. REQUIRES, errors:
// CaptureQueries.
absl::StatusOr<std::vector<CloHead>> MeasureClo(
    const CloRunOptions& options, Device* device, Model* model, absl::Span<const Prompt> prompts,
    const std::function<void(int64_t, int64_t)>& progress);

}  // namespace sluice
