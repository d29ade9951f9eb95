// Policy scout with everything on (predicted queries, recalls by the controller, what leaves the
// ring kept, all that is resident attended to, a rehearsed first row) against a naive model of it.
#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "src/attention/policies/scout/scout_policy.h"
#include "tests/test_main.h"
#include "tests/unit/attention/policies/scout/scout_support.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice {
namespace {

using testing::PolicyRig;
using testing::RandomVectors;
using testing::RelativeError;
using Who = PolicyRig::Who;

constexpr int kRing = testing::kScoutTestRing;

// A naive model of one layer and one sequence: which blocks have a place in HBM, by the rules of
// kernels/sparse_params.h.
class NaiveLayer {
 public:
  // Begins with the first block and the newest ones before the ring, in `places` places.
  NaiveLayer(const PolicyRig& rig, int context, int places, const PolicyOptions& options)
      : block_tokens_(rig.shape().block_tokens),
        budget_blocks_(options.budget_tokens / block_tokens_),
        share_limit_(options.scout.share_limit) {
    const std::set<int32_t> first = testing::FirstResident(context, block_tokens_, places);
    heads_.resize(static_cast<size_t>(rig.shape().kv_heads));
    for (Head& head : heads_) {
      head.resize(static_cast<size_t>(places));
      auto place = head.begin();
      for (const int block : first) *place++ = {block, 0};
    }
  }

  // Returns the query with which a row at `position` attends to a block, given the blocks that are
  // selected by KV head, before Settle.
  Who QueryFor(int kv_head, int block, int position,
               const std::vector<std::vector<int32_t>>& selected) const {
    if (Resident(kv_head, block, position)) return Who::kReal;
    const std::vector<int32_t>& list = selected[static_cast<size_t>(kv_head)];
    return std::binary_search(list.begin(), list.end(), block) ? Who::kPredicted : Who::kNobody;
  }

  struct Settled {
    bool recalled = false;
    int64_t missing = 0;   // blocks, over the KV heads
    int64_t arrived = 0;   // blocks that the recall gave a place
    int64_t retained = 0;  // blocks that left the ring and were given a place
  };
  // Stamps what is selected, keeps what leaves the ring, and recalls if that is due.
  Settled Settle(int position, const std::vector<std::vector<int32_t>>& selected) {
    Settled settled;
    std::vector<std::vector<int>> missing(heads_.size());
    for (size_t h = 0; h < heads_.size(); ++h) {
      for (const int block : selected[h]) {
        if (Place* place = Find(h, block)) place->stamp = position;
        if (!Resident(static_cast<int>(h), block, position)) missing[h].push_back(block);
      }
      settled.missing += std::ssize(missing[h]);
    }
    const double share = static_cast<double>(settled.missing) /
                         (static_cast<double>(heads_.size()) * budget_blocks_);
    settled.recalled = share * (since_ + 2) / (since_ + 1) > double{share_limit_};
    since_ = settled.recalled ? 0 : since_ + 1;
    const bool leaves = (position + 1) % block_tokens_ == 0;
    const int leaving = (position + 1) / block_tokens_ - kRing;
    for (size_t h = 0; h < heads_.size(); ++h) {
      if (leaves && leaving >= 0 && Find(h, leaving) == nullptr) {
        settled.retained += Give(h, leaving, position) ? 1 : 0;
      }
      if (!settled.recalled) continue;
      for (const int block : missing[h]) settled.arrived += Give(h, block, position) ? 1 : 0;
    }
    return settled;
  }

 private:
  struct Place {
    int block = -1;
    int stamp = 0;
  };
  using Head = std::vector<Place>;

  Place* Find(size_t head, int block) {
    for (Place& place : heads_[head]) {
      if (place.block == block) return &place;
    }
    return nullptr;
  }
  bool Resident(int kv_head, int block, int position) const {
    if (position / block_tokens_ - block < kRing) return true;
    const Head& head = heads_[static_cast<size_t>(kv_head)];
    return std::any_of(head.begin(), head.end(),
                       [block](const Place& place) { return place.block == block; });
  }
  // Gives the block a free place, or else the one whose block was selected longest ago.
  bool Give(size_t head, int block, int position) {
    Place* best = nullptr;
    for (Place& place : heads_[head]) {
      if (place.block >= 0 && place.stamp == position) continue;
      const auto age = [](const Place& p) { return p.block < 0 ? -1 : p.stamp; };
      if (best == nullptr || age(place) < age(*best)) best = &place;
    }
    if (best == nullptr) return false;
    *best = {block, position};
    return true;
  }

  const int block_tokens_, budget_blocks_;
  const float share_limit_;
  std::vector<Head> heads_;
  int since_ = 0;
};

struct Run {
  bool key_codes = true;  // whether the selection scores them
  int context_blocks = 12;
  int budget_blocks = 6;
  int places = 5;  // beside the ring
  int steps = 50;
  int shortlist_blocks = 0;  // of PolicyOptions::Scout::shortlist_tokens; 0: its default
};

// Decodes one sequence and checks its rows. Returns how many steps of a layer recalled, at most and
// at least.
std::pair<int64_t, int64_t> CheckAgainstNaive(const PolicyRig::Shape& shape, const Run& run) {
  PolicyRig rig(shape, RandomVectors(shape, 0.3f));
  PolicyOptions options = rig.Options();
  options.budget_tokens = run.budget_blocks * shape.block_tokens;
  options.scout.resident_tokens = run.places * shape.block_tokens;
  options.scout.key_codes = run.key_codes;
  options.scout.share_limit = 0.36f;
  if (run.shortlist_blocks > 0) {
    options.scout.shortlist_tokens = run.shortlist_blocks * shape.block_tokens;
  }
  options.workers = 2;
  auto made = NewScoutPolicy(options);
  REQUIRE(made.ok());
  const std::unique_ptr<ScoutPolicy> policy = *std::move(made);
  const int context = run.context_blocks * shape.block_tokens + 5;
  const uint64_t seed = TestSeed();
  rig.Admit(*policy, 1, seed, context, context + run.steps);
  std::vector<NaiveLayer> naive(static_cast<size_t>(shape.layers),
                                NaiveLayer(rig, context, run.places, options));
  std::vector<PolicyStatistics::Layer> want(static_cast<size_t>(shape.layers));
  int64_t retained = 0;
  for (int step = 0; step < run.steps; ++step) {
    if (step == 1) rig.Rewind(1);  // the row before was a rehearsal of this one
    const int position = rig.position(1);
    const auto out = rig.Step(*policy, {1});
    for (int layer = 0; layer < shape.layers; ++layer) {
      INFO("step " << step << " layer " << layer);
      NaiveLayer& of_layer = naive[static_cast<size_t>(layer)];
      const auto selected = rig.NaiveTopBlocks(seed, layer, position, run.budget_blocks, kRing,
                                               /*predicted=*/true, run.key_codes);
      const auto row = rig.Naive(seed, layer, position, [&](int kv_head, int token) {
        return of_layer.QueryFor(kv_head, token / shape.block_tokens, position, selected);
      });
      CHECK(RelativeError(out[static_cast<size_t>(layer)][0], row) <= testing::kScoutTolerance);
      const NaiveLayer::Settled settled = of_layer.Settle(position, selected);
      PolicyStatistics::Layer& sums = want[static_cast<size_t>(layer)];
      sums.missing += settled.missing * shape.block_tokens;
      sums.recalled += settled.arrived * shape.block_tokens;
      sums.recalls += settled.recalled ? 1 : 0;
      retained += settled.retained;
    }
  }
  if (run.steps > shape.block_tokens) CHECK(retained > 0);
  const PolicyStatistics statistics = policy->Statistics();
  std::pair<int64_t, int64_t> recalls = {0, run.steps};
  for (size_t layer = 0; layer < want.size(); ++layer) {
    INFO("layer " << layer);
    CHECK(statistics.layers[layer].missing == want[layer].missing);
    CHECK(statistics.layers[layer].recalled == want[layer].recalled);
    CHECK(statistics.layers[layer].recalls == want[layer].recalls);
    recalls.first = std::max(recalls.first, want[layer].recalls);
    recalls.second = std::min(recalls.second, want[layer].recalls);
  }
  rig.Release(*policy, 1);
  return recalls;
}

// The controller decides both ways, though not in every layer.
void CheckManySteps(const PolicyRig::Shape& shape, bool key_codes) {
  const Run run{key_codes};
  const auto [most, least] = CheckAgainstNaive(shape, run);
  CHECK(most > 2);
  CHECK(least < run.steps - 2);
}

TEST_CASE("with recalls, prediction and a rehearsal every row is that of a naive scout") {
  PolicyRig::Shape shape;
  CheckManySteps(shape, /*key_codes=*/true);
  CheckManySteps(shape, /*key_codes=*/false);
  shape.row_bucket = 3;
  shape.heads = 6;
  shape.kv_heads = 1;
  shape.threads = 2;
  CheckManySteps(shape, /*key_codes=*/true);
}

// The least shortlist holds 13 blocks here. These rows have 19 to 22, and all are scored by codes.
void ShortRows(const PolicyRig::Shape& shape) {
  Run run;
  run.context_blocks = 18;
  run.shortlist_blocks = 26;
  CheckAgainstNaive(shape, run);
}
SLUICE_TEST_ON_CPU_AND_GPU("a shortlist of scout is longer for short rows", ShortRows)

TEST_CASE("with recalls, prediction and a rehearsal every row is that of a naive scout (cuda)",
          "[cuda]") {
  testing::OnRig("cuda", [](const PolicyRig::Shape& of) {
    PolicyRig::Shape shape = of;
    CheckManySteps(shape, /*key_codes=*/true);
    shape.heads = 8;  // as in a large model
    shape.kv_heads = 2;
    shape.head_dim = 128;
    shape.block_tokens = 32;
    // Scores of key codes are rounded to bf16 there, so that near ties may fall either way.
    CheckManySteps(shape, /*key_codes=*/false);
  });
}

// A long context and a default budget, with the heads of a large model.
TEST_CASE("at 8K tokens a row is that of a naive scout (cuda)", "[cuda]") {
  testing::OnRig("cuda", [](const PolicyRig::Shape& of) {
    PolicyRig::Shape shape = of;
    shape.layers = 2;
    shape.heads = 10;
    shape.kv_heads = 2;
    shape.head_dim = 128;
    shape.block_tokens = 32;
    shape.max_context = 9216;
    Run run;
    run.key_codes = false;  // as above
    run.context_blocks = 264;
    run.budget_blocks = run.places = 64;
    run.steps = 4;
    CheckAgainstNaive(shape, run);
  });
}

}  // namespace
}  // namespace sluice
