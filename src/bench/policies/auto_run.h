// Policy auto in a comparison: which policy a node would take for these sequences, and how far that
// is from the best of the policies that ran.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/bench/harness/policy_run.h"
#include "src/model/policy_auto.h"

namespace sluice::bench {

struct AutoRun {
  AutoAsk ask;
  std::vector<AutoCandidate> candidates;
  AutoChoice choice;
  std::string name;  // the policy that was taken, with its budget: "scout:budget=2048"
  std::string text;  // AutoText of them
};

// Takes a policy for as many sequences as `world` has slots, of `context` tokens that grow to
// `total`, as a node does: each candidate says how many of them it admits, and none decodes.
// Cuts `tiers` for the last candidate. The errors are those of ChoosePolicy.
absl::StatusOr<AutoRun> TakePolicy(BenchTiers& tiers, PolicyWorld* world, const DeviceRates& rates,
                                   Quality quality, int context, int total);

// Compares auto's run at its largest batch with the best of the other policies of that quality at
// theirs. Empty and null: auto did not run, or nothing else did.
std::string AutoDistanceText(const AutoRun& taken, const std::vector<PolicyRun>& runs);
nlohmann::json AutoJson(const AutoRun& taken, const std::vector<PolicyRun>& runs);

}  // namespace sluice::bench
