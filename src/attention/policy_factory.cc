#include "src/attention/policy_factory.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "src/attention/latent/latent_views.h"
#include "src/attention/policies/clo/clo_policy.h"
#include "src/attention/policies/ess/ess_options.h"
#include "src/attention/policies/ess/ess_policy.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/attention/policies/fluxion/fluxion_policy.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/attention/policies/hgca/hgca_policy.h"
#include "src/attention/policies/oracle/oracle_policy.h"
#include "src/attention/policies/recall/recall_policy.h"
#include "src/attention/policies/scout/scout_policy.h"
#include "src/base/nearest_name.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using Made = absl::StatusOr<std::unique_ptr<AttentionPolicy>>;

Made NewFull(const PolicyOptions& o) { return NewFullPolicy(o); }

Made NewScout(const PolicyOptions& o) { return NewScoutPolicy(o); }

Made NewHgca(const PolicyOptions& o) { return NewHgcaPolicy(o); }

// The kinds of caches that a policy can be for.
enum class Caches {
  kAny,
  kKeysAndValues,
  kIndexedLatents,  // latent caches of a model with an indexer
};

struct Known {
  const char* name;
  Made (*make)(const PolicyOptions&);
  Caches caches;
  bool offloads;  // a sequence's host cache stays in DRAM, and no sequence is preempted
  // How the policy divides its tiers; null: as the model's caches.
  TierShapes (*shapes)(const PolicyOptions&, const CacheLayout& model);
};

constexpr Known kPolicies[] = {
    {"clo", NewCloPolicy, Caches::kKeysAndValues, true, nullptr},
    {"ess", NewEssPolicy, Caches::kIndexedLatents, true, EssTierShapesOf},
    {"fluxion", NewFluxionPolicy, Caches::kKeysAndValues, true, nullptr},
    {"full", NewFull, Caches::kAny, false, nullptr},
    {"hgca", NewHgca, Caches::kKeysAndValues, true, nullptr},
    {"offload-naive", NewEssPolicy, Caches::kIndexedLatents, true, EssTierShapesOf},
    {"oracle", NewOraclePolicy, Caches::kKeysAndValues, true, nullptr},
    {"recall", NewRecallPolicy, Caches::kKeysAndValues, true, nullptr},
    {"scout", NewScout, Caches::kKeysAndValues, true, nullptr},
};

bool IsFor(const Known& known, const CacheLayout& layout) {
  switch (known.caches) {
    case Caches::kAny:
      return true;
    case Caches::kKeysAndValues:
      return !HasLatents(layout);
    case Caches::kIndexedLatents:
      return HasLatents(layout) && HasIndexKeys(layout);
  }
  return false;
}

absl::Status CheckCaches(const Known& known, const PolicyOptions& o) {
  const CacheLayout& layout = o.hbm->layout();
  if (IsFor(known, layout)) return absl::OkStatus();
  std::vector<std::string> names;
  for (const Known& other : kPolicies) {
    if (IsFor(other, layout)) names.emplace_back(other.name);
  }
  const char* const has = !HasLatents(layout)    ? "keys and values of heads"
                          : HasIndexKeys(layout) ? "latent caches"
                                                 : "latent caches and no indexer";
  return absl::InvalidArgumentError(absl::StrCat(
      "policy: ", o.name, " is for ",
      known.caches == Caches::kKeysAndValues ? "models with keys and values of heads"
                                             : "models with latent caches and an indexer",
      ", and ", o.architecture.empty() ? "this model" : o.architecture, " has ", has,
      ": take one of ", absl::StrJoin(names, ", ")));
}

absl::Status CheckOffload(const PolicyOptions& o) {
  if (o.hbm->overcommitted()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "overcommit: expected 1 with policy ", o.name,
        ", under which host KV caches stay in DRAM and no sequence is preempted; set it to "
        "1, or take policy full"));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string> OffloadingPolicies(const CacheLayout& model) {
  std::vector<std::string> names;
  for (const Known& known : kPolicies) {
    if (known.offloads && IsFor(known, model)) names.emplace_back(known.name);
  }
  return names;
}

void DecideByProfile(const CacheLayout& model, PolicyOptions* options) {
  DecideEssByProfile(model.layers, options);
}

TierShapes TierShapesOf(const PolicyOptions& options, const CacheLayout& model) {
  for (const Known& known : kPolicies) {
    if (options.name != known.name || known.shapes == nullptr || !IsFor(known, model)) continue;
    TierShapes shapes = known.shapes(options, model);
    // Handed-over caches land in DRAM in the model's own layout.
    SLUICE_CHECK(shapes.dram.layout.kinds.size() == model.kinds.size());
    return shapes;
  }
  return {{model}, {model}};
}

Made NewPolicy(const PolicyOptions& options) {
  for (const Known& known : kPolicies) {
    if (options.name != known.name) continue;
    SLUICE_RETURN_IF_ERROR(CheckCaches(known, options));
    if (known.offloads) SLUICE_RETURN_IF_ERROR(CheckOffload(options));
    SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<AttentionPolicy> policy, known.make(options));
    SLUICE_RETURN_IF_ERROR(CheckAttends(*policy, options.hbm->layout()));
    return policy;
  }
  std::vector<std::string> names;
  for (const Known& known : kPolicies) names.emplace_back(known.name);
  return absl::InvalidArgumentError(
      absl::StrCat("policy: expected one of ", absl::StrJoin(names, ", "), ", found '",
                   options.name, "'", DidYouMean(options.name, names)));
}

}  // namespace sluice
