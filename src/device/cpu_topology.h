// The cpus that this process may use, and which of them workers that are pinned take.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace sluice {

struct Cpu {
  int id = 0;
  int node = 0;  // of memory (NUMA)
  int core = 0;  // the lowest cpu of its physical core
};

// "0-3,8,10-11", as files under /sys list cpus. INVALID_ARGUMENT: anything else.
absl::StatusOr<std::vector<int>> ParseCpuList(const std::string& text);
// The same text for cpus in ascending order.
std::string FormatCpuList(absl::Span<const int> cpus);

// What `system` ("/sys/devices/system") says of the cpus `ids`, in their order. Where it says
// nothing, a cpu is a core of its own, of node 0.
std::vector<Cpu> ReadTopology(const std::string& system, absl::Span<const int> ids);

// The cpus in this process's affinity mask.
std::vector<Cpu> UsableCpus();

// A cpu for each of `workers` workers, beside `others` threads that are not pinned and need a cpu
// each. One worker to a core before two share one; neighbours, who share sequences, in one node
// where it has room. `node` comes first with all of its cpus; -1: no node does. Empty: too few
// cpus, then nobody is pinned: two threads on one cpu cost more than wandering does.
std::vector<int> PlaceWorkers(std::vector<Cpu> cpus, int others, int workers, int node = -1);

// Keeps the calling thread on `cpus`. INVALID_ARGUMENT: there is no such cpu, or none was given.
absl::Status PinThisThread(absl::Span<const int> cpus);

}  // namespace sluice
