#include "src/bench/report/machine.h"

#include <unistd.h>

#include <fstream>

#include "src/bench/report/revision.h"
#include "src/device/cpu/cpu_device.h"

namespace sluice::bench {
namespace {

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  const std::string key = "model name";
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const size_t begin = line.find_first_not_of(": \t", key.size());
    if (begin != std::string::npos) return line.substr(begin);
  }
  return "unknown";
}

}  // namespace

Machine ThisMachine() {
  Machine machine;
  machine.cpu = CpuName();
  machine.cores = AvailableCores();
  machine.memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  machine.revision = kRevision;
  return machine;
}

}  // namespace sluice::bench
