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

}  // namespace

void PlanAdmission(AdmissionHeadroom headroom, absl::Span<const WaitingSequence> waiting,
                   std::vector<Admission>* admissions) {
  admissions->clear();
  size_t admitted = 0;
  bool home_awaited = false;
  for (const WaitingSequence& sequence : waiting) {
    home_awaited = home_awaited || !sequence.home.Within(headroom.home_tokens);
    if (home_awaited && sequence.home != TokensByKind(0)) {
      admissions->push_back(Admission::kWait);
      continue;
    }
    const bool firm = !headroom.soft_running && sequence.total.Within(headroom.firm_tokens) &&
                      sequence.context.Within(headroom.free_tokens);
    if (headroom.slots == 0 || (!firm && !FitsSoftly(sequence, headroom))) break;
    admissions->push_back(firm ? Admission::kFirm : Admission::kSoft);
    admitted = admissions->size();
    --headroom.slots;
    headroom.soft_running = headroom.soft_running || !firm;
    headroom.firm_tokens -= sequence.total;
    headroom.soft_tokens -= sequence.total;
    headroom.free_tokens -= sequence.context;
    headroom.home_tokens -= firm || sequence.has_home ? sequence.home : sequence.total;
    headroom.growth_tokens += GrowthOf(sequence);
  }
  admissions->resize(admitted);
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
