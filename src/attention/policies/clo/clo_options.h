// Checks the options of policy clo.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "src/attention/policies/clo/hash_matrix.h"
#include "src/attention/policy_options.h"

namespace sluice {

inline constexpr int32_t kCloSinkTokens = 4;  // first tokens, to which every row attends (CLO, 3.1)

// Returns INVALID_ARGUMENT, which names the option and what was expected, if one does not fit the
// model or is out of range. `hash` is the shape of the model's hash matrices, and `ring` is the
// newest tokens to which every row attends.
absl::Status CheckCloOptions(const PolicyOptions& options, const HashShape& hash, int64_t ring);

}  // namespace sluice
