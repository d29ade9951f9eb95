// Tests TakeRing: what lies in the rings of workers reaches its targets, and nothing else changes.
#include <atomic>
#include <chrono>
#include <thread>

#include "kernels/ring_params.h"
#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

struct RingCase {
  int32_t workers, depth, unit_bytes, parts, bundle_units;
  int64_t misalignment;
};

const std::vector<RingCase> kCases = {
    {1, 1, 656, 1, 12, 0}, {14, 8, 656, 1, 12, 0}, {3, 4, 256, 2, 32, 0},  {64, 3, 16, 1, 1, 0},
    {2, 5, 20, 2, 7, 4},   {5, 4, 8208, 1, 2, 0},  {33, 2, 1040, 3, 5, 0}, {7, 6, 4, 1, 32, 8},
};

// The memory of a round: rings, and a target of which each unit is named once at most.
class Round {
 public:
  Round(const RingCase& c, int64_t bundles_of_each, Random& random)
      : case_(c),
        bundles_(bundles_of_each),
        targets_of_each_(bundles_of_each * kMostBundleUnits),
        place_bytes_(RoundUp(int64_t{c.bundle_units} * c.parts * c.unit_bytes, 16)),
        part_pitch_(RoundUp(int64_t{c.unit_bytes} + 32, 16)),
        units(c.workers * c.depth * place_bytes_),
        entries(int64_t{c.workers} * c.depth * kMostBundleUnits),
        words(int64_t{c.workers} * c.depth),
        open(1),
        target_units(c.workers * targets_of_each_),
        target(c.misalignment + target_units.size() * c.parts * part_pitch_),
        want(target.size()) {
    for (RingWord& word : words) word.value = 0;
    for (unsigned char& byte : target) byte = 0xEE;
    for (unsigned char& byte : want) byte = 0xEE;
    std::vector<int32_t> order(static_cast<size_t>(target_units.size()));
    for (size_t i = 0; i < order.size(); ++i) {
      order[i] = static_cast<int32_t>(i);
      std::swap(order[i], order[random() % (i + 1)]);
    }
    std::copy(order.begin(), order.end(), target_units.begin());
  }

  // Writes the bundle, a unit of which may be skipped, and gives the word to be put there.
  uint32_t Fill(int64_t worker, int64_t bundle, Random& random) {
    const int64_t place = worker * case_.depth + bundle % case_.depth;
    const auto count = static_cast<int32_t>(1 + random() % uint64_t(case_.bundle_units));
    unsigned char* from = units.data() + place * place_bytes_;
    for (int32_t i = 0; i < count; ++i) {
      const int64_t entry = worker * targets_of_each_ + bundle * kMostBundleUnits + i;
      const bool skips = random() % 9 == 0;
      entries.data()[place * kMostBundleUnits + i] = skips ? -1 : static_cast<int32_t>(entry);
      unsigned char* to = want.data() + case_.misalignment +
                          int64_t{target_units.data()[entry]} * case_.parts * part_pitch_;
      for (int32_t part = 0; part < case_.parts; ++part, to += part_pitch_) {
        for (int32_t b = 0; b < case_.unit_bytes; ++b, ++from) {
          *from = static_cast<unsigned char>(random());
          if (!skips) to[b] = *from;
        }
      }
    }
    return RingWordOf(bundle, count);
  }

  TakeRingParams Params() {
    TakeRingParams p{};
    p.units = units.data();
    p.entries = entries.data();
    p.words = words.data();
    p.open = open.data();
    p.target = target.data() + case_.misalignment;
    p.target_pitch = case_.parts * part_pitch_;
    p.target_units = target_units.data();
    p.place_bytes = place_bytes_;
    p.part_pitch = part_pitch_;
    p.workers = case_.workers;
    p.depth = case_.depth;
    p.unit_bytes = case_.unit_bytes;
    p.parts = case_.parts;
    return p;
  }

  void Check() {
    for (const RingWord& word : words) REQUIRE(word.value == 0);
    CHECK(target.Damage() + units.Damage() + words.Damage() + entries.Damage() == "");
    CHECK(std::memcmp(target.data(), want.data(), static_cast<size_t>(target.size())) == 0);
  }
  uint32_t* WordOf(int64_t worker, int64_t bundle) {
    return &words.data()[worker * case_.depth + bundle % case_.depth].value;
  }
  int64_t bundles() const { return bundles_; }

 private:
  static int64_t RoundUp(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }
  const RingCase case_;
  const int64_t bundles_, targets_of_each_, place_bytes_, part_pitch_;

 public:
  Guarded<unsigned char> units;
  Guarded<int32_t> entries;
  Guarded<RingWord> words;
  Guarded<uint32_t> open;
  Guarded<int32_t> target_units;
  Guarded<unsigned char> target, want;
};

void TestWhatIsThere(const KernelTable& table, Random& random) {
  for (const RingCase& c : kCases) {
    INFO(c.workers << " workers, " << c.depth << " places, " << c.unit_bytes << " bytes");
    Round round(c, c.depth, random);
    for (int32_t worker = 0; worker < c.workers; ++worker) {
      const auto bundles = static_cast<int64_t>(random() % uint64_t(c.depth + 1));
      for (int64_t b = 0; b < bundles; ++b)
        *round.WordOf(worker, b) = round.Fill(worker, b, random);
    }
    TakeRingParams p = round.Params();
    round.open.data()[0] = 0;
    if (random() % 2 == 0) p.open = nullptr;
    p.max_workers = static_cast<int32_t>(random() % 6);
    RunThreads(table.take_ring, p, 3);
    round.Check();
  }
}
SLUICE_TEST_ON_EVERY_PATH("take_ring takes all that is there once the round is over",
                          TestWhatIsThere)
TEST_CASE("take_ring takes all that is there once the round is over (reference)", "[kernels]") {
  OnPath("reference", TestWhatIsThere);
}

// Workers that fill small rings many times over while the operator runs; one of them never begins,
// and one ends in the midst.
void TestBeside(const KernelTable& table, Random& random) {
  constexpr int64_t kBundles = 40;
  for (const RingCase& c : {RingCase{4, 3, 656, 1, 12, 0}, RingCase{3, 1, 256, 2, 9, 0}}) {
    Round round(c, kBundles, random);
    round.open.data()[0] = 1;
    std::atomic<int> left{c.workers};
    std::vector<std::thread> threads;
    const uint64_t seed = random();
    std::atomic<bool> stuck{false};
    for (int32_t worker = 0; worker < c.workers; ++worker) {
      threads.emplace_back([&, worker] {
        Random own(seed + static_cast<uint64_t>(worker));
        const int64_t end = worker == 0 ? 0 : worker == 1 ? kBundles / 2 : kBundles;
        const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        for (int64_t b = 0; b < end && !stuck; ++b) {
          uint32_t* const word = round.WordOf(worker, b);
          while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != 0 && !stuck) {
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() > patience) stuck = true;
          }
          __atomic_store_n(word, round.Fill(worker, b, own), __ATOMIC_RELEASE);
        }
        if (--left == 0) __atomic_store_n(round.open.data(), 0u, __ATOMIC_RELEASE);
      });
    }
    RunThreads(table.take_ring, round.Params(), 1);
    for (std::thread& thread : threads) thread.join();
    REQUIRE_FALSE(stuck);
    round.Check();
  }
}
SLUICE_TEST_ON_EVERY_PATH("take_ring takes bundles while workers write them", TestBeside)

TEST_CASE("the word of a bundle is never that of another one that may lie in its place",
          "[kernels]") {
  for (const int64_t bundle : {int64_t{0}, int64_t{1}, int64_t{63}, (int64_t{1} << 26) - 1,
                               int64_t{1} << 26, (int64_t{1} << 26) + 5}) {
    for (int32_t units = 1; units <= kMostBundleUnits; ++units) {
      const uint32_t word = RingWordOf(bundle, units);
      CHECK(word != 0);
      CHECK(RingUnits(word, bundle) == units);
      CHECK(RingUnits(word, bundle + 1) == 0);
      CHECK(RingUnits(word, bundle + 16) == 0);
    }
    CHECK(RingUnits(0, bundle) == 0);
  }
}

}  // namespace
}  // namespace sluice::kernels
