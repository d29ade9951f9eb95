#include "src/scheduler/admission.h"

#include <algorithm>

namespace sluice {
namespace {

TokensByKind GrowthOf(const WaitingSequence& sequence) {
  return Least(sequence.total - sequence.context, kGrowthTokens);
}

bool FitsSoftly(const WaitingSequence& sequence, const AdmissionHeadroom& room) {
  if (sequence.preemptions >= kMaxPreemptions || sequence.preempted >= kMaxPreempted) return false;
  return sequence.total.Within(room.soft_tokens) &&
         (sequence.has_home || sequence.total.Within(room.home_tokens)) &&
         (sequence.context + GrowthOf(sequence) + room.growth_tokens).Within(room.free_tokens);
}

}  // namespace

void PlanAdmission(AdmissionHeadroom room, absl::Span<const WaitingSequence> waiting,
                   std::vector<Admission>* admissions) {
  admissions->clear();
  size_t admitted = 0;
  bool home_awaited = false;
  for (const WaitingSequence& sequence : waiting) {
    home_awaited = home_awaited || !sequence.home.Within(room.home_tokens);
    if (home_awaited && sequence.home != TokensByKind(0)) {
      admissions->push_back(Admission::kWait);
      continue;
    }
    const bool firm = !room.soft_running && sequence.total.Within(room.firm_tokens) &&
                      sequence.context.Within(room.free_tokens);
    if (room.slots == 0 || (!firm && !FitsSoftly(sequence, room))) break;
    admissions->push_back(firm ? Admission::kFirm : Admission::kSoft);
    admitted = admissions->size();
    --room.slots;
    room.soft_running = room.soft_running || !firm;
    room.firm_tokens -= sequence.total;
    room.soft_tokens -= sequence.total;
    room.free_tokens -= sequence.context;
    room.home_tokens -= firm || sequence.has_home ? sequence.home : sequence.total;
    room.growth_tokens += GrowthOf(sequence);
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
