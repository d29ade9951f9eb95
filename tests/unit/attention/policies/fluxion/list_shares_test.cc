// The static assignment of whole lists, and how a step's reaches the device.
#include "src/attention/policies/fluxion/list_shares.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>

#include "src/base/rng.h"
#include "src/device/cpu/cpu_device.h"

namespace sluice {
namespace {

using Division = PolicyOptions::Fluxion::Division;

double Sum(const std::vector<float>& shares) {
  return std::accumulate(shares.begin(), shares.end(), 0.0);
}

TEST_CASE("by number, every sequence has the same share of its lists on the device") {
  SplitMix64 random(1);
  for (const double share : {0.0, 0.2, 0.25, 0.37, 0.5, 1.0}) {
    for (const int32_t heads : {1, 4, 8}) {
      std::vector<int32_t> lengths;
      for (int i = 0; i < 9; ++i) lengths.push_back(static_cast<int32_t>(1 + random.Below(100000)));
      const auto shares = WholeLists(Division::kHeads, share, lengths, heads);
      REQUIRE(shares.size() == lengths.size() * static_cast<size_t>(heads));
      CHECK(std::abs(Sum(shares) - share * static_cast<double>(shares.size())) <= 1);
      for (size_t i = 0; i < lengths.size(); ++i) {
        const auto* const of = shares.data() + static_cast<int64_t>(i) * heads;
        CHECK(std::all_of(of, of + heads, [](float s) { return s == 0 || s == 1; }));
        CHECK(std::abs(std::accumulate(of, of + heads, 0.0) - share * heads) < 1);
      }
    }
  }
}

TEST_CASE("by length, both processors have tokens in proportion to their rates") {
  SplitMix64 random(2);
  for (const double share : {0.0, 0.2, 0.37, 0.5, 1.0}) {
    for (const int32_t heads : {1, 4, 8}) {
      std::vector<int32_t> lengths;
      for (int i = 0; i < 8; ++i)
        lengths.push_back(static_cast<int32_t>(16384 + random.Below(49152)));
      const auto shares = WholeLists(Division::kLengths, share, lengths, heads);
      double device = 0, all = 0;
      for (size_t i = 0; i < shares.size(); ++i) {
        CHECK((shares[i] == 0 || shares[i] == 1));
        const double tokens = lengths[i / static_cast<size_t>(heads)];
        device += shares[i] * tokens;
        all += tokens;
      }
      // Neither ends later than the other by more than its last list.
      const double longest = *std::max_element(lengths.begin(), lengths.end());
      CHECK(std::abs(device - share * all) <= longest);
      if (share == 0) CHECK(device == 0);
      if (share == 1) CHECK(device == all);
    }
  }
  // One long sequence among short ones: by number a processor has its lists, by length both.
  const std::vector<int32_t> lengths = {1000, 1000, 1000, 9000};
  const auto by_length = WholeLists(Division::kLengths, 0.5, lengths, 1);
  CHECK(by_length[3] != by_length[0]);
  CHECK((by_length[0] == by_length[1] && by_length[1] == by_length[2]));
}

TEST_CASE("the shares of a step lie by slot, and follow sequences that come and go") {
  const auto device = NewCpuDevice({"auto", 1});
  REQUIRE(device.ok());
  PolicyOptions options;
  options.device = device->get();
  options.fluxion.device_share = 0.5;
  options.fluxion.division = Division::kLengths;
  FluxionShape shape;
  shape.slots = 4;
  shape.kv_heads = 2;
  auto made = ListShares::Create(options, shape);
  REQUIRE(made.ok());
  const auto stream = (*device)->NewStream(Device::StreamKind::kCompute);
  const auto step = [&](std::vector<int32_t> slots, std::vector<int32_t> positions) {
    (*made)->BeginStep(*stream, slots, positions);
    const auto done = (*device)->NewEvent();
    stream->Record(*done);
    done->Wait();
  };
  const auto of = [&](int slot) {
    return std::vector<float>{(*made)->shares()[2 * slot], (*made)->shares()[2 * slot + 1]};
  };
  const auto check = [&](const std::vector<int32_t>& slots, const std::vector<int32_t>& lengths) {
    const auto want = WholeLists(Division::kLengths, 0.5, lengths, 2);
    for (size_t i = 0; i < slots.size(); ++i) {
      INFO("slot " << slots[i]);
      CHECK(of(slots[i]) == std::vector<float>{want[2 * i], want[2 * i + 1]});
    }
  };
  step({3, 1, -1}, {99, 4999, 0});
  check({3, 1}, {100, 5000});
  for (int more = 0; more < 5; ++more) step({3, 1}, {100 + more, 5000 + more});
  check({3, 1}, {105, 5005});
  step({3, 0, 1}, {20000, 7000, 5005});  // slot 3 has another sequence
  check({3, 0, 1}, {20001, 7001, 5006});
  step({0, 2, 2, 2}, {7001, 40, 41, 42});  // a prompt's rows are one sequence
  check({0, 2}, {7002, 43});
}

}  // namespace
}  // namespace sluice
