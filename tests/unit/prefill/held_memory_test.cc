#include "src/prefill/held_memory.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "src/base/rng.h"

namespace sluice {
namespace {

Buffer ArenaOf(std::vector<uint8_t>* bytes) {
  return Buffer(bytes->data(), bytes->size(), [](void*, size_t) {});
}

TEST_CASE("held memory gives what fits and takes it back, in an arena and without one") {
  std::vector<uint8_t> bytes(100);
  for (const bool in_arena : {false, true}) {
    HeldMemory memory(100, in_arena ? ArenaOf(&bytes) : Buffer());
    auto first = memory.Take(60);
    auto second = memory.Take(40);
    REQUIRE(first != nullptr);
    REQUIRE(second != nullptr);
    CHECK(memory.taken() == 100);
    CHECK(memory.Take(1) == nullptr);
    CHECK((first.get() == bytes.data()) == in_arena);
    first = nullptr;
    CHECK(memory.taken() == 40);
    CHECK(memory.Take(61) == nullptr);
    CHECK(memory.Take(60) != nullptr);
  }
}

TEST_CASE("an arena gives one piece only, and gaps that meet are one again") {
  std::vector<uint8_t> bytes(100);
  HeldMemory memory(100, ArenaOf(&bytes));
  std::vector<std::shared_ptr<uint8_t[]>> all;
  for (int i = 0; i < 4; ++i) all.push_back(memory.Take(25));
  all[0] = nullptr;
  all[2] = nullptr;
  CHECK(memory.taken() == 50);
  CHECK(memory.Take(26) == nullptr);  // 50 bytes are free, 25 and 25
  all[1] = nullptr;
  const auto joined = memory.Take(75);
  CHECK(joined.get() == bytes.data());
}

TEST_CASE("an arena lives until the last owner of its memory is gone") {
  bool freed = false;
  std::vector<uint8_t> bytes(10);
  std::shared_ptr<uint8_t[]> taken;
  {
    HeldMemory memory(10, Buffer(bytes.data(), 10, [&](void*, size_t) { freed = true; }));
    taken = memory.Take(10);
  }
  CHECK_FALSE(freed);
  taken = nullptr;
  CHECK(freed);
}

TEST_CASE("pieces of an arena never overlap, in any order of taking and giving back") {
  constexpr uint64_t kBytes = 4096;
  std::vector<uint8_t> bytes(kBytes);
  HeldMemory memory(kBytes, ArenaOf(&bytes));
  struct Piece {
    std::shared_ptr<uint8_t[]> data;
    uint64_t bytes;
    uint8_t value;
  };
  std::vector<Piece> pieces;
  const uint64_t seed = RandomU64();
  INFO("seed " << seed);
  SplitMix64 random(seed);
  uint64_t taken = 0;
  for (int i = 0; i < 5000; ++i) {
    if (random() % 2 == 0 || pieces.empty()) {
      const uint64_t count = 1 + random() % 700;
      auto data = memory.Take(count);
      if (data == nullptr) continue;
      const auto value = static_cast<uint8_t>(i);
      std::memset(data.get(), value, count);
      pieces.push_back({std::move(data), count, value});
      taken += count;
    } else {
      const auto at = pieces.begin() + static_cast<int64_t>(random() % pieces.size());
      REQUIRE(std::all_of(at->data.get(), at->data.get() + at->bytes,
                          [&](uint8_t byte) { return byte == at->value; }));
      taken -= at->bytes;
      pieces.erase(at);
    }
    REQUIRE(memory.taken() == taken);
  }
  pieces.clear();
  CHECK(memory.Take(kBytes).get() == bytes.data());
}

}  // namespace
}  // namespace sluice
