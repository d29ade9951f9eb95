#include "src/device/machine_memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace sluice {
namespace {

using Path = std::filesystem::path;

// The number behind `key` in a file of lines such as "MemTotal:  1024 kB" or "inactive_file 4096".
std::optional<int64_t> ReadKey(const Path& path, absl::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t:"), absl::SkipEmpty());
    int64_t number = 0;
    if (words.size() < 2 || words[0] != key || !absl::SimpleAtoi(words[1], &number)) continue;
    return words.size() > 2 && words[2] == "kB" ? number * 1024 : number;
  }
  return std::nullopt;
}

// The only number in a file; nothing where it says "max".
std::optional<int64_t> ReadNumber(const Path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  int64_t number = 0;
  if (!absl::SimpleAtoi(line, &number)) return std::nullopt;
  return number;
}

// The names that a version of control groups gives its files.
struct GroupFiles {
  const char* limit;
  const char* usage;
  const char* given_up;  // key in memory.stat: page cache that is given up on demand
};
constexpr GroupFiles kVersion2 = {"memory.max", "memory.current", "inactive_file"};
constexpr GroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                  "total_inactive_file"};

void ApplyLimit(const Path& group, const GroupFiles& files, MachineMemory& memory) {
  const std::optional<int64_t> limit = ReadNumber(group / files.limit);
  if (!limit.has_value()) return;
  const int64_t used = ReadNumber(group / files.usage).value_or(0) -
                       ReadKey(group / "memory.stat", files.given_up).value_or(0);
  memory.available_bytes =
      std::min(memory.available_bytes, std::max(*limit - std::max(used, int64_t{0}), int64_t{0}));
  if (*limit >= memory.total_bytes) return;  // as without a limit: version 1 says 2^63 - 4096
  memory.total_bytes = *limit;
  memory.limit_file = (group / files.limit).string();
}

// The limits of the group `name` and of every group that it is part of, up to `mount`. In a
// container `name` may be the host's name of the group, which is not there: then the container's
// own group is what is mounted.
void ApplyLimits(const Path& mount, const std::string& name, const GroupFiles& files,
                 MachineMemory& memory) {
  for (Path part = Path(name).relative_path(); !part.empty(); part = part.parent_path()) {
    ApplyLimit(mount / part, files, memory);
  }
  ApplyLimit(mount, files, memory);
}

}  // namespace

absl::StatusOr<MachineMemory> ReadMachineMemory(const std::string& root) {
  const Path meminfo = Path(root) / "proc/meminfo";
  const std::optional<int64_t> total = ReadKey(meminfo, "MemTotal");
  if (!total.has_value()) {
    return absl::NotFoundError(absl::StrCat(meminfo.string(), " tells no MemTotal"));
  }
  MachineMemory memory;
  memory.total_bytes = *total;
  memory.available_bytes = ReadKey(meminfo, "MemAvailable").value_or(*total);
  const Path mounts = Path(root) / "sys/fs/cgroup";
  std::ifstream groups(Path(root) / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/name" (version 2) or "7:memory:/name" (version 1).
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    if (parts[0] == "0" && parts[1].empty()) ApplyLimits(mounts, parts[2], kVersion2, memory);
    for (const absl::string_view controller : absl::StrSplit(parts[1], ',')) {
      if (controller == "memory") ApplyLimits(mounts / "memory", parts[2], kVersion1, memory);
    }
  }
  memory.available_bytes = std::min(memory.available_bytes, memory.total_bytes);
  return memory;
}

}  // namespace sluice
