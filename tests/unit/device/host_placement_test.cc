#include "src/device/host_placement.h"

#include <sys/mman.h>

#include <catch2/catch.hpp>

#include "tests/unit/device/fake_root.h"

namespace sluice {
namespace {

using Ids = std::vector<int>;
constexpr char kBus[] = "0000:AB:00.0";
const Ids kUsable = {0, 1, 2, 3, 4, 5, 6, 7};

// A host of two nodes, whose GPU says that it is of `gpu_node`.
struct FakeHost : FakeRoot {
  explicit FakeHost(const std::string& gpu_node) {
    Write("devices/system/node/online", "0-1");
    Write("devices/system/node/node0/cpulist", "0-1,4-5");
    Write("devices/system/node/node1/cpulist", "2-3,6-7");
    Write("bus/pci/devices/0000:ab:00.0/numa_node", gpu_node);
  }
  HostPlacement Placement(const Ids& usable = kUsable) const {
    return PlacementOfPciDevice(kBus, usable, root.string());
  }
};

TEST_CASE("a device's node and the cpus of it that may be used are read from /sys") {
  const FakeHost host("1");
  CHECK(host.Placement().nodes == 2);
  CHECK(host.Placement().node == 1);
  CHECK(host.Placement().cpus == Ids{2, 3, 6, 7});
  CHECK(DescribePlacement(host.Placement()) == "NUMA node 1 of 2, cpus 2-3,6-7");
  CHECK(host.Placement({0, 3, 4}).cpus == Ids{3});
  CHECK(host.Placement({0}).node == 1);
  CHECK(host.Placement({0}).cpus.empty());
  CHECK(DescribePlacement(host.Placement({0})) ==
        "NUMA node 1 of 2, none of whose cpus this process may use");
}

TEST_CASE("a virtual machine that tells no node prefers none") {
  const FakeHost host("-1");
  CHECK(host.Placement().node == -1);
  CHECK(host.Placement().cpus.empty());
  CHECK(DescribePlacement(host.Placement()) == "NUMA node unknown, of 2");
  CHECK(PlacementOfPciDevice("0000:cd:00.0", kUsable, host.root.string()).node == -1);
}

TEST_CASE("on a host of one node there is nothing to prefer") {
  const FakeHost host("0");
  host.Write("devices/system/node/online", "0");
  CHECK(host.Placement().node == -1);
  CHECK(host.Placement().cpus.empty());
  CHECK(DescribePlacement(host.Placement()) == "one NUMA node");
  CHECK(DescribePlacement(PlacementOfPciDevice(kBus, kUsable, "/nowhere")) == "one NUMA node");
}

TEST_CASE("memory prefers a node, or the system's refusal is told") {
  constexpr size_t kBytes = 1 << 20;
  void* const data =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(data != MAP_FAILED);
  const absl::Status status = PreferNode(data, kBytes, 0);
  CHECK((status.ok() || absl::IsFailedPrecondition(status)));
  static_cast<char*>(data)[kBytes - 1] = 1;  // it can be used either way
  CHECK(absl::IsInvalidArgument(PreferNode(data, kBytes, -1)));
  CHECK(absl::IsInvalidArgument(PreferNode(data, kBytes, 1024)));
  munmap(data, kBytes);
}

}  // namespace
}  // namespace sluice
