#include "src/request/request_end.h"

#include "src/base/status_macros.h"

namespace sluice {

RequestEnd EndOf(const FinishInfo& info) {
  switch (info.reason) {
    case FinishInfo::Reason::kStop:
      return {RequestOutcome::kFinishedStop,
              std::string(info.stop_string.has_value() ? kStopString : kStopToken)};
    case FinishInfo::Reason::kLength:
      return {RequestOutcome::kFinishedLength, std::string(kMaxTokens)};
    case FinishInfo::Reason::kError:
      return {OutcomeOfError(info.status), ReasonLabel(info.status)};
  }
  SLUICE_CHECK(false, "no such reason: ", static_cast<int>(info.reason));
}

}  // namespace sluice
