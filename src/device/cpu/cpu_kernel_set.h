// A KernelSet over one of the tables of kernels/kernel_table.h, on streams in host memory.
#pragma once

#include <memory>

#include "kernels/kernel_table.h"
#include "src/device/cpu/cpu_team.h"
#include "src/device/kernel_set.h"

namespace sluice {

// Prepared weights are allocated from `device`. Team and device outlive the kernel set.
std::unique_ptr<KernelSet> NewCpuKernelSet(const kernels::KernelTable& table, CpuTeam* team,
                                           Device* device);

}  // namespace sluice
