#include "src/base/rng.h"

#include <array>
#include <catch2/catch.hpp>
#include <cstring>
#include <set>
#include <vector>

#include "kernels/params.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

TEST_CASE("SplitMix64 gives the published sequence") {
  SplitMix64 rng(1234567);
  CHECK(rng() == 6457827717110365317ull);
  CHECK(rng() == 3203168211198807973ull);
  CHECK(rng() == 9817491932198370423ull);
}

TEST_CASE("SplitMix64 and the sampling operator's draw are one generator") {
  const uint64_t seed = RandomU64();
  SplitMix64 rng(seed);
  for (uint64_t i = 0; i < 100; ++i) CHECK(rng.Uniform() == kernels::UniformFromSeed(seed, i));
}

TEST_CASE("Below stays below its bound and reaches every value") {
  SplitMix64 rng(TestSeed());
  std::array<int, 7> counts{};
  for (int i = 0; i < 7000; ++i) ++counts.at(rng.Below(7));
  for (int count : counts) {
    CHECK(count > 800);  // 1000 expected, standard deviation 29
    CHECK(count < 1200);
  }
  CHECK(rng.Below(1) == 0);
}

TEST_CASE("the system's random numbers differ, and every byte is written") {
  std::set<uint64_t> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(RandomU64());
  CHECK(seen.size() == 1000);

  // 1 KiB is written 32 times. A byte that is zero every time was not written.
  std::vector<unsigned char> any(1024);
  for (int round = 0; round < 32; ++round) {
    std::vector<unsigned char> bytes(1024 + 1);
    RandomBytes(bytes.data(), 1024);
    CHECK(bytes[1024] == 0);
    for (size_t i = 0; i < 1024; ++i) any[i] |= bytes[i];
  }
  for (unsigned char byte : any) CHECK(byte != 0);
}

}  // namespace
}  // namespace sluice
