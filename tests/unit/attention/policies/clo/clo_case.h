// A sequence under policy clo, decoded beside naive heads: what the tests of the policy share.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"
#include "src/attention/policy_statistics.h"
#include "src/kv/selection_hints.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice::testing {

// Makes the policy; the test fails if its options are refused.
std::unique_ptr<AttentionPolicy> MakeClo(const PolicyOptions& options);

// Makes vectors whose predicted queries turn slowly, with a jump now and then in one KV head or
// the other. With `real` the queries themselves do so, too.
PolicyRig::Make TurningQueries(const PolicyRig::Shape& shape, bool real = false);

// Returns the policy's statistics, summed over layers.
PolicyStatistics::Layer SumsOf(const AttentionPolicy& policy);

// Returns a hint with the queries of the last of `context` rows.
SelectionHints HintedQueries(const PolicyRig::Shape& shape, const PolicyRig::Make& make,
                             uint64_t seed, int context);

struct NaiveCase {
  int budget, divisor, context, steps;
  bool refresh = true;
  float similarity = 0.8f;
  std::vector<uint8_t> persistent = {};
  bool ahead = false;
  std::vector<float> predicted = {};
  PolicyOptions::Clo::Refill refill = PolicyOptions::Clo::Refill::kDelta;
  bool as_hata = false;  // codes and scores as published
  // How the sequence gets its first labels: it has none, it computes the last rows of its prompt
  // itself, or a hint has their queries.
  enum class Labels { kNone, kComputed, kHinted } labels = Labels::kNone;
};

// Decodes one sequence and checks every row against softmax over what the naive head attends to.
PolicyStatistics::Layer CheckAgainstNaive(const PolicyRig::Shape& shape, const NaiveCase& c);

}  // namespace sluice::testing
