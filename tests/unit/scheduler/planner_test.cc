#include "src/scheduler/planner.h"

#include <catch2/catch.hpp>
#include <map>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

PlannerSequence Pending(int slot, int64_t cached, int64_t length, int64_t prompt_length) {
  PlannerSequence sequence;
  sequence.slot = slot;
  sequence.prompt_length = prompt_length;
  sequence.cached = cached;
  sequence.length = length;
  return sequence;
}
// Returns a sequence that has its whole prompt, and one that has none of its output.
PlannerSequence Decoding(int slot, int64_t cached) {
  return Pending(slot, cached, cached + 1, cached);
}
PlannerSequence Prompt(int slot, int64_t cached, int64_t length) {
  return Pending(slot, cached, length, length);
}

TEST_CASE("decoding sequences get their row before pending prompts share the rest") {
  StepPlan plan;
  const std::vector<PlannerSequence> sequences = {Prompt(0, 0, 100), Decoding(1, 40),
                                                  Prompt(2, 10, 50), Decoding(3, 7)};
  PlanStep({66, 64}, sequences, &plan);
  REQUIRE(plan.rows.size() == 3);
  CHECK(plan.rows[0].slot == 1);
  CHECK(plan.rows[0].sample);
  CHECK(plan.rows[1].slot == 3);
  CHECK(plan.rows[2].slot == 0);
  CHECK(plan.rows[2].count == 64);
  CHECK_FALSE(plan.rows[2].sample);
  CHECK(plan.row_count == 66);
  CHECK(plan.decode_rows == 2);
  CHECK(plan.sample_count == 2);
}

TEST_CASE(
    "a prompt's last token is a prompt row, alone in its step or not, behind all decode rows") {
  StepPlan plan;
  const std::vector<PlannerSequence> sequences = {Prompt(0, 9, 10), Decoding(1, 40),
                                                  Prompt(2, 4, 10), Decoding(3, 7)};
  PlanStep({16, 8}, sequences, &plan);
  REQUIRE(plan.rows.size() == 4);
  CHECK(plan.rows[0].slot == 1);
  CHECK(plan.rows[1].slot == 3);
  CHECK(plan.rows[2].slot == 0);
  CHECK(plan.rows[2].sample);
  CHECK(plan.rows[3].slot == 2);
  CHECK(plan.decode_rows == 2);
  CHECK(plan.row_count == 9);
}

TEST_CASE("what is pending past the prompt waits for the prompt, and is decoded in one step") {
  StepPlan plan;
  // Two tokens of the prompt were not handed over, three tokens past it were.
  PlannerSequence sequence = Pending(0, 98, 103, 100);
  PlanStep({16, 8}, {&sequence, 1}, &plan);
  REQUIRE(plan.rows.size() == 1);
  CHECK(plan.rows[0].first_position == 98);
  CHECK(plan.rows[0].count == 2);
  CHECK_FALSE(plan.rows[0].sample);
  CHECK(plan.decode_rows == 0);
  CHECK(plan.sample_count == 0);
  sequence.cached = 100;
  PlanStep({16, 8}, {&sequence, 1}, &plan);
  REQUIRE(plan.rows.size() == 1);
  CHECK(plan.rows[0].count == 3);
  CHECK(plan.rows[0].sample);
  CHECK(plan.decode_rows == 3);
  // One token of the prompt is left. It is like a single pending token, so it asks for no budget.
  sequence.cached = 99;
  const std::vector<PlannerSequence> both = {Prompt(1, 0, 100), sequence};
  PlanStep({9, 8}, both, &plan);
  CHECK(plan.row_count == 9);
  CHECK(plan.rows[1].count == 1);
}

TEST_CASE("a sequence has no more decode rows in a step than the policy takes") {
  StepPlan plan;
  PlannerSequence sequence = Pending(0, 100, 103, 100);
  PlannerLimits limits{16, 8, 2};
  PlanStep(limits, {&sequence, 1}, &plan);
  REQUIRE(plan.rows.size() == 1);
  CHECK(plan.rows[0].count == 2);
  CHECK_FALSE(plan.rows[0].sample);  // another token is known
  limits.decode_rows = 1;
  for (const int64_t cached : {100, 101, 102}) {
    sequence.cached = cached;
    // One row is due to a decoding sequence, whatever prompts want.
    const std::vector<PlannerSequence> both = {Prompt(1, 0, 100), sequence};
    PlanStep({9, 8, 1}, both, &plan);
    REQUIRE(plan.rows.size() == 2);
    CHECK(plan.rows[0].slot == 0);
    CHECK(plan.rows[0].count == 1);
    CHECK(plan.rows[0].first_position == cached);
    CHECK(plan.rows[0].sample == (cached == 102));
    CHECK(plan.decode_rows == 1);
    CHECK(plan.row_count == 9);
  }
  // The limit does not apply to rows of prompts.
  sequence.cached = 90;
  PlanStep(limits, {&sequence, 1}, &plan);
  CHECK(plan.rows[0].count == 8);
}

TEST_CASE("a rehearsal is one decode row that chooses nothing, and no row of a prompt is one") {
  StepPlan plan;
  PlannerSequence sequence = Pending(0, 100, 103, 100);
  sequence.rehearses = true;
  sequence.rehearsed = 2;
  PlannerSequence newest = Decoding(1, 50);
  newest.rehearses = true;
  PlannerSequence prompt = Prompt(2, 9, 10);
  prompt.rehearses = true;
  const std::vector<PlannerSequence> sequences = {sequence, newest, prompt};
  PlanStep({16, 8}, sequences, &plan);
  REQUIRE(plan.rows.size() == 3);
  for (size_t i : {size_t{0}, size_t{1}}) {
    CHECK(plan.rows[i].rehearsal);
    CHECK(plan.rows[i].count == 1);
    CHECK_FALSE(plan.rows[i].sample);
  }
  CHECK(plan.rows[0].first_position == 100);
  CHECK(plan.rows[0].decoded == 2);
  CHECK(plan.rows[1].decoded == 0);
  CHECK_FALSE(plan.rows[2].rehearsal);
  CHECK(plan.rows[2].sample);
  CHECK(plan.rows[2].decoded == 0);
  CHECK(plan.decode_rows == 2);
  CHECK(plan.sample_count == 1);
  // Afterwards the three pending tokens are three rows. Rows behind the first are not rehearsed.
  sequence.rehearsed = 3;
  for (const int64_t cached : {100, 101}) {
    sequence.cached = cached;
    sequence.rehearses = cached > 100;
    PlanStep({16, 8}, {&sequence, 1}, &plan);
    REQUIRE(plan.rows.size() == 1);
    CHECK(plan.rows[0].count == 103 - cached);
    CHECK(plan.rows[0].decoded == 3 + cached - 100);
    CHECK(plan.rows[0].sample);
  }
}

TEST_CASE("the last chunk of a prompt samples, and the next prompt uses what is left of the step") {
  StepPlan plan;
  const std::vector<PlannerSequence> sequences = {Prompt(0, 64, 100), Prompt(1, 0, 100)};
  PlanStep({80, 64}, sequences, &plan);
  REQUIRE(plan.rows.size() == 2);
  CHECK(plan.rows[0].sample);
  CHECK(plan.rows[0].count == 36);
  CHECK(plan.rows[1].count == 28);
  CHECK_FALSE(plan.rows[1].sample);
}

TEST_CASE("what is not runnable gets no row, and nothing gives an empty plan") {
  StepPlan plan;
  PlannerSequence parked = Decoding(0, 5);
  parked.runnable = false;
  PlanStep({8, 8}, {&parked, 1}, &plan);
  CHECK(plan.rows.empty());
  CHECK(plan.row_count == 0);
  CHECK(plan.decode_rows == 0);
}

TEST_CASE("drafts are rows behind the sequence's own, and each of them chooses") {
  StepPlan plan;
  PlannerSequence drafting = Decoding(0, 40), plain = Decoding(1, 7), parked = Decoding(2, 9);
  drafting.drafts = parked.drafts = 3;
  parked.runnable = false;
  PlanStep({66, 64}, std::vector{drafting, plain, parked, Prompt(3, 0, 100)}, &plan);
  REQUIRE(plan.rows.size() == 3);
  CHECK(plan.rows[0].first_position == 40);
  CHECK(plan.rows[0].count == 4);
  CHECK(plan.rows[0].drafts == 3);
  CHECK(plan.rows[0].sample);
  CHECK(plan.rows[1].drafts == 0);
  CHECK(plan.rows[2].count == 61);  // drafts come before rows of prompts
  CHECK(plan.decode_rows == 5);
  CHECK(plan.row_count == 66);
  CHECK(plan.sample_count == 5);
}

TEST_CASE("drafts are cut to the policy's rows and the step's, and no row of a sequence is") {
  StepPlan plan;
  PlannerSequence first = Decoding(0, 40), second = Decoding(1, 50), third = Decoding(2, 60);
  first.drafts = second.drafts = third.drafts = 5;
  PlanStep({8, 8, 4}, std::vector{first, second, third}, &plan);
  REQUIRE(plan.rows.size() == 3);
  CHECK(plan.rows[0].drafts == 3);
  CHECK(plan.rows[1].drafts == 2);
  CHECK(plan.rows[2].drafts == 0);
  CHECK(plan.row_count == 8);
  CHECK(plan.sample_count == 8);
}

TEST_CASE("any plan keeps its limits, gives a sequence one range, and starves no decoder") {
  SplitMix64 random(TestSeed());
  StepPlan plan;
  for (int round = 0; round < 2000; ++round) {
    const auto count = static_cast<int>(random.Below(20));
    PlannerLimits limits;
    limits.max_rows = count + static_cast<int>(random.Below(100));
    limits.chunk_tokens = 1 + static_cast<int>(random.Below(100));
    if (random.Below(2) == 0) limits.decode_rows = 1 + static_cast<int>(random.Below(3));
    std::vector<PlannerSequence> sequences;
    for (int slot = 0; slot < count; ++slot) {
      const auto cached = static_cast<int64_t>(random.Below(50));
      PlannerSequence s = Pending(slot, cached, cached + static_cast<int64_t>(random.Below(4)),
                                  static_cast<int64_t>(random.Below(60)));
      if (random.Below(3) == 0) s.length += 80;
      s.runnable = random.Below(4) != 0 && s.length > s.cached;
      s.wants_token = random.Below(8) != 0;
      s.rehearses = random.Below(4) == 0;
      if (s.cached >= s.prompt_length && s.length == s.cached + 1 && s.wants_token &&
          !s.rehearses) {
        s.drafts = static_cast<int32_t>(random.Below(16));
      }
      sequences.push_back(s);
    }
    PlanStep(limits, sequences, &plan);
    std::map<int, PlanRow> by_slot;
    int rows = 0, samples = 0, decode_rows = 0;
    for (const PlanRow& row : plan.rows) {
      REQUIRE(by_slot.emplace(row.slot, row).second);
      const PlannerSequence& s = sequences[static_cast<size_t>(row.slot)];
      REQUIRE(s.runnable);
      REQUIRE(row.count >= 1);
      REQUIRE(row.first_position == s.cached);
      REQUIRE((row.drafts >= 0 && row.drafts <= s.drafts));
      REQUIRE(row.first_position + row.count - row.drafts <= s.length);
      REQUIRE(row.rehearsal == (s.rehearses && row.first_position == s.prompt_length));
      REQUIRE((!row.rehearsal || row.count == 1));
      REQUIRE(row.sample == (!row.rehearsal && s.wants_token &&
                             row.first_position + row.count - row.drafts == s.length));
      // All rows of a sequence have one kind, and decode rows come first.
      const bool decode = row.first_position >= s.prompt_length;
      REQUIRE((decode || row.first_position + row.count <= s.prompt_length));
      REQUIRE((!decode || decode_rows == rows));
      REQUIRE((!decode || row.count <= limits.decode_rows));
      decode_rows += decode ? row.count : 0;
      rows += row.count;
      samples += row.sample ? 1 + row.drafts : 0;
    }
    REQUIRE(rows == plan.row_count);
    REQUIRE(decode_rows == plan.decode_rows);
    REQUIRE(samples == plan.sample_count);
    REQUIRE(rows <= limits.max_rows);
    for (const PlannerSequence& s : sequences) {
      if (s.runnable && s.length - s.cached == 1) REQUIRE(by_slot.contains(s.slot));
    }
  }
}

}  // namespace
}  // namespace sluice
