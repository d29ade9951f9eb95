#include "src/device/cpu_topology.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Returns the list in a file; an empty one if the file is missing or cannot be read.
std::vector<int> ReadCpuList(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  const auto list = ParseCpuList(line);
  return list.ok() ? *list : std::vector<int>();
}

std::map<int, int> ReadNodes(const std::filesystem::path& system) {
  std::map<int, int> node_of;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(system / "node", none)) {
    const std::string name = entry.path().filename().string();
    int node = 0;
    if (name.rfind("node", 0) != 0 || !absl::SimpleAtoi(name.substr(4), &node)) continue;
    for (const int cpu : ReadCpuList(entry.path() / "cpulist")) node_of[cpu] = node;
  }
  return node_of;
}

}  // namespace

absl::StatusOr<std::vector<int>> ParseCpuList(const std::string& text) {
  constexpr int kMost = 1 << 16;  // more than any kernel has
  std::vector<int> out;
  const absl::string_view all = absl::StripAsciiWhitespace(text);
  if (all.empty()) return out;
  for (const absl::string_view part : absl::StrSplit(all, ',')) {
    const std::vector<std::string> ends = absl::StrSplit(part, '-');
    int first = 0, last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last < first || last >= kMost) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", text, "' is no list of cpus, as in 0-3,8"));
    }
    for (int cpu = first; cpu <= last; ++cpu) out.push_back(cpu);
  }
  return out;
}

std::string FormatCpuList(absl::Span<const int> cpus) {
  std::string out;
  for (size_t i = 0; i < cpus.size();) {
    size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    absl::StrAppend(&out, out.empty() ? "" : ",", cpus[i]);
    if (end - i > 1) absl::StrAppend(&out, "-", cpus[end - 1]);
    i = end;
  }
  return out;
}

std::vector<Cpu> ReadTopology(const std::string& system, absl::Span<const int> ids) {
  const std::filesystem::path root(system);
  const std::map<int, int> node_of = ReadNodes(root);
  std::vector<Cpu> out;
  for (const int id : ids) {
    Cpu cpu{id, 0, id};
    if (const auto at = node_of.find(id); at != node_of.end()) cpu.node = at->second;
    const std::vector<int> siblings =
        ReadCpuList(root / "cpu" / absl::StrCat("cpu", id) / "topology" / "thread_siblings_list");
    if (!siblings.empty()) cpu.core = *std::min_element(siblings.begin(), siblings.end());
    out.push_back(cpu);
  }
  return out;
}

std::vector<Cpu> UsableCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> ids;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) ids.push_back(cpu);
    }
  }
  return ReadTopology("/sys/devices/system", ids);
}

std::vector<int> PlaceWorkers(std::vector<Cpu> cpus, int others, int workers, int node) {
  if (static_cast<int>(cpus.size()) < others + workers) return {};
  // rank[cpu] is the number of cpus of its core that come before it.
  std::map<int, int> seen;
  std::map<int, int> rank;
  std::sort(cpus.begin(), cpus.end(), [](const Cpu& a, const Cpu& b) { return a.id < b.id; });
  for (const Cpu& cpu : cpus) rank[cpu.id] = seen[cpu.core]++;
  std::sort(cpus.begin(), cpus.end(), [&rank, node](const Cpu& a, const Cpu& b) {
    return std::tuple(a.node != node, rank[a.id], a.node, a.id) <
           std::tuple(b.node != node, rank[b.id], b.node, b.id);
  });
  std::vector<int> out;
  for (int i = 0; i < workers; ++i) out.push_back(cpus[static_cast<size_t>(others + i)].id);
  return out;
}

absl::Status PinThisThread(absl::Span<const int> cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) {
      return absl::InvalidArgumentError(absl::StrCat("there is no cpu ", cpu));
    }
    CPU_SET(cpu, &set);
  }
  if (cpus.empty()) return absl::InvalidArgumentError("a thread needs a cpu");
  const int error = pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
  if (error == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "a thread cannot be kept on cpus ", FormatCpuList(cpus), ": ", std::strerror(error)));
}

}  // namespace sluice
