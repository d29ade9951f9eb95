// The cost of ways to budget for the model itself: a document's last tokens are computed one by
// one, each head of every layer attends to the default set and to the blocks that a source of
// budgets tells, and the next token's probabilities are compared with those of full attention
// (Fluxion, figure 10b). The budgets are those of the row as it is computed, with what earlier rows
// and layers missed.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "src/bench/policies/quality.h"
#include "src/device/device.h"
#include "src/model/model.h"
#include "src/profile/fluxion/predictor_check.h"
#include "src/profile/traffic.h"

namespace sluice {

// Rows beyond this would have tokens of their own outside the default set.
inline constexpr int64_t kMostTauSteps = 256;

// The results of one source, over all rows.
struct SourceQuality {
  bench::Distance distance;  // from full attention
  SourceSums sums;           // violations, and streaming that was needed, are not counted
  int64_t cpu_tokens = 0;    // that there were to read, of all groups
};

// Computes the last `steps` tokens of each document under every source and adds what comes of it to
// (*out)[i] for source i. Documents too short to have a cpu segment then are left out.
// `progress(done, all)` gets numbers of rows. Groups of a layer are computed on up to `threads`
// threads. INVALID_ARGUMENT: all documents are too short. Other errors are the device's.
// REQUIRES: 1 <= steps <= kMostTauSteps; documents fit the model, which has keys and values.
absl::Status MeasureSourceQuality(absl::Span<const BudgetSource> sources, int64_t steps,
                                  Device* device, Model* model, absl::Span<const Prompt> documents,
                                  int threads,
                                  const std::function<void(int64_t, int64_t)>& progress,
                                  std::vector<SourceQuality>* out);

}  // namespace sluice
