// The simulated operators of latent caches: an entry and an index key are words that go into the
// caches as they are; index scores and attention are hashes of what lies there.
#pragma once

#include "kernels/kernel_table.h"

namespace sluice::sim {

// Puts them in the places of the real ones.
void UseLatentHashes(kernels::KernelTable* table);

}  // namespace sluice::sim
