#include "src/attention/policy_factory.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/attention/policies/hgca/hgca_policy.h"
#include "src/attention/policies/oracle/oracle_policy.h"
#include "src/attention/policies/recall/recall_policy.h"
#include "src/attention/policies/scout/scout_policy.h"
#include "src/base/nearest_name.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

using Made = absl::StatusOr<std::unique_ptr<AttentionPolicy>>;

Made NewFull(const PolicyOptions& o) {
  return NewFullPolicy({o.device, o.hbm, o.slots, o.max_context, o.dram});
}

Made NewScout(const PolicyOptions& o) { return NewScoutPolicy(o); }

Made NewHgca(const PolicyOptions& o) { return NewHgcaPolicy(o); }

struct Known {
  const char* name;
  Made (*make)(const PolicyOptions&);
  bool offloads;  // over the offload tiers, with operators of sparse attention
};

constexpr Known kPolicies[] = {
    {"full", NewFull, false},          {"hgca", NewHgca, true},   {"oracle", NewOraclePolicy, true},
    {"recall", NewRecallPolicy, true}, {"scout", NewScout, true},
};

absl::Status CheckOffload(const PolicyOptions& o) {
  if (!o.device->kernels().HasSparse()) {
    return absl::UnimplementedError(
        absl::StrCat("policy: ", o.name, " needs operators of sparse attention, which device ",
                     o.device->name(), " has not yet: take --policy full there, or --device cpu"));
  }
  if (o.hbm->overcommitted()) {
    return absl::InvalidArgumentError(
        absl::StrCat("overcommit: expected 1 with policy ", o.name,
                     ", under which a sequence's home is in DRAM and none is preempted; set it to "
                     "1, or take policy full"));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string> OffloadingPolicies() {
  std::vector<std::string> names;
  for (const Known& known : kPolicies) {
    if (known.offloads) names.emplace_back(known.name);
  }
  return names;
}

Made NewPolicy(const PolicyOptions& options) {
  for (const Known& known : kPolicies) {
    if (options.name != known.name) continue;
    if (known.offloads) SLUICE_RETURN_IF_ERROR(CheckOffload(options));
    return known.make(options);
  }
  std::vector<std::string> names;
  for (const Known& known : kPolicies) names.emplace_back(known.name);
  return absl::InvalidArgumentError(
      absl::StrCat("policy: expected one of ", absl::StrJoin(names, ", "), ", found '",
                   options.name, "'", DidYouMean(options.name, names)));
}

}  // namespace sluice
