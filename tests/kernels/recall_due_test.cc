// When recalls are due: fixed intervals, and the controller of the share of missing units.
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kSlots = 4, kRows = 5, kKvHeads = 3, kUnitTokens = 16, kBudgetUnits = 20;

// The state of all slots, and one step's lists.
struct Controller {
  Controller() {
    for (int64_t slot = 0; slot < kSlots; ++slot) {
      since[slot] = 0;
      counters[slot] = {};
    }
  }

  RecallDueParams Params(int32_t interval, float share_limit) {
    return {.slots = slots.data(),
            .selected = selected.view,
            .missing = missing.view,
            .since = since.data(),
            .counters = counters.data(),
            .due = due.data(),
            .rows = kRows,
            .kv_heads = kKvHeads,
            .unit_tokens = kUnitTokens,
            .budget_units = kBudgetUnits,
            .interval = interval,
            .share_limit = share_limit};
  }

  // A row of each slot, with `missing_units` by slot and head; a padded row comes first.
  void Fill(const std::vector<int32_t>& missing_units, Random& random) {
    std::vector<int32_t> order = {0, 1, 2, 3};
    std::shuffle(order.begin(), order.end(), random);
    slots[0] = -1;
    for (int32_t r = 1; r < kRows; ++r) {
      slots[r] = order[static_cast<size_t>(r - 1)];
      for (int32_t h = 0; h < kKvHeads; ++h) {
        selected.counts[r * kKvHeads + h] = kBudgetUnits - h;
        missing.counts[r * kKvHeads + h] =
            missing_units[static_cast<size_t>(slots[r] * kKvHeads + h)];
      }
    }
  }
  int32_t DueOf(int32_t slot) const {
    for (int64_t r = 0; r < kRows; ++r) {
      if (slots[r] == slot) return due[r];
    }
    return -1;
  }

  Guarded<int32_t> slots{kRows}, since{kSlots}, due{kRows};
  TestLists selected{kRows * kKvHeads, kBudgetUnits}, missing{kRows * kKvHeads, kBudgetUnits};
  Guarded<SparseCounters> counters{kSlots};
};

void TestInterval(const KernelTable& table, Random& random) {
  for (int32_t interval : {1, 2, 7}) {
    Controller c;
    c.since[2] = interval - 1;  // a sequence that arrives in the middle of its interval
    for (int32_t step = 0; step < 3 * interval; ++step) {
      INFO("interval " << interval << ", step " << step);
      c.Fill(std::vector<int32_t>(kSlots * kKvHeads, 0), random);
      RunWorkers(table.recall_due, c.Params(interval, 0.0f), 1 + step % 3);
      CHECK(c.due.Damage() + c.since.Damage() + c.counters.Damage() == "");
      CHECK(c.due[0] == 0);
      for (int32_t slot : {0, 1, 3}) CHECK(c.DueOf(slot) == ((step + 1) % interval == 0 ? 1 : 0));
      CHECK(c.DueOf(2) == (step % interval == 0 ? 1 : 0));
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a recall is due in every interval-th step of a sequence", TestInterval)
TEST_CASE("a recall is due in every interval-th step of a sequence (reference)", "[kernels]") {
  OnPath("reference", TestInterval);
}

// Shares that grow by the same amount in every step: the recall is due in the last step that is
// within the limit, or in the first after a recall.
void TestSteadyGrowth(const KernelTable& table, Random& random) {
  for (int32_t per_step : {1, 2, 3, 7}) {
    Controller c;
    const float limit = 0.251f;  // 5.02 of 20 units
    for (int32_t step = 0, since = 0; step < 40; ++step) {
      const int32_t now = std::min(per_step * (since + 1), kBudgetUnits);
      INFO("grows by " << per_step << ", " << since << " steps since the last recall");
      c.Fill(std::vector<int32_t>(kSlots * kKvHeads, now), random);
      RunWorkers(table.recall_due, c.Params(0, limit), 2);
      const bool due = per_step * (since + 2) >= 6;
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        REQUIRE(c.DueOf(slot) == (due ? 1 : 0));
        REQUIRE(c.since[slot] == (due ? 0 : since + 1));
      }
      since = due ? 0 : since + 1;
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH(
    "a share that grows steadily is recalled in the step before it passes its limit",
    TestSteadyGrowth)
TEST_CASE(
    "a share that grows steadily is recalled in the step before it passes its limit (reference)",
    "[kernels]") {
  OnPath("reference", TestSteadyGrowth);
}

void TestController(const KernelTable& table, Random& random) {
  Controller c;
  int64_t since[kSlots] = {}, missing_tokens[kSlots] = {}, selected_tokens = 0, recalls = 0;
  constexpr int32_t kSteps = 400;
  for (int32_t step = 0; step < kSteps; ++step) {
    std::vector<int32_t> missing(kSlots * kKvHeads);
    for (int32_t& units : missing) units = static_cast<int32_t>(random() % 6);
    c.Fill(missing, random);
    RunWorkers(table.recall_due, c.Params(0, 0.1234f), 1 + step % 4);
    REQUIRE(c.due[0] == 0);
    selected_tokens += kUnitTokens * (3 * kBudgetUnits - 3);
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      INFO("step " << step << ", slot " << slot);
      int64_t units = 0;
      for (int32_t h = 0; h < kKvHeads; ++h) {
        units += missing[static_cast<size_t>(slot * kKvHeads + h)];
      }
      // units / 60 * (since + 2) / (since + 1) > 0.1234, in integers; the sides are never equal,
      // since 617 is a prime.
      const bool due = 10000 * units * (since[slot] + 2) > 1234 * 60 * (since[slot] + 1);
      since[slot] = due ? 0 : since[slot] + 1;
      missing_tokens[slot] += units * kUnitTokens;
      recalls += due ? 1 : 0;
      REQUIRE(c.DueOf(slot) == (due ? 1 : 0));
      REQUIRE(c.since[slot] == since[slot]);
      REQUIRE(c.counters[slot].steps == step + 1);
      REQUIRE(c.counters[slot].selected == selected_tokens);
      REQUIRE(c.counters[slot].missing == missing_tokens[slot]);
      REQUIRE(c.counters[slot].recalled == 0);
      REQUIRE(c.counters[slot].recalls == 0);
    }
  }
  CHECK(recalls > kSteps / 4);
  CHECK(recalls < kSteps * kSlots);
}
SLUICE_TEST_ON_EVERY_PATH("recalls are due, and counted, as in a model in integers", TestController)
TEST_CASE("recalls are due, and counted, as in a model in integers (reference)", "[kernels]") {
  OnPath("reference", TestController);
}

}  // namespace
}  // namespace sluice::kernels
