// Errors that a caller can act on: an absl::Status whose payloads say which field is wrong, a
// reason a program can read, and when to try again. The service layer turns the payloads into
// google.rpc details; everything below speaks absl::Status alone.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace sluice {

// INVALID_ARGUMENT for one field of a request; `field` is its path, e.g. "sampling.temperature".
absl::Status InvalidField(const std::string& field, const std::string& what);

// `status` with another path for its field, in the message too: for a caller to whom the field has
// another name. As it is where it names none.
absl::Status WithField(const absl::Status& status, const std::string& field);

// `status` with a machine-readable reason in UPPER_SNAKE_CASE, e.g. "SLOW_READER".
absl::Status WithReason(absl::Status status, const std::string& reason);

// RESOURCE_EXHAUSTED, with the time after which a retry may find room.
absl::Status ResourceExhausted(const std::string& reason, const std::string& what,
                               absl::Duration retry_after);

// What the functions above attached.
std::optional<std::string> FieldOf(const absl::Status& status);
std::optional<std::string> ReasonOf(const absl::Status& status);
std::optional<absl::Duration> RetryAfterOf(const absl::Status& status);

}  // namespace sluice
