// Measures how the CPU's share of a sparse policy's budget grows while nothing is recalled (Scout,
// section 3.4). Prompts run through the real engine, one after the other, and every step is
// measured.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/policy_options.h"
#include "src/device/device.h"
#include "src/model/model.h"
#include "src/profile/intervals.h"
#include "src/profile/traffic.h"

namespace sluice {

struct ShareRunOptions {
  // The policy's options, except device, pools, slots and max_context. Recall is turned off.
  PolicyOptions policy;
  int64_t steps = 64;  // Tokens decoded after each prompt, starting from its own first working set.
};

// Returns a series for each layer; dense layers have no share. `progress(done, all)` gets numbers
// of prompts. REQUIRES: every prompt, with `steps` + 1 more tokens, fits the model's max_context.
// Errors are the policy's and those that end a sequence.
absl::StatusOr<std::vector<ShareSeries>> MeasureShares(
    const ShareRunOptions& options, Device* device, Model* model,
    const std::vector<Prompt>& prompts, const std::function<void(int64_t, int64_t)>& progress);

}  // namespace sluice
