// Tests the operators of speculation on the device on every path, against a plain reading of their
// contract.
#include <algorithm>

#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

constexpr int64_t kStride = 40;

struct Settled {
  Settled(int32_t rows, int32_t drafts)
      : slots(rows), rows_of(rows), positions((drafts + 1) * rows), out(drafts * rows) {}
  Guarded<int32_t> slots, rows_of, positions, out;
};

// Sequences of one to four rows, some of them padded away, whose drafts are right half of the time.
void TestSettle(const KernelTable& table, Random& random) {
  for (int32_t round = 0; round < 40; ++round) {
    const int32_t drafts = static_cast<int32_t>(1 + random() % kMaxDeviceDrafts);
    const int32_t sequences = static_cast<int32_t>(random() % 40);
    Guarded<int32_t> history(sequences * kStride);
    for (int32_t& token : history) token = static_cast<int32_t>(random() % 2);
    std::vector<int32_t> slots, positions, chosen, step_rows;
    for (int32_t slot = 0; slot < sequences; ++slot) {
      const auto count = static_cast<int32_t>(1 + random() % 4);
      const auto at = static_cast<int32_t>(random() % (kStride - 4));
      for (int32_t i = 0; i < count; ++i) {
        slots.push_back(slot);
        positions.push_back(at + i);
        chosen.push_back(random() % 9 == 0 ? -1 : static_cast<int32_t>(random() % 2));
        step_rows.push_back(static_cast<int32_t>(random() % 1000));
      }
    }
    for (uint64_t i = random() % 5; i > 0; --i) {
      slots.push_back(-1);
      positions.push_back(0);
      chosen.push_back(7);
      step_rows.push_back(-1);
    }
    const auto rows = static_cast<int32_t>(slots.size());
    Settled got(rows, drafts);
    Guarded<int32_t> slot_in(rows), position_in(rows), chosen_in(rows), row_in(rows);
    std::copy(slots.begin(), slots.end(), slot_in.begin());
    std::copy(positions.begin(), positions.end(), position_in.begin());
    std::copy(chosen.begin(), chosen.end(), chosen_in.begin());
    std::copy(step_rows.begin(), step_rows.end(), row_in.begin());
    std::vector<int32_t> want_history(history.begin(), history.end());
    SettleDraftsParams p{};
    p.slots = slot_in.data();
    p.positions = position_in.data();
    p.chosen = chosen_in.data();
    p.step_rows = row_in.data();
    p.tokens = history.data();
    p.token_stride = kStride;
    p.draft_slots = got.slots.data();
    p.draft_rows = got.rows_of.data();
    p.draft_positions = got.positions.data();
    p.out_drafts = got.out.data();
    p.rows = rows;
    p.drafts = drafts;
    RunThreads(table.settle_drafts, p, 3);
    for (const auto* written : {&got.slots, &got.rows_of, &got.positions, &got.out, &history}) {
      CHECK(written->Damage() == "");
    }

    for (int32_t r = 0; r < rows; ++r) {
      const size_t row = static_cast<size_t>(r);
      const int32_t slot = slots[row];
      // The row is the last accepted one if every row of its sequence before it chose the draft
      // behind itself, and it did not or has none.
      bool last = slot >= 0;
      for (size_t i = 0; slot >= 0 && i < row; ++i) {
        if (slots[i] == slot &&
            chosen[i] != want_history[static_cast<size_t>(slot * kStride + positions[i] + 1)]) {
          last = false;
        }
      }
      const bool more = row + 1 < slots.size() && slots[row + 1] == slot;
      const auto next = static_cast<size_t>(slot * kStride + positions[row] + 1);
      if (last && more && chosen[row] == want_history[next]) last = false;
      const bool goes_on = last && chosen[row] >= 0 && positions[row] + 1 + drafts < kStride;
      CHECK(got.slots[r] == (goes_on ? slot : -1));
      CHECK(got.rows_of[r] == (goes_on ? step_rows[row] : -1));
      for (int32_t d = 0; d <= drafts; ++d) {
        CHECK(got.positions[d * rows + r] == (slot < 0 ? 0 : positions[row] + d));
        if (d < drafts) CHECK(got.out[d * rows + r] == kNoDraft);
      }
      if (last && chosen[row] >= 0) {
        CHECK(history[static_cast<int64_t>(next)] == chosen[row]);
        history[static_cast<int64_t>(next)] = want_history[next];
      }
    }
    CHECK(std::equal(history.begin(), history.end(), want_history.begin()));
  }
}

void TestNewest(const KernelTable& table, Random& random) {
  for (const int32_t capacity : {1, 7, 300}) {
    constexpr int32_t kRows = 23, kSlots = 5;
    Guarded<int32_t> slots(kRows), positions(kRows), begins(kSlots), counts(kRows);
    Guarded<int32_t> units(int64_t{kRows} * capacity);
    for (int32_t& begin : begins) begin = static_cast<int32_t>(random() % 40);
    for (int32_t r = 0; r < kRows; ++r) {
      slots[r] = static_cast<int32_t>(random() % (kSlots + 1)) - 1;
      positions[r] = static_cast<int32_t>(random() % 1000);
    }
    for (int32_t& unit : units) unit = -7;
    NewestListsParams p{};
    p.slots = slots.data();
    p.positions = positions.data();
    p.begins = begins.data();
    p.lists = {units.data(), counts.data(), capacity};
    p.rows = kRows;
    RunThreads(table.newest_lists, p, 3);
    for (int32_t r = 0; r < kRows; ++r) {
      std::vector<int32_t> want;
      for (int32_t at = positions[r] - capacity + 1; slots[r] >= 0 && at <= positions[r]; ++at) {
        if (at >= begins[slots[r]]) want.push_back(at);
      }
      REQUIRE(counts[r] == static_cast<int32_t>(want.size()));
      for (int32_t i = 0; i < capacity; ++i) {
        const bool listed = i < counts[r];
        CHECK(units[r * capacity + i] == (listed ? want[static_cast<size_t>(i)] : -7));
      }
    }
  }
}

SLUICE_TEST_ON_EVERY_PATH("settle_drafts goes on from the last accepted rows", TestSettle)
TEST_CASE("settle_drafts goes on from the last accepted rows (reference)", "[kernels]") {
  OnPath("reference", TestSettle);
}
SLUICE_TEST_ON_EVERY_PATH("newest_lists lists the newest tokens", TestNewest)
TEST_CASE("newest_lists lists the newest tokens (reference)", "[kernels]") {
  OnPath("reference", TestNewest);
}

}  // namespace
}  // namespace sluice::kernels
