// The simulated operators of latent caches. An entry and an index key are words that go into the
// caches as they are; index scores and attention are hashes of what lies there.
#pragma once

#include "kernels/kernel_table.h"

namespace sluice::sim {

// Replaces the real operators of `table` by the simulated ones.
void UseLatentHashes(kernels::KernelTable* table);

}  // namespace sluice::sim
