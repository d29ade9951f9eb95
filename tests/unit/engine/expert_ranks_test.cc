// These tests are of an engine whose ranks divide the experts and each have sequences of their own:
// who has which, what each computes, and answers.
#include <catch2/catch.hpp>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "src/engine/rank_rows.h"
#include "tests/support/cases.h"
#include "tests/unit/engine/rank_answers.h"

namespace sluice {
namespace {

using testing::CheckSameAnswers;
using testing::GreedyRequest;
using testing::kSanitized;
using testing::Node;
using testing::NodeOptions;
using testing::OnRanks;
using testing::OptionsFor;

// A group that only has a number and a size.
class NamedRank : public RankGroup {
 public:
  NamedRank(int rank, int size) : RankGroup(rank, size) {}
  void Abort(const std::string&) override {}
  absl::Status status() const override { return absl::OkStatus(); }

 private:
  void Enqueue(Stream&, const Operation&) override {}
};

PlanRow RowOf(int slot, int64_t first, int count, bool sample) {
  PlanRow row;
  row.slot = slot;
  row.first_position = first;
  row.count = count;
  row.sample = sample;
  return row;
}

TEST_CASE("a step's rows are divided by the owners of their sequences") {
  StepPlan plan;
  plan.rows = {RowOf(0, 10, 1, true), RowOf(1, 20, 1, true), RowOf(3, 5, 1, true),
               RowOf(2, 0, 30, false), RowOf(4, 0, 7, true)};
  plan.row_count = 40;
  plan.decode_rows = 3;
  plan.sample_count = 4;
  for (int rank = 0; rank < 3; ++rank) {
    INFO("rank " << rank);
    NamedRank group(rank, 3);
    RankRows rows(&group, 5);
    for (const auto& [slot, owner] : {std::pair{1, 1}, {2, 1}, {3, 1}, {4, 0}}) {
      rows.Give(slot, owner);
    }
    const RankRows::Part& part = rows.Divide(plan);
    CHECK(part.most_rows == 32);  // rank 1's: two that decode, and 30 of a prompt
    const int32_t count[] = {8, 32, 0}, decode[] = {1, 2, 0}, samples[] = {2, 2, 0};
    CHECK(part.plan.row_count == count[rank]);
    CHECK(part.plan.decode_rows == decode[rank]);
    CHECK(part.plan.sample_count == samples[rank]);
    std::vector<RankRows::Place> places;
    rows.FindSamples(plan, &places);
    std::vector<std::pair<int, int>> found;
    for (const RankRows::Place& place : places) found.emplace_back(place.rank, place.index);
    CHECK(found == std::vector<std::pair<int, int>>{{0, 0}, {1, 0}, {1, 1}, {0, 1}});
  }
  NamedRank group(0, 2);
  RankRows rows(&group, 5);
  CHECK(rows.Divide({}).most_rows == 1);
}

NodeOptions ExpertsFor(const std::string& model) {
  NodeOptions options = OptionsFor(model);
  options.divide_experts = true;
  return options;
}

TEST_CASE("an engine of ranks of experts gives one engine's answers", "[ranks]") {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    for (const int size : {2, 4}) {
      if (kSanitized && size > 2) continue;
      INFO(name << " on " << size);
      CheckSameAnswers(ExpertsFor(name), size);
    }
  }
}

TEST_CASE("an engine of ranks of experts pads and records steps as one engine does", "[ranks]") {
  NodeOptions options = ExpertsFor("tiny-deepseek-v32");
  options.row_bucket = 2;
  CheckSameAnswers(options, 2);
}

TEST_CASE("an engine of ranks of experts gives one engine's answers under ess", "[ranks]") {
  for (const int row_bucket : {0, 2}) {
    if (kSanitized && row_bucket == 0) continue;
    NodeOptions options = ExpertsFor("tiny-deepseek-v32");
    options.row_bucket = row_bucket;
    options.policy.name = "ess";
    options.policy.ess.sparse_memory_ratio = 0.2;
    options.policy.ess.least_places = 0;
    CheckSameAnswers(options, 2);
  }
}

// One rank's rows are halved, and the other's too, or it has one row or none.
TEST_CASE("steps in two halves give one engine's answers", "[ranks]") {
  for (const char* policy : {"full", "ess"}) {
    for (const int row_bucket : {0, 2}) {
      if (kSanitized && row_bucket == 0) continue;
      INFO(policy << ", row bucket " << row_bucket);
      NodeOptions options = ExpertsFor("tiny-deepseek-v32");
      options.row_bucket = row_bucket;
      options.halves_from = 1;
      options.max_sequences = 5;
      options.policy.name = policy;
      options.policy.ess.sparse_memory_ratio = 0.2;
      options.policy.ess.least_places = 0;
      // Each half fetches its runners-up beside the other.
      if (row_bucket > 0) options.policy.ess.prefetch = 16;
      CheckSameAnswers(options, 2);
    }
  }
}

// Pools of which each has room for two of the sequences, so that four run only on two ranks.
TEST_CASE("sequences are spread over the ranks' pools", "[ranks]") {
  NodeOptions options = ExpertsFor("tiny-deepseek-v32");
  const uint32_t tokens = kSanitized ? 61 : 253;
  int64_t each = 0;
  {
    NodeOptions whole = options;
    whole.divide_experts = false;
    Node alone(whole);
    each = alone.model().cache_layout().BytesFor(3 + tokens);
  }
  options.hbm_bytes = 2 * each + each / 2;
  OnRanks(options, 2, [&](Node& node) {
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (int i = 0; i < 4; ++i) streams.push_back(node.Start(GreedyRequest({1, 2, 3 + i}, tokens)));
    for (auto& stream : streams) stream->ReadBlocking();
    std::promise<uint32_t> running;
    node.engine().Snapshot(
        [&](const EngineSnapshot& snapshot) { running.set_value(snapshot.running); });
    CHECK(running.get_future().get() == 4);
    for (auto& stream : streams) CHECK(Node::Collect(*stream).finish.status.ok());
    CHECK(node.Quiescent());
  });
}

TEST_CASE("requests that end early leave nothing on any rank of experts", "[ranks]") {
  OnRanks(ExpertsFor("tiny-deepseek-v32"), 2, [&](Node& node) {
    for (int round = 0; round < 10; ++round) {
      std::vector<std::shared_ptr<TokenStream>> streams;
      for (int i = 0; i < 4; ++i) {
        Request request = GreedyRequest({1, 2, 3}, 300);
        request.request_id = "c" + std::to_string(4 * round + i);
        streams.push_back(node.Start(std::move(request)));
      }
      for (int i = 0; i < 4; ++i) {
        if (i % 2 == 0) streams[static_cast<size_t>(i)]->ReadBlocking();
        node.engine().CancelRequest("c" + std::to_string(4 * round + i),
                                    absl::CancelledError("enough"), [](bool) {});
      }
      for (auto& stream : streams) Node::Collect(*stream);
    }
    CHECK(node.Quiescent());
    CHECK(node.Generate(GreedyRequest({1, 2, 3}, 5)).ids.size() == 5);
  });
}

}  // namespace
}  // namespace sluice
