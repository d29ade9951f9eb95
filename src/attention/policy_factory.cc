#include "src/attention/policy_factory.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/base/nearest_name.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewPolicy(const PolicyOptions& options) {
  if (options.name == "full") {
    return NewFullPolicy(
        {options.device, options.hbm, options.slots, options.max_context, options.dram});
  }
  const std::vector<std::string> names = {"full"};
  return absl::InvalidArgumentError(
      absl::StrCat("there is no policy '", options.name, "'", DidYouMean(options.name, names)));
}

}  // namespace sluice
