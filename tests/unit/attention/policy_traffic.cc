#include "tests/unit/attention/policy_traffic.h"

#include <catch2/catch.hpp>
#include <map>
#include <vector>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice::testing {
namespace {

constexpr int kSequences = 12;

// A sequence's stream of vectors, its context and its steps, all drawn from one seed.
int ContextOf(uint64_t seed) { return 1 + static_cast<int>(SplitMix64(seed).Below(500)); }
// Returns whether the prompt's last token is computed, as a row of the prompt, and not handed over.
bool ComputesLast(uint64_t seed) { return seed % 2 == 0 && ContextOf(seed) > 1; }
int StepsOf(uint64_t seed) { return 20 + static_cast<int>(SplitMix64(seed + 1).Below(60)); }

}  // namespace

void Add(Decoded& decoded, const std::vector<std::vector<std::vector<float>>>& out, size_t row) {
  std::vector<float>& step = decoded.emplace_back();
  for (const auto& layer : out) step.insert(step.end(), layer[row].begin(), layer[row].end());
}

void CheckTraffic(
    const PolicyRig::Shape& shape, const PolicyRig::Make& make,
    const std::function<std::unique_ptr<AttentionPolicy>(const PolicyRig&, bool)>& make_policy) {
  PolicyRig::Shape single = shape;
  single.threads = 1;
  single.row_bucket = 0;
  const auto alone = [&](uint64_t seed) {
    PolicyRig rig(single, make);
    const auto policy = make_policy(rig, true);
    rig.Admit(*policy, 0, seed, ContextOf(seed), ContextOf(seed) + StepsOf(seed),
              ComputesLast(seed));
    Decoded decoded;
    for (int step = 0; step < StepsOf(seed); ++step) Add(decoded, rig.Step(*policy, {0}), 0);
    rig.Release(*policy, 0);
    return decoded;
  };
  PolicyRig rig(shape, make);
  const auto policy = make_policy(rig, false);
  SplitMix64 random(TestSeed());
  struct Running {
    uint64_t seed;
    Decoded decoded;
  };
  std::map<int, Running> running;
  int finished = 0;
  uint64_t next_seed = random.Below(1 << 20);
  while (finished < kSequences) {
    for (int slot = 0; slot < shape.slots; ++slot) {
      if (running.contains(slot) || random.Below(4) != 0) continue;
      const uint64_t seed = next_seed++;
      rig.Admit(*policy, slot, seed, ContextOf(seed), ContextOf(seed) + StepsOf(seed),
                ComputesLast(seed));
      running[slot] = {seed, {}};
    }
    std::vector<int32_t> slots;
    for (const auto& [slot, sequence] : running) slots.push_back(slot);
    if (slots.empty()) continue;
    const auto out = rig.Step(*policy, slots);
    for (size_t row = 0; row < slots.size(); ++row) {
      Running& sequence = running.at(slots[row]);
      Add(sequence.decoded, out, row);
      if (static_cast<int>(sequence.decoded.size()) < StepsOf(sequence.seed)) continue;
      CHECK(policy->SlotHealth(slots[row]).ok());
      INFO("sequence " << sequence.seed << " in slot " << slots[row]);
      CHECK(sequence.decoded == alone(sequence.seed));
      rig.Release(*policy, slots[row]);
      running.erase(slots[row]);
      ++finished;
    }
  }
  for (const auto& [slot, sequence] : running) rig.Release(*policy, slot);
  CHECK(rig.hbm().UsageOf(0).reserved_bytes == 0);
  CHECK(rig.dram().UsageOf(0).reserved_bytes == 0);
}

}  // namespace sluice::testing
