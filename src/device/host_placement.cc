#include "src/device/host_placement.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "src/device/cpu_topology.h"

namespace sluice {
namespace {

using Path = std::filesystem::path;

std::string FirstLine(const Path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

HostPlacement PlacementOfPciDevice(const std::string& bus_id, absl::Span<const int> usable,
                                   const std::string& sys) {
  const Path nodes = Path(sys) / "devices/system/node";
  HostPlacement placement;
  const auto online = ParseCpuList(FirstLine(nodes / "online"));
  if (online.ok() && online->size() > 1) placement.nodes = static_cast<int>(online->size());
  if (placement.nodes == 1) return placement;
  const Path device = Path(sys) / "bus/pci/devices" / absl::AsciiStrToLower(bus_id);
  int node = -1;
  if (!absl::SimpleAtoi(FirstLine(device / "numa_node"), &node) || node < 0) return placement;
  placement.node = node;
  const auto cpus = ParseCpuList(FirstLine(nodes / absl::StrCat("node", node) / "cpulist"));
  if (!cpus.ok()) return placement;
  for (const int cpu : *cpus) {
    if (std::find(usable.begin(), usable.end(), cpu) != usable.end()) placement.cpus.push_back(cpu);
  }
  return placement;
}

std::string DescribePlacement(const HostPlacement& placement) {
  if (placement.nodes == 1) return "one NUMA node";
  if (placement.node < 0) return absl::StrCat("NUMA node unknown, of ", placement.nodes);
  return absl::StrCat("NUMA node ", placement.node, " of ", placement.nodes, ", ",
                      placement.cpus.empty()
                          ? "none of whose cpus this process may use"
                          : absl::StrCat("cpus ", FormatCpuList(placement.cpus)));
}

absl::Status PreferNode(void* data, size_t bytes, int node) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, 1024 / kBits> mask{};  // 1024: the most nodes that Linux can have
  const auto bit = static_cast<size_t>(node);
  if (node < 0 || bit >= mask.size() * kBits) {
    return absl::InvalidArgumentError(absl::StrCat("there is no NUMA node ", node));
  }
  mask[bit / kBits] |= 1ul << (bit % kBits);
  // The kernel takes one bit less than it is told.
  if (syscall(SYS_mbind, data, bytes, MPOL_PREFERRED, mask.data(), mask.size() * kBits + 1, 0) ==
      0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("memory cannot be kept on NUMA node ", node, ": ", std::strerror(errno)));
}

}  // namespace sluice
