// How the misses of policy ess's decode rows come over the link.
#pragma once

#include "absl/status/statusor.h"
#include "src/attention/offload/mover_choice.h"
#include "src/attention/policies/ess/ess_tier.h"
#include "src/attention/policy_options.h"

namespace sluice {

// Makes the mover that PolicyOptions::Ess::mover asks for, for steps of at most `decode_rows`
// decode rows, and logs what was measured and chosen. It is kUva where pools never miss or every
// entry is copied by itself. REQUIRES: no sequence has been admitted, because a measurement writes
// into the pools. Returns the errors of ChooseMover.
absl::StatusOr<ChosenMover> ChooseEssMover(const PolicyOptions& options, const EssTier& tier,
                                           int decode_rows);

}  // namespace sluice
