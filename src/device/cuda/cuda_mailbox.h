// The mailbox of the CUDA device: stream memory operations on mapped pinned memory, which can be
// captured in a graph.
//
// Measured, H100, a round trip inside a graph, workers that answer at once (sluice-mailbox-bench):
// 3.8 us with 1 worker, 4.4 with 4; 10 with 14 on a machine of 16 cores.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/device/mailbox.h"

namespace sluice {

// FAILED_PRECONDITION: the driver has no stream memory operations. REQUIRES: `pinned` is zeroed and
// of Mailbox::PinnedBytes(options); the options are valid; streams are CudaStreams.
absl::StatusOr<std::unique_ptr<Mailbox>> NewCudaMailbox(Buffer pinned,
                                                        const MailboxOptions& options);

}  // namespace sluice
