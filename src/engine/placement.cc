// Slots of the batch: admission, preemption and the way back, release. The scheduler makes the
// decisions (src/scheduler/admission.h).
#include <algorithm>
#include <array>
#include <bitset>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/attention_policy.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/device/rank_group.h"
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
  for (size_t rank = 0; rank < headroom_.size(); ++rank) {
    const SequencePlacement::Headroom free = parts_.policy->HeadroomOf(static_cast<int>(rank));
    AdmissionHeadroom& headroom = headroom_[rank];
    headroom = {};
    headroom.firm_tokens = free.hbm.firm_tokens;
    headroom.soft_tokens = free.hbm.soft_tokens;
    headroom.free_tokens = free.hbm.free_tokens;
    headroom.home_tokens = free.home_tokens;
    headroom.sequences = free.sequences;
  }
  for (const Sequence* sequence : running_) {
    AdmissionHeadroom& headroom = headroom_[static_cast<size_t>(RankOf(*sequence))];
    headroom.growth_tokens += std::min(sequence->total() - sequence->cached, kGrowthTokens);
    headroom.soft_running = headroom.soft_running || sequence->soft;
  }
  waiting_view_.clear();
  // On each rank as many are looked at as there are slots, besides those that may be overtaken.
  std::array<size_t, kMaxRanks> with_home{};
  const auto enough = [&] {
    return std::all_of(with_home.begin(), with_home.begin() + std::ssize(headroom_),
                       [this](size_t count) { return count >= free_slots_.size(); });
  };
  for (const Sequence* sequence : waiting_) {
    if (enough()) break;
    WaitingSequence view;
    const Footprint footprint =
        parts_.policy->FootprintOf(sequence->home_tokens, sequence->total());
    view.total = footprint.hbm_tokens;
    view.context = Least(view.total, sequence->length);
    view.home = sequence->home == nullptr ? footprint.dram_tokens
                                          : sequence->home->Lacks(footprint.dram_tokens);
    view.has_home = sequence->preemptions > 0 && sequence->home != nullptr;
    view.rank = sequence->home == nullptr ? -1 : RankOf(*sequence);
    for (size_t rank = 0; rank < headroom_.size() && view.home == TokensByKind(0); ++rank) {
      if (view.rank < 0 || view.rank == static_cast<int>(rank)) ++with_home[rank];
    }
    view.preemptions = sequence->preemptions;
    view.preempted = sequence->preempted;
    if (sequence->preemptions > 0) view.preempted += now - sequence->preempted_at;
    waiting_view_.push_back(view);
  }
  PlanAdmission(static_cast<int>(free_slots_.size()), absl::MakeSpan(headroom_), waiting_view_,
                &admissions_);
  size_t next = 0;
  std::bitset<kMaxRanks> lacks;
  for (const Admission& admission : admissions_) {
    const auto rank = static_cast<size_t>(admission.rank);
    if (admission.kind == Admission::kWait || lacks[rank]) {
      ++next;
      continue;
    }
    // The plan counts tokens but the pools whole blocks, and a Reserve may have taken DRAM
    // meanwhile.
    if (!Admit(*waiting_[next], admission, now)) {
      lacks[rank] = headroom_[rank].closed = true;
      ++next;
      continue;
    }
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(next));
  }
}

int EngineImpl::RankOf(const Sequence& sequence) const {
  if (sequence.slot >= 0 && slots_[static_cast<size_t>(sequence.slot)] == &sequence) {
    return parts_.policy->RankOf(sequence.slot);
  }
  return sequence.home == nullptr ? 0 : sequence.home->pool()->rank();
}

bool EngineImpl::GivesBackOn(int rank) const {
  const auto there = [&](const auto& sequence) { return RankOf(*sequence) == rank; };
  return std::any_of(preempting_.begin(), preempting_.end(), there) ||
         std::any_of(leaving_.begin(), leaving_.end(), there);
}

// A later turn of a kept sequence holds the sequence's host cache, which may be too small for how
// it goes on. If nothing runs that would give DRAM back, several of them could wait for one another
// for ever, so the youngest ends.
void EngineImpl::EndStarved(absl::Time now) {
  if (waiting_.empty()) return;
  std::bitset<kMaxRanks> busy;
  for (const Sequence* sequence : running_) busy.set(static_cast<size_t>(RankOf(*sequence)));
  for (auto it = waiting_.rbegin(); it != waiting_.rend(); ++it) {
    Sequence& sequence = **it;
    if (sequence.home == nullptr || sequence.preemptions > 0) continue;
    const int rank = RankOf(sequence);
    if (busy[static_cast<size_t>(rank)] || GivesBackOn(rank)) continue;
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

bool EngineImpl::Place(Sequence& sequence, int slot, const Admission& admission) {
  const auto admit = [&] {
    return parts_.policy->Admit(
        slot, sequence.home_tokens, sequence.total(),
        admission.kind == Admission::kFirm ? Promise::kFirm : Promise::kSoft, sequence.home);
  };
  parts_.policy->UseRank(admission.rank);
  if (sequence.seed.has_value() || sequence.home != nullptr) return admit();
  if (TakePrefix(sequence)) {
    const int rank = RankOf(sequence);
    const bool planned = rank == admission.rank;
    if ((planned || !headroom_[static_cast<size_t>(rank)].closed) && admit()) return true;
    LeavePrefix(sequence);
    if (planned) return false;
  }
  return admit();
}

bool EngineImpl::Admit(Sequence& sequence, const Admission& admission, absl::Time now) {
  const int slot = free_slots_.back();
  const bool first = !sequence.seed.has_value();
  const bool alone = first && sequence.home == nullptr;  // nothing was handed over
  if (!Place(sequence, slot, admission)) return false;
  sequence.place.reset();
  if (alone) CountReuse(sequence.prompt_length, sequence.reused_tokens);
  free_slots_.pop_back();
  slots_[static_cast<size_t>(slot)] = &sequence;
  sequence.slot = slot;
  sequence.state = Sequence::State::kRunning;
  sequence.soft = admission.kind == Admission::kSoft;
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
  std::bitset<kMaxRanks> waits;
  for (Sequence* sequence : running_) {  // oldest first; none is passed on its rank that must wait
    const auto rank = static_cast<size_t>(RankOf(*sequence));
    if (!sequence->soft || waits[rank]) continue;
    if (!parts_.policy->MakeFirm(sequence->slot)) {
      waits.set(rank);
      continue;
    }
    sequence->soft = false;
    --soft_running_;
  }
}

bool EngineImpl::GrowOrPreempt(Sequence& sequence) {
  const int64_t most = sequence.cached + static_cast<int64_t>(options_.chunk_tokens);
  if (parts_.policy->Grow(sequence.slot, std::min(sequence.length, most))) return true;
  // A sequence on its way out gives pages back soon.
  const int rank = RankOf(sequence);
  if (GivesBackOn(rank)) return false;
  victim_view_.clear();
  for (const Sequence* running : running_) {
    victim_view_.push_back({running->ticket, running->soft && RankOf(*running) == rank});
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
        parts_.transfers->prefixes(home->pool()->rank())
            ->Publish(sequence->tenant, FirstTokens(*sequence, sequence->share_tokens),
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
