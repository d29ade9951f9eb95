// Who comes into the running batch, and who has to leave it. Pure: decisions are functions of what
// is passed in.
//
// HBM may be promised to more sequences than it holds (`overcommit`). A promise is firm or soft:
// all firm ones fit together, so a sequence with a firm promise finds every page of its growth once
// those with soft ones have left. When a page is lacking, the latest of the soft ones is preempted:
// it goes to its room in DRAM, waits ahead of all newer ones and comes back. So
//   - the oldest sequence always goes on: firm promises belong to the older ones, and the next to
//     get one is the oldest with a soft one, before anyone who waits;
//   - nobody starves: one that was preempted kMaxPreemptions times, or waited kMaxPreempted in all,
//     comes back with a firm promise only, and is never chosen again;
//   - nobody is moved back and forth: a soft promise is given only where all that run can grow by
//     kGrowthTokens before a page is lacking.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "src/kv/tokens_by_kind.h"

namespace sluice {

inline constexpr int kMaxPreemptions = 2;
inline constexpr absl::Duration kMaxPreempted = absl::Seconds(10);
inline constexpr int64_t kGrowthTokens = 64;

// A sequence that waits for room. Tokens are those of its footprint in HBM.
struct WaitingSequence {
  TokensByKind context;  // that it takes at once, or for its pending tokens soon
  TokensByKind total;    // at its end
  TokensByKind home;     // of DRAM, that it must find to be admitted; 0: it has all it needs
  // Its room in DRAM is there: it was preempted, and its home is still large enough.
  bool has_home = false;
  int preemptions = 0;
  absl::Duration preempted;  // waited in all since its first preemption
};

// Room for one more sequence, in tokens.
struct AdmissionHeadroom {
  TokensByKind firm_tokens;   // that can be promised firmly
  TokensByKind soft_tokens;   // that can be promised at all
  TokensByKind free_tokens;   // in pages that nobody has
  TokensByKind home_tokens;   // in DRAM
  int slots = 0;              // free places in the batch
  bool soft_running = false;  // somebody in the batch has a soft promise
  // Tokens by which those that run may still grow, of each at most kGrowthTokens.
  TokensByKind growth_tokens;
};

enum class Admission { kWait, kFirm, kSoft };

// For each of `waiting` (in the order in which they are to come) how it is admitted. Nobody is
// overtaken, so all after the first that waits wait too; but who waits for DRAM is overtaken by
// those that have theirs, since only their end gives it back. `admissions` is overwritten and ends
// with the last that does not wait.
void PlanAdmission(AdmissionHeadroom room, absl::Span<const WaitingSequence> waiting,
                   std::vector<Admission>* admissions);

struct VictimCandidate {
  uint64_t ticket = 0;  // order of arrival
  bool soft = false;
};

// Index of the sequence that is to leave, or -1: the latest with a soft promise.
int ChooseVictim(absl::Span<const VictimCandidate> running);

}  // namespace sluice
