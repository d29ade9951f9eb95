// Ending requests by the names that a gateway gave them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/request/generator.h"

namespace sluice {

// INVALID_ARGUMENT naming `field` where no request can have this name.
absl::Status CheckAbortName(const std::string& field, const std::string& request_id);

// Cancels them with reason CANCEL_CALL; `done(how many were alive)` runs once, maybe on another
// thread.
void AbortAll(Generator* generator, const std::vector<std::string>& request_ids,
              std::function<void(int)> done);

}  // namespace sluice
