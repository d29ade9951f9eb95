// The DRAM that this process may use: the machine's, or less where its control group (a container's
// or a service's memory limit) allows less.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace sluice {

struct MachineMemory {
  // The least of the machine's DRAM and of the limits of the process's control groups.
  int64_t total_bytes = 0;
  // Bytes of it that can be allocated now without swapping, page cache that is given up on demand
  // included.
  int64_t available_bytes = 0;
  // The file with the limit that decides total_bytes; empty where it is the machine's DRAM.
  std::string limit_file;
};

// Reads /proc/meminfo, and the limits of control groups of version 2 or 1, below `root`, which
// tests replace. A control group that cannot be read limits nothing. NOT_FOUND: there is no
// readable /proc/meminfo.
absl::StatusOr<MachineMemory> ReadMachineMemory(const std::string& root = "/");

}  // namespace sluice
