// Admission and preemption: which sequences enter the running batch, and which have to leave it.
// All functions are pure.
//
// HBM may be promised to more sequences than it holds (`overcommit`). A promise is firm or soft.
// All firm promises fit together, so a sequence with a firm promise finds every page of its growth
// once those with soft ones have left. When a page is lacking, the latest sequence with a soft
// promise is preempted: it goes to its reserved DRAM, waits ahead of all newer ones and comes back.
// So
//   - the oldest sequence always goes on: firm promises belong to the older ones, and the next to
//     get one is the oldest with a soft one, before anyone who waits;
//   - nobody starves: a sequence that was preempted kMaxPreemptions times, or waited kMaxPreempted
//     in all, comes back only with a firm promise, and is never chosen again;
//   - nobody is moved back and forth: a soft promise is given only where all that run can grow by
//     kGrowthTokens before a page is lacking.
//
// Where ranks have sequences of their own, all of this is so on each of them: sequences of
// different ranks do not wait for one another, except for a slot. One that may go to any rank goes
// to the one with the fewest sequences that has room, and overtakes nobody there.
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

// A sequence that waits to be admitted. Tokens are those of its footprint in HBM.
struct WaitingSequence {
  TokensByKind context;  // tokens that it takes at once, or soon, for its pending tokens
  TokensByKind total;    // tokens at its end
  TokensByKind home;     // tokens of DRAM that it must get to be admitted; 0: it has all it needs
  // True: its DRAM is reserved already. It was preempted, and its host cache is still large
  // enough.
  bool has_home = false;
  int rank = -1;  // that has its caches; -1: it has none, and any will do
  int preemptions = 0;
  absl::Duration preempted;  // total wait since its first preemption
};

// Capacity for one more sequence on a rank, in tokens.
struct AdmissionHeadroom {
  TokensByKind firm_tokens;   // tokens that can be promised firmly
  TokensByKind soft_tokens;   // tokens that can be promised at all
  TokensByKind free_tokens;   // tokens in free pages
  TokensByKind home_tokens;   // tokens in DRAM
  int sequences = 0;          // that run on the rank, or are to run there
  bool soft_running = false;  // whether a running sequence has a soft promise
  // Tokens by which the running sequences may still grow, at most kGrowthTokens each.
  TokensByKind growth_tokens;

  // PlanAdmission sets these: sequences without DRAM of their own, or all of them, wait behind one
  // that waits for this rank.
  bool home_awaited = false;
  bool closed = false;
};

struct Admission {
  enum Kind { kWait, kFirm, kSoft };
  Admission(Kind k, int r = 0) : kind(k), rank(r) {}  // NOLINT: the kind alone is of rank 0
  Kind kind;
  int rank;
  friend bool operator==(const Admission&, const Admission&) = default;
};

// Decides for each of `waiting` (in order) how it is admitted, and on which rank. On a rank nobody
// is overtaken, so all after the first that must wait also wait; but one that waits for DRAM is
// overtaken by those that have theirs, since only their end gives DRAM back. `slots` are free in
// the batch. `ranks` is what the ranks have, and becomes what is left. `admissions` is overwritten
// and ends with the last sequence that need not wait.
void PlanAdmission(int slots, absl::Span<AdmissionHeadroom> ranks,
                   absl::Span<const WaitingSequence> waiting, std::vector<Admission>* admissions);

struct VictimCandidate {
  uint64_t ticket = 0;  // order of arrival
  bool soft = false;
};

// Returns the index of the sequence that is to leave, the latest with a soft promise, or -1.
int ChooseVictim(absl::Span<const VictimCandidate> running);

}  // namespace sluice
