// The operators of policy fluxion in the simulation.
#pragma once

#include "kernels/kernel_table.h"

namespace sluice::sim {

// Replaces the operators that treat keys and results as numbers: those of keys are the reference's,
// and PredictBudgets sees the hash of a head's tokens as two small numbers, so that its features
// depend on every byte. What plans, selects and lists stays as it is.
void UseFluxionHashes(kernels::KernelTable* table);

}  // namespace sluice::sim
