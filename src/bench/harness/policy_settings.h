// The settings that may follow a policy's name in `sluice-bench policies`, as in recall:budget=20%.
#pragma once

#include "absl/types/span.h"
#include "src/attention/policy_options.h"

namespace sluice::bench {

struct PolicySetting {
  const char* key;
  // The policy that reads it ("ess" covers offload-naive too), or the one preset of a policy that
  // has it; empty: all policies that select by a budget.
  const char* policy;
  bool whole;  // A whole number of 1 or more (tokens or steps).
  // Sets the value, or the number of the word of `words`.
  void (*apply)(PolicyOptions&, double value);
  const char* words = "";  // Comma-separated values that it takes instead of a number.
};

absl::Span<const PolicySetting> AllPolicySettings();

}  // namespace sluice::bench
