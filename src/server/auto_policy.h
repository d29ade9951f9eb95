// Policy auto of a node: plans every candidate with the node's settings, measures the machine, and
// takes one by the rule of src/model/policy_auto.h.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/device/device.h"
#include "src/model/model.h"
#include "src/model/policy_auto.h"
#include "src/server/cache_sizes.h"

namespace sluice {

inline constexpr char kAutoPolicy[] = "auto";

struct ResolvedPolicy {
  Config config;  // with the policy that was taken, and its budget
  std::vector<AutoCandidate> candidates;
  AutoChoice choice;
  std::string text;  // AutoText of them
};

// Takes a policy for `model`, whose weights are on `device` or are planned on it. Measures the
// rates of `device`, which takes about a second. The errors are those of ChoosePolicy and of the
// settings. REQUIRES: the policy of `config` is auto.
absl::StatusOr<ResolvedPolicy> ResolvePolicy(const Config& config, const Model& model,
                                             const MemoryFound& found, Device* device);

}  // namespace sluice
