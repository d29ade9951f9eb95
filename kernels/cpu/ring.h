// TakeRing on a CPU, for every path and for the reference.
#pragma once

#include "kernels/kernel_table.h"

namespace sluice::kernels::cpu {

// Worker 0 alone looks at each ring in turn.
void TakeRing(const TakeRingParams& p, Worker worker);

}  // namespace sluice::kernels::cpu
