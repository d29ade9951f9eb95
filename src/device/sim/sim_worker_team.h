// The workers of the simulated device: their shares happen in virtual time between the Raise and
// the Await of a round, in any order, with faults from the seed.
//
// A share happens at one moment, and its time is drawn, not computed from its work. So where
// workers claim their work (co-attention), the first share of a round does all that its worker may,
// and the others find nothing left. Results do not depend on it, and neither do times.
#pragma once

#include <memory>

#include "src/device/sim/sim_stream.h"
#include "src/device/worker_team.h"

namespace sluice {

// REQUIRES: `errors` is zeroed, one word a slot; the options are valid; streams are SimStreams of
// `device`.
std::unique_ptr<WorkerTeam> NewSimWorkerTeam(SimDeviceState* device, const MailboxOptions& options,
                                             Buffer errors, WorkerFn work);

}  // namespace sluice
