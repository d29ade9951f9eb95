#include "src/scheduler/admission.h"

#include <algorithm>

namespace sluice {
namespace {

TokensByKind GrowthOf(const WaitingSequence& sequence) {
  return Least(sequence.total - sequence.context, kGrowthTokens);
}

bool FitsSoftly(const WaitingSequence& sequence, const AdmissionHeadroom& headroom) {
  if (sequence.preemptions >= kMaxPreemptions || sequence.preempted >= kMaxPreempted) return false;
  return sequence.total.Within(headroom.soft_tokens) &&
         (sequence.has_home || sequence.total.Within(headroom.home_tokens)) &&
         (sequence.context + GrowthOf(sequence) + headroom.growth_tokens)
             .Within(headroom.free_tokens);
}

// Returns whether the sequence waits for the rank's DRAM, or behind another that does.
bool AwaitsHome(const WaitingSequence& sequence, const AdmissionHeadroom& headroom) {
  return !sequence.home.Within(headroom.home_tokens) ||
         (headroom.home_awaited && sequence.home != TokensByKind(0));
}

// Returns how the rank takes the sequence, given a slot.
Admission::Kind KindOf(const WaitingSequence& sequence, const AdmissionHeadroom& headroom) {
  if (headroom.closed || AwaitsHome(sequence, headroom)) return Admission::kWait;
  if (!headroom.soft_running && sequence.total.Within(headroom.firm_tokens) &&
      sequence.context.Within(headroom.free_tokens)) {
    return Admission::kFirm;
  }
  return FitsSoftly(sequence, headroom) ? Admission::kSoft : Admission::kWait;
}

void Take(const WaitingSequence& sequence, bool firm, AdmissionHeadroom* headroom) {
  headroom->soft_running = headroom->soft_running || !firm;
  headroom->firm_tokens -= sequence.total;
  headroom->soft_tokens -= sequence.total;
  headroom->free_tokens -= sequence.context;
  headroom->home_tokens -= firm || sequence.has_home ? sequence.home : sequence.total;
  headroom->growth_tokens += GrowthOf(sequence);
  ++headroom->sequences;
}

}  // namespace

void PlanAdmission(int slots, absl::Span<AdmissionHeadroom> ranks,
                   absl::Span<const WaitingSequence> waiting, std::vector<Admission>* admissions) {
  admissions->clear();
  size_t admitted = 0;
  for (const WaitingSequence& sequence : waiting) {
    const bool any = sequence.rank < 0;
    const int first = any ? 0 : sequence.rank;
    const int end = any ? static_cast<int>(ranks.size()) : first + 1;
    Admission best = Admission::kWait;
    for (int rank = first; rank < end && slots > 0; ++rank) {
      const AdmissionHeadroom& headroom = ranks[static_cast<size_t>(rank)];
      const Admission::Kind kind = KindOf(sequence, headroom);
      if (kind == Admission::kWait) continue;
      if (best.kind == Admission::kWait ||
          headroom.sequences < ranks[static_cast<size_t>(best.rank)].sequences) {
        best = {kind, rank};
      }
    }
    admissions->push_back(best);
    if (best.kind != Admission::kWait) {
      admitted = admissions->size();
      --slots;
      Take(sequence, best.kind == Admission::kFirm, &ranks[static_cast<size_t>(best.rank)]);
      continue;
    }
    for (int rank = first; rank < end; ++rank) {
      AdmissionHeadroom& headroom = ranks[static_cast<size_t>(rank)];
      if (AwaitsHome(sequence, headroom)) {
        headroom.home_awaited = true;
      } else {
        headroom.closed = true;
      }
    }
    const auto closed = [](const AdmissionHeadroom& headroom) { return headroom.closed; };
    if (std::all_of(ranks.begin(), ranks.end(), closed)) break;
  }
  admissions->erase(admissions->begin() + static_cast<std::ptrdiff_t>(admitted), admissions->end());
}

int ChooseVictim(absl::Span<const VictimCandidate> running) {
  int victim = -1;
  for (size_t i = 0; i < running.size(); ++i) {
    if (!running[i].soft) continue;
    if (victim < 0 || running[i].ticket > running[static_cast<size_t>(victim)].ticket) {
      victim = static_cast<int>(i);
    }
  }
  return victim;
}

}  // namespace sluice
