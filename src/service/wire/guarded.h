// The last line of defence around a handler: an exception that it throws becomes the answer of its
// call.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"

namespace sluice {

// Returns work()'s status, or INTERNAL with reason EXCEPTION if work() throws. Our own code throws
// nothing, but libraries do, and so does an allocation that fails. `call` names the call in the
// log.
template <typename Work>
absl::Status Guarded(const char* call, Work&& work) {
  try {
    if (SLUICE_FAILPOINT(kServiceHandler)) throw std::runtime_error("failpoint service.handler");
    return std::forward<Work>(work)();
  } catch (const std::exception& error) {
    Log(LogLevel::kError, "a handler threw", {{"call", call}, {"error", error.what()}});
    return WithReason(
        absl::InternalError(absl::StrCat("this node failed on the call: ", error.what())),
        reasons::kException);
  }
}

}  // namespace sluice
