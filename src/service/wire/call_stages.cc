#include "src/service/wire/call_stages.h"

#include <algorithm>

namespace sluice {

std::vector<CallStage> StagesOf(const FinishInfo& end, absl::Duration arrived, bool pulled) {
  std::vector<CallStage> stages;
  // A stage that nothing followed ends with the sequence.
  const auto add = [&](const char* name, absl::Duration from, absl::Duration to) {
    if (from > end.total) return;
    stages.push_back({name, arrived + from, arrived + std::min(to, end.total)});
  };
  const StageTimes& at = end.stages;
  if (pulled || !end.transfer_id.empty() || at.ready > absl::ZeroDuration()) {
    add(pulled ? "pull" : "transfer", absl::ZeroDuration(), at.ready);
  }
  add("queue", at.ready, at.admitted);
  if (at.stepped > at.admitted) add("warm_up", at.admitted, at.stepped);
  const absl::Duration first =
      end.completion_tokens > 0 ? end.first_token : absl::InfiniteDuration();
  if (first > at.stepped) add("first_token", at.stepped, first);
  add("decode", std::max(first, at.stepped), absl::InfiniteDuration());
  return stages;
}

}  // namespace sluice
