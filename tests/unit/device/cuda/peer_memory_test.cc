// Processes map one another's memory, of GPUs that reach each other or of one that they share.
#include "src/device/cuda/peer_memory.h"

#include <cuda_runtime_api.h>

#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/ranks/peers.h"
#include "src/base/status_macros.h"
#include "tests/support/device.h"
#include "tests/support/ranks.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kCount = 1000;

using Body = absl::Status (*)(Device& device, HostRanks& host, PeerMemory::Meeting* meeting);

absl::Status Join(const RankGroupOptions& options, Body body) {
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, testing::TestDevice("cuda"));
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<HostRanks> host,
                          HostRanks::Join({options.name, options.rank, options.size,
                                           sizeof(PeerMemory::Meeting), options.join_timeout}));
  return body(*device, *host, reinterpret_cast<PeerMemory::Meeting*>(host->data()));
}

// Runs `body` on two ranks, and returns what was wrong.
std::string OnTwoRanks(Body body) {
  return testing::Joined(testing::RunRankProcesses(
      testing::RankOptions(2),
      [body](const RankGroupOptions& options) {
        return std::string(Join(options, body).message());
      },
      /*on_gpus=*/true));
}

absl::Status Unexpected(const std::string& what) { return absl::InternalError(what); }

TEST_CASE("ranks write into one another's memory", "[device][cuda][processes]") {
  if (const std::string why = testing::WhyNoSharedGpu(); !why.empty()) return SkipTest(why);
  CHECK(OnTwoRanks([](Device& device, HostRanks& host, PeerMemory::Meeting* meeting) {
          SLUICE_ASSIGN_OR_RETURN(const auto peers, PeerMemory::Make(&host, meeting, kCount * 4));
          SLUICE_ASSIGN_OR_RETURN(const Buffer data,
                                  device.Allocate(MemoryKind::kPinned, kCount * 4, "a test"));
          float* const x = data.as<float>();
          for (int i = 0; i < kCount; ++i) x[i] = static_cast<float>(i * (1 + host.rank()));
          kernels::PeerAllReduceParams p{};
          p.group = peers->group();
          p.in = p.out = x;
          p.count = kCount;
          if (kernels::cuda::LaunchPeerAllReduce(p, nullptr) != cudaSuccess ||
              cudaDeviceSynchronize() != cudaSuccess) {
            return Unexpected("the sum failed");
          }
          for (int i = 0; i < kCount; ++i) {
            if (x[i] != static_cast<float>(3 * i)) return Unexpected(absl::StrCat("sum ", i));
          }
          return peers->Takes(kCount * 4) && !peers->Takes(kCount * 4 + 1)
                     ? absl::OkStatus()
                     : Unexpected("it takes other sizes");
        }) == "");
}

TEST_CASE("buffers of ranks are mapped on all of them or on none", "[device][cuda][processes]") {
  if (const std::string why = testing::WhyNoSharedGpu(); !why.empty()) return SkipTest(why);
  CHECK(OnTwoRanks([](Device& device, HostRanks& host, PeerMemory::Meeting* meeting) {
          SLUICE_ASSIGN_OR_RETURN(const Buffer data,
                                  device.Allocate(MemoryKind::kDevice, 4096, "a test"));
          SLUICE_ASSIGN_OR_RETURN(const auto peers, PeerMemory::Make(&host, meeting, 4096));
          auto* const begin = data.as<uint8_t>();
          void* at[kernels::kMaxPeerRanks] = {};
          // Rank 1 has nothing to show at first.
          const absl::Status none = peers->Map(host.rank() == 1 ? nullptr : begin, 4096);
          if (!absl::IsFailedPrecondition(none) || none.message().find("rank 1: ") != 0) {
            return Unexpected("mapped: " + none.ToString());
          }
          if (peers->Find(begin, 16, at)) return Unexpected("found what was not mapped");
          SLUICE_RETURN_IF_ERROR(peers->Map(begin, 4096));
          if (!peers->Find(begin + 16, 4080, at)) return Unexpected("not found");
          if (at[host.rank()] != begin + 16) return Unexpected("found elsewhere");
          if (peers->Find(begin + 16, 4081, at)) return Unexpected("found what is longer");
          return absl::OkStatus();
        }) == "");
}

TEST_CASE("a rank alone has nobody's memory to write into", "[device][cuda][processes]") {
  RankGroupOptions options = testing::RankOptions(1);
  const auto host = HostRanks::Join({options.name, 0, 1, sizeof(PeerMemory::Meeting)});
  REQUIRE(host.ok());
  auto* const meeting = reinterpret_cast<PeerMemory::Meeting*>((*host)->data());
  CHECK(absl::IsFailedPrecondition(PeerMemory::Make(host->get(), meeting, 4096).status()));
}

}  // namespace
}  // namespace sluice
