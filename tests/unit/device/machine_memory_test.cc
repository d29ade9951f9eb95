#include "src/device/machine_memory.h"

#include <catch2/catch.hpp>

#include "tests/unit/device/fake_root.h"

namespace sluice {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

struct FakeMachine : FakeRoot {
  FakeMachine() {
    Write("proc/meminfo",
          "MemTotal:       67108864 kB\nMemFree:         1048576 kB\n"
          "MemAvailable:   50331648 kB");
  }
  MachineMemory Read() const {
    const auto memory = ReadMachineMemory(root.string());
    REQUIRE(memory.ok());
    return *memory;
  }
};

TEST_CASE("without a control group the machine's memory counts") {
  FakeMachine machine;
  CHECK(machine.Read().total_bytes == 64 * kGiB);
  CHECK(machine.Read().available_bytes == 48 * kGiB);
  CHECK(machine.Read().limit_file.empty());
  machine.Write("proc/self/cgroup", "0::/");
  machine.Write("sys/fs/cgroup/memory.max", "max");
  CHECK(machine.Read().total_bytes == 64 * kGiB);
}

TEST_CASE("the tightest limit above the process counts, and page cache is not taken for used") {
  FakeMachine machine;
  machine.Write("proc/self/cgroup", "0::/pods/this.slice");
  const std::string group = "sys/fs/cgroup/pods/this.slice/";
  machine.Write(group + "memory.max", "max");
  machine.Write(group + "memory.current", "8589934592");
  machine.Write("sys/fs/cgroup/pods/memory.max", "17179869184");     // 16 GiB
  machine.Write("sys/fs/cgroup/pods/memory.current", "9663676416");  // 9 GiB
  machine.Write("sys/fs/cgroup/pods/memory.stat", "anon 1\ninactive_file 3221225472\nfile 2");
  CHECK(machine.Read().total_bytes == 16 * kGiB);
  CHECK(machine.Read().available_bytes == 10 * kGiB);
  CHECK(machine.Read().limit_file == (machine.root / "sys/fs/cgroup/pods/memory.max").string());
  // More than its limit is in use: nothing is available, not less than nothing.
  machine.Write(group + "memory.max", "4294967296");
  CHECK(machine.Read().total_bytes == 4 * kGiB);
  CHECK(machine.Read().available_bytes == 0);
}

TEST_CASE("a limit of version 1 counts, and its number for none does not") {
  FakeMachine machine;
  machine.Write("proc/self/cgroup", "12:cpu,cpuacct:/c\n7:hugetlb,memory:/docker/abc\n0::/");
  // As in a container whose group is mounted in place of the root: /docker/abc is not there.
  const std::string mount = "sys/fs/cgroup/memory/";
  machine.Write(mount + "memory.limit_in_bytes", "9223372036854771712");
  machine.Write(mount + "memory.usage_in_bytes", "1073741824");
  CHECK(machine.Read().total_bytes == 64 * kGiB);
  CHECK(machine.Read().available_bytes == 48 * kGiB);
  machine.Write(mount + "memory.limit_in_bytes", "34359738368");  // 32 GiB
  machine.Write(mount + "memory.stat", "total_inactive_file 536870912");
  CHECK(machine.Read().total_bytes == 32 * kGiB);
  CHECK(machine.Read().available_bytes == 32 * kGiB - kGiB / 2);
}

TEST_CASE("this machine tells its memory, and one without /proc says so") {
  const auto memory = ReadMachineMemory();
  REQUIRE(memory.ok());
  CHECK(memory->total_bytes > 0);
  CHECK(memory->available_bytes <= memory->total_bytes);
  CHECK(absl::IsNotFound(ReadMachineMemory("/nowhere").status()));
}

}  // namespace
}  // namespace sluice
