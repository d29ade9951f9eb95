// The cpus that this process may use, and the choice of cpus for pinned workers.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace sluice {

struct Cpu {
  int id = 0;
  int node = 0;  // NUMA node
  int core = 0;  // the lowest cpu of its physical core
};

// Parses "0-3,8,10-11", as files under /sys list cpus. INVALID_ARGUMENT: the text is anything else.
absl::StatusOr<std::vector<int>> ParseCpuList(const std::string& text);
// Returns the same text for cpus in ascending order.
std::string FormatCpuList(absl::Span<const int> cpus);

// Returns what `system` ("/sys/devices/system") says of the cpus `ids`, in their order. A cpu of
// which it says nothing is a core of its own, of node 0.
std::vector<Cpu> ReadTopology(const std::string& system, absl::Span<const int> ids);

// Returns the cpus in this process's affinity mask.
std::vector<Cpu> UsableCpus();

// Returns a cpu for each of `workers` workers, beside `others` threads that are not pinned and need
// a cpu each. Two workers share a core only when every core has one. Neighbours, who share
// sequences, are in one node where it has room. All cpus of `node` come before others; with -1 no
// node is preferred. Returns nothing if there are too few cpus, and then nobody is pinned: two
// threads on one cpu cost more than wandering does.
std::vector<int> PlaceWorkers(std::vector<Cpu> cpus, int others, int workers, int node = -1);

// Keeps the calling thread on `cpus`. INVALID_ARGUMENT: there is no such cpu, or `cpus` is empty.
absl::Status PinThisThread(absl::Span<const int> cpus);

}  // namespace sluice
