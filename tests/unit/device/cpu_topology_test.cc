#include "src/device/cpu_topology.h"

#include <catch2/catch.hpp>
#include <numeric>
#include <thread>

#include "absl/strings/str_cat.h"
#include "src/device/cpu/cpu_device.h"
#include "tests/unit/device/fake_root.h"

namespace sluice {
namespace {

using Ids = std::vector<int>;

TEST_CASE("lists of cpus are read as the kernel writes them, and nothing else is") {
  CHECK(*ParseCpuList("0-3,8,10-11\n") == Ids{0, 1, 2, 3, 8, 10, 11});
  CHECK(*ParseCpuList("5") == Ids{5});
  CHECK(ParseCpuList("\n")->empty());  // a node without cpus
  CHECK(FormatCpuList({0, 1, 2, 3, 8, 10, 11}) == "0-3,8,10-11");
  CHECK(FormatCpuList({}).empty());
  for (const char* wrong : {"a", "1-", "-1", "3-1", "1-2-3", "1,,2", "0-99999999"}) {
    CHECK(absl::IsInvalidArgument(ParseCpuList(wrong).status()));
  }
}

// A host of two nodes with two cores each; cpu i and cpu i + 4 share a core.
struct FakeSystem : FakeRoot {
  FakeSystem() {
    Write("node/node0/cpulist", "0-1,4-5");
    Write("node/node1/cpulist", "2-3,6-7");
    Write("node/possible", "0-1");
    for (int cpu = 0; cpu < 8; ++cpu) {
      Write(absl::StrCat("cpu/cpu", cpu, "/topology/thread_siblings_list"),
            absl::StrCat(cpu % 4, ",", cpu % 4 + 4));
    }
  }
};

TEST_CASE("workers get cores of their own first, beyond others' and node by node") {
  const FakeSystem system;
  Ids all(8);
  std::iota(all.begin(), all.end(), 0);
  const std::vector<Cpu> cpus = ReadTopology(system.root.string(), all);
  REQUIRE(cpus.size() == 8);
  CHECK(cpus[6].node == 1);
  CHECK(cpus[6].core == 2);
  CHECK(PlaceWorkers(cpus, 1, 3) == Ids{1, 2, 3});
  CHECK(PlaceWorkers(cpus, 1, 5) == Ids{1, 2, 3, 4, 5});
  CHECK(PlaceWorkers(cpus, 0, 8) == Ids{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(PlaceWorkers(cpus, 1, 8).empty());
  // A preferred node's cpus come before all others, those that share a core too.
  CHECK(PlaceWorkers(cpus, 1, 3, 1) == Ids{3, 6, 7});
  CHECK(PlaceWorkers(cpus, 1, 5, 1) == Ids{3, 6, 7, 0, 1});
  // An affinity mask leaves out some: 0, 4 and 5 are of node 0, and 4 shares 0's core.
  const std::vector<Cpu> some = ReadTopology(system.root.string(), Ids{0, 4, 5, 7});
  CHECK(PlaceWorkers(some, 1, 3) == Ids{5, 7, 4});
}

TEST_CASE("where the system says nothing every cpu is a core of node 0") {
  const std::vector<Cpu> cpus = ReadTopology("/nowhere", Ids{2, 3});
  REQUIRE(cpus.size() == 2);
  CHECK(cpus[1].node == 0);
  CHECK(cpus[1].core == 3);
  CHECK(PlaceWorkers(cpus, 1, 1) == Ids{3});
}

TEST_CASE("a thread stays on the cpu that it was given") {
  const std::vector<Cpu> cpus = UsableCpus();
  REQUIRE(static_cast<int>(cpus.size()) == AvailableCores());
  std::thread([&] {
    CHECK(PinThisThread({cpus.back().id}).ok());
    CHECK(AvailableCores() == 1);
    CHECK(UsableCpus().front().id == cpus.back().id);
  }).join();
  CHECK(static_cast<int>(UsableCpus().size()) == static_cast<int>(cpus.size()));
  CHECK(absl::IsInvalidArgument(PinThisThread({-1})));
  CHECK(absl::IsInvalidArgument(PinThisThread({})));
}

}  // namespace
}  // namespace sluice
