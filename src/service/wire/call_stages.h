// The stages of a sequence's life as parts of its call, for traces.
#pragma once

#include <vector>

#include "absl/time/time.h"
#include "src/request/token_sink.h"
#include "src/service/wire/call_record.h"

namespace sluice {

// Returns the stages that the sequence reached, in their order; the last one ends with it.
//   transfer or pull  its caches were on their way (`pulled` says which); only with a handoff
//   queue             it was ready and waited for admission
//   warm_up           it had a slot, and its HBM was filled; not if that took no time
//   first_token       from its first step to its first token; not if that token was handed over
//   decode            from its first token, or its first step, to its end
// `arrived` is the time from the call's beginning to the sequence's.
std::vector<CallStage> StagesOf(const FinishInfo& end, absl::Duration arrived, bool pulled);

}  // namespace sluice
