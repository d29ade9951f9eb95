// Says how a sequence ended in the words of metrics and logs.
#pragma once

#include <string>

#include "src/metrics/reasons.h"
#include "src/request/token_sink.h"

namespace sluice {

struct RequestEnd {
  RequestOutcome outcome = RequestOutcome::kError;
  std::string reason;
};

RequestEnd EndOf(const FinishInfo& info);

}  // namespace sluice
