// Speculation: when a sequence brings drafts to a step, and when a step must wait for them.
//
// Where the next rows of a sequence lie is known only when its drafts are accepted or refuted, so a
// step with drafts is read before the next one is launched, and a sequence that has drafts to offer
// makes the next step wait for the token under way. All sequences of the batch wait with it. This
// costs each of them the host's time between two steps. If only the sequences with drafts waited,
// the others would have a step of their own in between, which reads all weights again: those with
// drafts would have every second step. While no sequence has drafts, steps are launched ahead as
// they are without speculation. Drafts that the device makes come with the results of each step, so
// with them every step waits while a sequence's drafts are worth it.
#include <algorithm>

#include "kernels/draft_params.h"
#include "src/attention/attention_policy.h"
#include "src/engine/engine_impl.h"
#include "src/metrics/metrics.h"
#include "src/model/model.h"

namespace sluice {

int EngineImpl::DraftsNow() const {
  return draft_limit_.has_value() ? draft_limit_->Of(static_cast<int>(running_.size()))
                                  : static_cast<int>(options_.draft_tokens);
}

int EngineImpl::MostDrafts(const Sequence& sequence) const {
  if (sequence.drafter == nullptr || !sequence.prompt_ended) return 0;
  // The row of the last draft chooses a token too.
  const int64_t left = sequence.total() - sequence.length - 1;
  return static_cast<int>(std::min<int64_t>(DraftsNow(), left));
}

bool EngineImpl::MustReadFirst() {
  if (parts_.drafter == nullptr || steps_under_way() == 0) return false;
  if (steps_[static_cast<size_t>(BufferOf(launched_steps_))].drafts) return true;
  return std::any_of(running_.begin(), running_.end(), [this](Sequence* sequence) {
    if (MostDrafts(*sequence) < 1) return false;
    sequence->drafter->Follow(sequence->tokens);
    // With nothing under way it may draft at once.
    return sequence->in_flight > 0 && sequence->cached >= sequence->prompt_length &&
           sequence->drafter->Expects();
  });
}

int32_t EngineImpl::Draft(Sequence& sequence) {
  sequence.drafts.clear();
  // Drafts follow tokens that the host knows, and a step ahead would choose one that it does not.
  // Tokens that were handed over are computed first.
  if (sequence.in_flight > 0 || sequence.cached < sequence.prompt_length ||
      sequence.cached + 1 != sequence.length) {
    return 0;
  }
  int most = MostDrafts(sequence);
  while (most > 0 && !sequence.request.sink->HasRoom(1 + static_cast<size_t>(most))) --most;
  if (most < 1) return 0;
  sequence.drafter->Follow(sequence.tokens);
  sequence.drafter->Propose(most, &sequence.drafts);
  // Nobody is preempted for drafts.
  if (!sequence.drafts.empty() &&
      !parts_.policy->Grow(sequence.slot, sequence.length + std::ssize(sequence.drafts))) {
    sequence.drafts.clear();
  }
  return static_cast<int32_t>(sequence.drafts.size());
}

void EngineImpl::LearnDrafts(Sequence& sequence, int buffer, int index) {
  if (!batch_->has_device_drafts()) return;
  learnt_.clear();
  const int32_t vocab = parts_.model->config().vocab_size;
  for (int i = 0; i < static_cast<int>(options_.draft_tokens); ++i) {
    const int32_t draft = batch_->DraftAfter(buffer, index, i);
    if (draft == kernels::kNoDraft) break;
    if (draft < 0 || draft >= vocab) {
      // No answer depends on drafts, so a draft layer that fails costs its drafts and no sequence.
      parts_.metrics->dropped_drafts.Add();
      break;
    }
    learnt_.push_back(draft);
  }
  sequence.drafter->Learn(sequence.tokens, learnt_);
}

void EngineImpl::LearnLimit(const Step& step, absl::Time now) {
  if (draft_limit_.has_value() && step.decodes) {
    // A step with drafts begins when the host has read the one before, so that is in its time. A
    // longer pause is not: there was nothing to do.
    constexpr absl::Duration kPause = absl::Milliseconds(5);
    const bool paused = step.launched > last_completed_ + kPause;
    draft_limit_->Note(step.running, step.draft_limit, static_cast<int>(step.sampled.size()),
                       accepted_, now - (paused ? step.launched : last_completed_));
    parts_.metrics->draft_limit.Set(DraftsNow());
  }
  std::fill(accepted_.begin(), accepted_.end(), 0);
}

void EngineImpl::FillRowTokens() {
  row_tokens_.clear();
  if (parts_.drafter == nullptr) return;
  for (const PlanRow& row : plan_.rows) {
    const Sequence& sequence = *slots_[static_cast<size_t>(row.slot)];
    for (int64_t i = 0; i < row.count; ++i) {
      const auto at = static_cast<size_t>(row.first_position + i);
      const int64_t draft = i - (row.count - row.drafts);
      if (draft >= 0) {
        row_tokens_.push_back(sequence.drafts[static_cast<size_t>(draft)]);
      } else if (row.first_position < sequence.prompt_length || at >= sequence.tokens.size()) {
        row_tokens_.push_back(-1);  // Join wrote it, or a step under way chooses it
      } else {
        row_tokens_.push_back(sequence.tokens[at]);
      }
    }
  }
}

}  // namespace sluice
