// Errors that a caller can act on. They are an absl::Status whose payloads say which field is
// wrong, give a reason that a program can read, and say when to try again. The service layer turns
// the payloads into google.rpc details; all layers below use absl::Status only.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace sluice {

// Returns INVALID_ARGUMENT for one field of a request. `field` is its path, for example
// "sampling.temperature".
absl::Status InvalidField(const std::string& field, const std::string& what);

// Returns `status` with another path for its field, in the message too, for a caller that knows the
// field by another name. A status that names no field is returned as it is.
absl::Status WithField(const absl::Status& status, const std::string& field);

// Returns `status` with a machine-readable reason in UPPER_SNAKE_CASE, for example "SLOW_READER".
absl::Status WithReason(absl::Status status, const std::string& reason);

// Returns RESOURCE_EXHAUSTED with a reason and the time after which a retry may find room.
absl::Status ResourceExhausted(const std::string& reason, const std::string& what,
                               absl::Duration retry_after);

// Return what the functions above attached, or nothing.
std::optional<std::string> FieldOf(const absl::Status& status);
std::optional<std::string> ReasonOf(const absl::Status& status);
std::optional<absl::Duration> RetryAfterOf(const absl::Status& status);

}  // namespace sluice
