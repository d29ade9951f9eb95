// These tests are of an engine whose steps other ranks follow: the orders as bytes, answers, and
// ends. The ranks are threads of this process.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "src/base/error.h"
#include "src/engine/rank_plan.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/cases.h"
#include "tests/support/device.h"
#include "tests/support/node.h"
#include "tests/support/ranks.h"
#include "tests/test_main.h"
#include "tests/unit/engine/rank_answers.h"

namespace sluice {
namespace {

using testing::Answers;
using testing::CheckSameAnswers;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;
using testing::OnRanks;
using testing::OptionsFor;

std::string PagesText(const RankPages& lists) {
  std::string text = " pages";
  for (const auto& pages : lists) absl::StrAppend(&text, " [", absl::StrJoin(pages, " "), "]");
  return text;
}

// Writes down what it is told.
class Told : public RankOrders {
 public:
  absl::Status Admit(int slot, RankAdmission a) override {
    return Say("admit ", slot, " ", a.context, " of ", a.total, a.firm ? " firm" : " soft",
               a.owner > 0 ? absl::StrCat(" by ", a.owner) : "",
               a.has_home ? absl::StrCat(" shared ", a.home.shared_tokens, " left ", a.home.left[0],
                                         PagesText(a.home.pages))
                          : "");
  }
  absl::Status BeginPrompt(int slot, int64_t tokens, int64_t cached) override {
    return Say("begin ", slot, " ", tokens, " ", cached);
  }
  absl::Status EndPrompt(int slot, int64_t tokens, SelectionHints hints) override {
    std::string text = absl::StrCat("end ", slot, " ", tokens);
    for (const SelectionHints::Entry& entry : hints.entries) {
      absl::StrAppend(&text, " layer ", entry.layer, " head ", entry.kv_head.value_or(99), " row ",
                      entry.position.value_or(99), " units ", absl::StrJoin(entry.units, ","));
    }
    return Say(text);
  }
  absl::Status Warm(int slot) override { return Say("warm ", slot); }
  absl::Status Grow(int slot, int64_t tokens) override { return Say("grow ", slot, " ", tokens); }
  absl::Status Release(int slot) override { return Say("release ", slot); }
  absl::Status MakeFirm(int slot) override { return Say("firm ", slot); }
  absl::Status ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) override {
    return Say("reserve ", slot, " ", tokens, " behind ", prefix.tokens(),
               PagesText(prefix.pages()));
  }
  absl::Status Evict(int slot, int64_t tokens, RankPages home) override {
    return Say("evict ", slot, " ", tokens, PagesText(home));
  }
  absl::Status Detach(int slot) override { return Say("detach ", slot); }
  absl::Status Join(int slot, const BatchState::Joining& joining) override {
    std::string text = absl::StrCat("join ", slot, ":");
    for (const int32_t token : joining.tokens) absl::StrAppend(&text, " ", token);
    absl::StrAppend(&text, " seed ", joining.sampling.seed, " stops");
    for (const int32_t id : joining.stop_ids) absl::StrAppend(&text, " ", id);
    for (const auto& [id, value] : joining.logit_bias) absl::StrAppend(&text, " bias ", id, value);
    return Say(text);
  }
  absl::Status Step(int buffer, const StepPlan& plan) override {
    std::string text = absl::StrCat("step ", buffer, ": ", plan.row_count, " rows, ",
                                    plan.decode_rows, " decode, ", plan.sample_count, " samples");
    for (const PlanRow& row : plan.rows) {
      absl::StrAppend(&text, "; ", row.slot, " at ", row.first_position, " x", row.count,
                      row.sample ? " samples" : "", " after ", row.decoded);
    }
    return Say(text);
  }

  std::string said;

 private:
  template <typename... Args>
  absl::Status Say(const Args&... args) {
    absl::StrAppend(&said, args..., "\n");
    return absl::OkStatus();
  }
};

RankPlanWriter Everything() {
  RankPlanWriter plan;
  plan.Admit(3, {0, 1000, true, 5, false, {}});
  RankAdmission handed{64, 100, false, 0, true, {}};
  handed.home = {32, {5}, {{4, 5, 6, 9}, {}}};
  plan.Admit(0, handed);
  plan.BeginPrompt(3, 7, 0);
  BatchState::Joining joining;
  const std::vector<int32_t> tokens = {5, 6, 7}, stops = {2};
  const std::vector<BatchState::Joining::LogitBias> bias = {{9, -1.5f}};
  joining.tokens = tokens;
  joining.sampling.seed = 42;
  joining.stop_ids = stops;
  joining.logit_bias = bias;
  plan.Join(3, joining);
  plan.Warm(1);
  SelectionHints hints;
  hints.entries = {{1, 0, std::nullopt, {2, 3}}};
  plan.EndPrompt(1, 40, hints);
  plan.Grow(1, 64);
  plan.Release(2);
  plan.MakeFirm(0);
  plan.ReserveHostCopy(0, 70, SharedPrefix::OfOtherRank(32, {{7}, {8}}));
  plan.Evict(0, 70, {{7, 1}, {8, 2}});
  plan.Detach(0);
  StepPlan step;
  PlanRow row;
  row.slot = 1;
  row.first_position = 40;
  row.count = 1;
  row.sample = true;
  row.decoded = 4;
  step.rows = {row};
  step.row_count = step.decode_rows = step.sample_count = 1;
  plan.Step(1, step);
  return plan;
}

TEST_CASE("another rank is told what the leader did, in order") {
  RankPlanWriter plan = Everything();
  Told told;
  const auto stop = CarryOut(plan.message(), told);
  REQUIRE(stop.ok());
  CHECK(!*stop);
  CHECK(told.said ==
        "admit 3 0 of 1000 firm by 5\n"
        "admit 0 64 of 100 soft shared 32 left 5 pages [4 5 6 9] []\n"
        "begin 3 7 0\njoin 3: 5 6 7 seed 42 stops 2 bias 9-1.5\nwarm 1\n"
        "end 1 40 layer 1 head 0 row 99 units 2,3\ngrow 1 64\nrelease 2\nfirm 0\n"
        "reserve 0 70 behind 32 pages [7] [8]\nevict 0 70 pages [7 1] [8 2]\ndetach 0\n"
        "step 1: 1 rows, 1 decode, 1 samples; 1 at 40 x1 samples after 4\n");
  plan.Stop();
  const auto stopped = CarryOut(plan.message(), told);
  REQUIRE(stopped.ok());
  CHECK(*stopped);
}

TEST_CASE("a plan that ends inside an order is an error") {
  const RankPlanWriter plan = Everything();
  // Where an order ends, what is there of the plan is a plan.
  size_t whole = 0;
  for (size_t bytes = 0; bytes < plan.message().size(); ++bytes) {
    Told told;
    const auto carried = CarryOut(plan.message().subspan(0, bytes), told);
    if (carried.ok()) {
      ++whole;
    } else {
      CHECK(absl::IsInternal(carried.status()));
    }
  }
  CHECK(whole == 13);  // orders, the last one excepted, and nothing
}

TEST_CASE("an engine of two ranks gives one engine's answers", "[ranks]") {
  for (const std::string& name : fixtures::TinyModels()) CheckSameAnswers(OptionsFor(name), 2);
}

TEST_CASE("an engine of ranks pads and records steps as one engine does", "[ranks]") {
  NodeOptions options = OptionsFor("tiny-llama");
  options.row_bucket = 4;
  CheckSameAnswers(options, 2);
}

TEST_CASE("an engine of ranks gives one engine's answers under every policy", "[ranks]") {
  for (const char* policy : testing::CasesToRun({"scout", "recall", "hgca"})) {
    INFO(policy);
    NodeOptions options = OptionsFor("tiny-llama");
    options.policy.name = policy;
    options.policy.budget_tokens = 64;
    options.policy.workers = 1;
    options.policy.worker_deadline = absl::Seconds(60);
    options.policy.hgca.window_tokens = 64;
    options.prefix_cache = false;  // Answers depend on which rows a sparse policy computed.
    CheckSameAnswers(options, 2);
  }
}

TEST_CASE("requests that end early leave nothing on any rank", "[ranks]") {
  OnRanks(OptionsFor("tiny-llama"), 2, [&](Node& node) {
    for (int round = 0; round < 20; ++round) {
      std::vector<std::shared_ptr<TokenStream>> streams;
      for (int i = 0; i < 4; ++i) {
        Request request = GreedyRequest({1, 2, 3}, 300);
        request.request_id = absl::StrCat("c", round, "-", i);
        streams.push_back(node.Start(std::move(request)));
      }
      for (int i = 0; i < 4; ++i) {
        if (i % 2 == 0) streams[static_cast<size_t>(i)]->ReadBlocking();
        node.engine().CancelRequest(absl::StrCat("c", round, "-", i),
                                    absl::CancelledError("enough"), [](bool) {});
      }
      for (auto& stream : streams) Node::Collect(*stream);
    }
    CHECK(node.Quiescent());
    CHECK(node.Generate(GreedyRequest({1, 2, 3}, 5)).ids.size() == 5);
  });
}

// The ranks' steps are programs that hold the group's operations. Sums in another order round
// otherwise, so texts may part at near ties.
TEST_CASE("an engine of two ranks on one GPU gives one engine's answers", "[ranks][cuda]") {
  if (const std::string why = testing::WhyNoSharedGpu(); !why.empty()) return SkipTest(why);
  NodeOptions options = OptionsFor("tiny-llama");
  options.kernels = "cuda";
  options.kv_dtype = DType::kBFloat16;
  RankGroupOptions group = testing::RankOptions(2);
  group.join_timeout = absl::Seconds(60);
  const auto wrong = testing::RunRankProcesses(
      group,
      [&](const RankGroupOptions& own) -> std::string {
        if (own.rank == 1) {
          const absl::Status end = Follow(options, own);
          return end.ok() ? "" : end.ToString();
        }
        std::vector<std::vector<int32_t>> want;
        {
          Node alone(options);
          want = Answers(alone);
        }
        NodeOptions leading = options;
        leading.ranks = &own;
        Node node(leading);
        const std::vector<std::vector<int32_t>> got = Answers(node);
        size_t same = 0;
        for (size_t i = 0; i < want.size(); ++i) same += got[i] == want[i] ? 1 : 0;
        return 2 * same > want.size() ? ""
                                      : absl::StrCat(same, " of ", want.size(), " are the same");
      },
      /*on_gpus=*/true);
  CHECK(testing::Joined(wrong) == "");
}

}  // namespace
}  // namespace sluice
