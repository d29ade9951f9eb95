#include "src/metrics/reasons.h"

#include "src/base/error.h"
#include "src/base/reasons.h"

namespace sluice {

std::string ReasonLabel(const absl::Status& status) {
  if (auto reason = ReasonOf(status); reason.has_value()) return *std::move(reason);
  return absl::StatusCodeToString(status.code());
}

RequestOutcome OutcomeOfError(const absl::Status& status) {
  if (absl::IsCancelled(status)) return RequestOutcome::kCancelled;
  if (absl::IsDeadlineExceeded(status)) return RequestOutcome::kDeadline;
  if (ReasonOf(status) == reasons::kSlowReader) return RequestOutcome::kSlowReader;
  return RequestOutcome::kError;
}

}  // namespace sluice
