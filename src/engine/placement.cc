// Slots of the batch: admission, preemption and the way back, release. The scheduler makes the
// decisions (src/scheduler/admission.h).
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/attention_policy.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/engine/engine_impl.h"
#include "src/metrics/metrics.h"

namespace sluice {
namespace {

bool ByTicket(const Sequence* a, const Sequence* b) { return a->ticket < b->ticket; }

}  // namespace

void EngineImpl::Enqueue(Sequence& sequence) {
  sequence.state = Sequence::State::kWaiting;
  waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), &sequence, ByTicket),
                  &sequence);
}

void EngineImpl::AdmitWaiting(absl::Time now) {
  if (waiting_.empty() || free_slots_.empty()) return;
  const SequencePlacement::Headroom policy_headroom = parts_.policy->HeadroomNow();
  AdmissionHeadroom headroom;
  headroom.firm_tokens = policy_headroom.hbm.firm_tokens;
  headroom.soft_tokens = policy_headroom.hbm.soft_tokens;
  headroom.free_tokens = policy_headroom.hbm.free_tokens;
  headroom.home_tokens = policy_headroom.home_tokens;
  headroom.slots = static_cast<int>(free_slots_.size());
  headroom.soft_running = soft_running_ > 0;
  for (const Sequence* sequence : running_) {
    headroom.growth_tokens += std::min(sequence->total() - sequence->cached, kGrowthTokens);
  }
  waiting_view_.clear();
  size_t with_home = 0;  // the others may be overtaken
  for (const Sequence* sequence : waiting_) {
    if (with_home == free_slots_.size()) break;
    WaitingSequence view;
    const Footprint footprint =
        parts_.policy->FootprintOf(sequence->home_tokens, sequence->total());
    view.total = footprint.hbm_tokens;
    view.context = Least(view.total, sequence->length);
    view.home = sequence->home == nullptr ? footprint.dram_tokens
                                          : sequence->home->Lacks(footprint.dram_tokens);
    with_home += view.home == TokensByKind(0) ? 1 : 0;
    view.has_home = sequence->preemptions > 0 && sequence->home != nullptr;
    view.preemptions = sequence->preemptions;
    view.preempted = sequence->preempted;
    if (sequence->preemptions > 0) view.preempted += now - sequence->preempted_at;
    waiting_view_.push_back(view);
  }
  PlanAdmission(headroom, waiting_view_, &admissions_);
  size_t next = 0;
  for (const Admission admission : admissions_) {
    if (admission == Admission::kWait) {
      ++next;
      continue;
    }
    const Promise promise = admission == Admission::kFirm ? Promise::kFirm : Promise::kSoft;
    // The plan counts tokens but the pools whole blocks, and a Reserve may have taken DRAM
    // meanwhile.
    if (!Admit(*waiting_[next], promise, now)) return;
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(next));
  }
}

// A later turn of a kept sequence holds the sequence's host cache, which may be too small for how
// it goes on. If nothing runs that would give DRAM back, several of them could wait for one another
// for ever, so the youngest ends.
void EngineImpl::EndStarved(absl::Time now) {
  if (!running_.empty() || !preempting_.empty() || !leaving_.empty()) return;
  for (auto it = waiting_.rbegin(); it != waiting_.rend(); ++it) {
    Sequence& sequence = **it;
    if (sequence.home == nullptr || sequence.preemptions > 0) continue;
    const Footprint need = parts_.policy->FootprintOf(sequence.home_tokens, sequence.total());
    const TokensByKind lacks = sequence.home->Lacks(need.dram_tokens);
    if (lacks == TokensByKind(0)) continue;
    FinishWith(
        sequence,
        ResourceExhausted(
            reasons::kDramFull,
            absl::StrCat("the sequence needs DRAM for ",
                         sequence.home->pool()->layout().Describe(lacks),
                         " more tokens, none is free, and no running sequence would give any "
                         "back; ask for fewer max_tokens, or try a new sequence later"),
            parts_.finish_rate != nullptr ? parts_.finish_rate->RetryAfter()
                                          : FinishRate::kDefault),
        now);
    return;
  }
}

bool EngineImpl::Admit(Sequence& sequence, Promise promise, absl::Time now) {
  const int slot = free_slots_.back();
  const bool first = !sequence.seed.has_value();
  const bool alone = first && sequence.home == nullptr;  // nothing was handed over
  const bool took = alone && TakePrefix(sequence);
  if (!parts_.policy->Admit(slot, sequence.home_tokens, sequence.total(), promise, sequence.home)) {
    if (took) LeavePrefix(sequence);
    return false;
  }
  if (alone) CountReuse(sequence.prompt_length, sequence.reused_tokens);
  free_slots_.pop_back();
  slots_[static_cast<size_t>(slot)] = &sequence;
  sequence.slot = slot;
  sequence.state = Sequence::State::kRunning;
  sequence.soft = promise == Promise::kSoft;
  soft_running_ += sequence.soft ? 1 : 0;
  sequence.last_step = launched_steps_;
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, ByTicket),
                  &sequence);
  Trace(sequence, SequenceStage::kRunning, now);
  if (first) {
    sequence.seed = seeds_();
    // Reserved so that it grows without allocating.
    sequence.tokens.reserve(static_cast<size_t>(sequence.total()));
    if (parts_.drafter != nullptr) {
      sequence.drafter = parts_.drafter->Begin(sequence.total());
      sequence.drafts.reserve(options_.draft_tokens);
    }
    absl::MutexLock lock(&submit_mutex_);
    --waiting_count_;
    sequence.queued = now - sequence.ready;
    sequence.stages.admitted = now - sequence.arrival;
  } else {
    sequence.preempted += now - sequence.preempted_at;
  }
  parts_.policy->BeginPrompt(slot, sequence.prompt_length,
                             std::min(sequence.context_length, sequence.length - 1));
  sequence.prompt_ended = !parts_.policy->NeedsEndPrompt();
  EndPromptIfDone(sequence);
  batch_->BeginDrafts(*stream_, slot, sequence.cached);
  batch_->Join(*stream_, slot, sequence.tokens, sequence.request.sampling, *sequence.seed,
               static_cast<int32_t>(sequence.prompt_length), sequence.stops.stop_ids());
  if (first) {
    parts_.metrics->queue_seconds.Observe(sequence.queued);
  } else {
    parts_.metrics->preempted_seconds.Observe(now - sequence.preempted_at);
  }
  return true;
}

void EngineImpl::MakeFirm() {
  if (soft_running_ == 0) return;
  for (Sequence* sequence : running_) {  // oldest first; none is passed that must wait
    if (!sequence->soft) continue;
    if (!parts_.policy->MakeFirm(sequence->slot)) return;
    sequence->soft = false;
    --soft_running_;
  }
}

bool EngineImpl::GrowOrPreempt(Sequence& sequence) {
  const int64_t most = sequence.cached + static_cast<int64_t>(options_.chunk_tokens);
  if (parts_.policy->Grow(sequence.slot, std::min(sequence.length, most))) return true;
  // A sequence on its way out gives pages back soon.
  if (!leaving_.empty() || !preempting_.empty()) return false;
  victim_view_.clear();
  for (const Sequence* running : running_) {
    victim_view_.push_back({running->ticket, running->soft});
  }
  const int victim = ChooseVictim(victim_view_);
  SLUICE_CHECK(victim >= 0, "firm promises fit together");
  Preempt(*running_[static_cast<size_t>(victim)]);
  return false;
}

void EngineImpl::Preempt(Sequence& sequence) {
  sequence.state = Sequence::State::kPreempting;
  sequence.evicted = false;
  sequence.soft = false;
  --soft_running_;
  ++sequence.preemptions;
  sequence.preempted_at = parts_.clock->Now();
  preempting_.push_back(&sequence);
  Trace(sequence, SequenceStage::kPreempted, sequence.preempted_at);
  parts_.metrics->preemptions.Add();
}

void EngineImpl::MoveOut(absl::Time /*now*/) {
  std::erase_if(preempting_, [this](Sequence* sequence) {
    if (!SlotAtRest(*sequence)) return false;
    if (!sequence->evicted) {
      // Nothing is in flight, so the host knows every token, and every KV is where it belongs.
      SLUICE_CHECK(sequence->length == static_cast<int64_t>(sequence->tokens.size()) &&
                   sequence->in_flight == 0);
      parts_.policy->Evict(sequence->slot, sequence->cached);
      sequence->evicted = true;
      return false;
    }
    sequence->home = parts_.policy->DetachHostCache(sequence->slot);
    sequence->home_tokens = sequence->cached;
    FreeSlot(sequence->slot);
    Enqueue(*sequence);
    return true;
  });
}

void EngineImpl::EndPromptIfDone(Sequence& sequence) {
  if (sequence.prompt_ended || sequence.cached < sequence.prompt_length ||
      sequence.last_step > completed_steps_) {
    return;
  }
  // Decode rows wait for EndPrompt, and prompts end where decode rows begin: however much of the
  // prompt was handed over, the first decode row is that of position prompt_length.
  SLUICE_CHECK(sequence.cached == sequence.prompt_length);
  SharePrompt(sequence);
  parts_.policy->EndPrompt(sequence.slot, sequence.prompt_length, std::move(sequence.hints));
  sequence.hints = {};
  sequence.prompt_ended = true;
}

void EngineImpl::FreeSlot(int slot) {
  slots_[static_cast<size_t>(slot)] = nullptr;
  free_slots_.push_back(slot);
}

bool EngineImpl::SlotAtRest(const Sequence& sequence) {
  return sequence.last_step <= completed_steps_ && parts_.policy->Warm(sequence.slot) &&
         batch_->joined(sequence.slot).Ready();
}

Event* EngineImpl::SlotEvent(const Sequence& sequence) {
  Event& joined = batch_->joined(sequence.slot);
  return joined.Ready() ? &parts_.policy->WarmEvent(sequence.slot) : &joined;
}

void EngineImpl::ReleaseSlots() {
  std::erase_if(leaving_, [this](const std::unique_ptr<Sequence>& sequence) {
    if (!SlotAtRest(*sequence)) return false;
    const bool keeps = !sequence->keep_id.empty();
    if ((keeps || sequence->share_tokens > 0) && !sequence->evicted) {
      parts_.policy->Evict(sequence->slot, keeps ? sequence->keep_tokens : sequence->share_tokens);
      sequence->evicted = true;
      if (!SlotAtRest(*sequence)) return false;
    }
    if (!keeps && sequence->share_tokens == 0) {
      parts_.policy->Release(sequence->slot);
    } else {
      std::unique_ptr<SequenceCache> home = parts_.policy->DetachHostCache(sequence->slot);
      // Caches that a failed device left are neither kept nor shared.
      if (!parts_.device->Health().ok()) home.reset();
      if (keeps) {
        parts_.transfers->kept().KeepHome(sequence->keep_id, std::move(home));
      } else if (home != nullptr) {
        parts_.transfers->prefixes()->Publish(sequence->tenant,
                                              FirstTokens(*sequence, sequence->share_tokens),
                                              PrefixCache::Readers::kNone, *home);
      }
    }
    FreeSlot(sequence->slot);
    return true;
  });
}

Event* EngineImpl::PendingSlotEvent() {
  // Returns what planning saw, not what is so now: a slot that became warm since has yet to get its
  // step.
  if (cold_ != nullptr) return cold_;
  if (!leaving_.empty()) return SlotEvent(*leaving_.front());
  if (!preempting_.empty()) return SlotEvent(*preempting_.front());
  return nullptr;
}

}  // namespace sluice
