// The place of a device in the host: the memory and the cpus that are near it. On a host of several
// NUMA nodes, memory of another node costs a transfer the link between the nodes.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace sluice {

struct HostPlacement {
  int nodes = 1;          // NUMA nodes of the host
  int node = -1;          // the device's node; -1: unknown, or the host has one node
  std::vector<int> cpus;  // the node's cpus that this process may use; empty: none is preferred
};

// The placement of the PCI device `bus_id` ("0000:19:00.0", in either case), as `sys` tells it, of
// whose cpus the process may use `usable`. Virtual machines often tell no node.
HostPlacement PlacementOfPciDevice(const std::string& bus_id, absl::Span<const int> usable,
                                   const std::string& sys = "/sys");

// "NUMA node 1 of 2, cpus 32-63,96-127"; "one NUMA node"; "NUMA node unknown, of 2".
std::string DescribePlacement(const HostPlacement& placement);

// Makes the system take the pages of [data, data + bytes) that are not there yet from `node` while
// it has free memory, then from others. FAILED_PRECONDITION: the system refused; containers need
// CAP_SYS_NICE for it. REQUIRES: `data` begins a page.
absl::Status PreferNode(void* data, size_t bytes, int node);

}  // namespace sluice
