// Ends requests by the names that a gateway gave them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/request/generator.h"

namespace sluice {

// Returns INVALID_ARGUMENT naming `field` if no request can have this name.
absl::Status CheckAbortName(const std::string& field, const std::string& request_id);

// Cancels the requests with reason CANCEL_CALL. `done` runs once, maybe on another thread, with the
// number of requests that were alive.
void AbortAll(Generator* generator, const std::vector<std::string>& request_ids,
              std::function<void(int)> done);

}  // namespace sluice
