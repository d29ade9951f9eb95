#include "src/service/prefill/prompt_counts.h"

#include "src/request/request_end.h"

namespace sluice {

void PromptCounts::Queued() {
  metrics_.waiting.Add(1);
  absl::MutexLock lock(&mutex_);
  ++now_.waiting;
}

void PromptCounts::Left() {
  metrics_.waiting.Add(-1);
  absl::MutexLock lock(&mutex_);
  --now_.waiting;
}

void PromptCounts::Begun(absl::Time arrived) {
  Left();
  metrics_.queue_seconds.Observe(absl::Now() - arrived);
  absl::MutexLock lock(&mutex_);
  metrics_.SetRunning(++now_.running);
}

void PromptCounts::Ended(const absl::Status& status, size_t tokens, absl::Time arrived) {
  metrics_
      .requests(status.ok() ? RequestOutcome::kHandedOver : OutcomeOfError(status),
                status.ok() ? std::string(kPushed) : ReasonLabel(status))
      .Add();
  if (status.ok()) metrics_.tokens(TokenKind::kPrompt).Add(static_cast<double>(tokens));
  metrics_.request_seconds.Observe(absl::Now() - arrived);
  absl::MutexLock lock(&mutex_);
  metrics_.SetRunning(--now_.running);
}

PromptCounts::Now PromptCounts::now() const {
  absl::MutexLock lock(&mutex_);
  return now_;
}

}  // namespace sluice
