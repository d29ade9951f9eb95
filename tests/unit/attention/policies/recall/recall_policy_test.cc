#include "src/attention/policies/recall/recall_policy.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <set>
#include <vector>

#include "src/attention/policies/recall/projection.h"
#include "src/base/rng.h"
#include "tests/test_main.h"
#include "tests/unit/attention/policy_rig.h"
#include "tests/unit/attention/policy_traffic.h"

namespace sluice {
namespace {

using testing::PolicyRig;
using testing::RandomVectors;
using testing::RelativeError;
using Who = PolicyRig::Who;

// Kernels may round queries to bf16 before a product.
constexpr double kTolerance = 1e-2;
constexpr float kNoMargin = std::numeric_limits<float>::infinity();

std::unique_ptr<AttentionPolicy> MakePolicy(const PolicyOptions& options) {
  auto policy = NewRecallPolicy(options);
  INFO(std::string(policy.status().ToString()));
  REQUIRE(policy.ok());
  return *std::move(policy);
}

// Returns InfiniGen's selection by KV head, computed naively: the newest ring, and those tokens
// before `position` whose partial score, the largest of the group's heads, is within `margin` of
// the largest; at most `budget` in all. `projection`: [kv_heads][head_dim][rank].
std::vector<std::set<int>> NaiveTokens(const PolicyRig::Shape& shape, const PolicyRig::Make& make,
                                       uint64_t seed, int layer, int position, int budget,
                                       float margin, const std::vector<float>& projection, int rank,
                                       float scale) {
  const PolicyRig::Vectors own = make(seed, layer, position);
  const int dim = shape.head_dim, group = shape.heads / shape.kv_heads;
  std::vector<std::set<int>> selected(static_cast<size_t>(shape.kv_heads));
  for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    const auto project = [&](const float* x) {
      std::vector<double> out(static_cast<size_t>(rank), 0);
      for (int d = 0; d < dim; ++d) {
        for (int r = 0; r < rank; ++r) {
          out[static_cast<size_t>(r)] +=
              double{x[d]} *
              double{projection[static_cast<size_t>((kv_head * dim + d) * rank + r)]};
        }
      }
      return out;
    };
    std::vector<std::pair<double, int>> others;
    std::set<int>& chosen = selected[static_cast<size_t>(kv_head)];
    double largest = -std::numeric_limits<double>::infinity();
    for (int t = 0; t < position; ++t) {
      const PolicyRig::Vectors token = make(seed, layer, t);
      const std::vector<double> k = project(&token.k[static_cast<size_t>(kv_head * dim)]);
      double best = -std::numeric_limits<double>::infinity();
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const std::vector<double> q = project(&own.predicted[static_cast<size_t>(head * dim)]);
        double score = 0;
        for (size_t r = 0; r < q.size(); ++r) score += q[r] * k[r];
        best = std::max(best, score * double{scale});
      }
      largest = std::max(largest, best);
      if (position - t >= shape.block_tokens) others.emplace_back(-best, t);
    }
    for (int t = std::max(0, position - shape.block_tokens + 1); t <= position; ++t) {
      chosen.insert(t);
    }
    std::sort(others.begin(), others.end());
    for (const auto& [minus, t] : others) {
      if (static_cast<int>(chosen.size()) < budget && -minus >= largest - double{margin}) {
        chosen.insert(t);
      }
    }
  }
  return selected;
}

// Which tokens of one KV head have a place, by the rules of warm-up, Recall and Retain.
class NaiveResidency {
 public:
  // A sequence of `total` tokens at its end, of which `context` are there at first.
  NaiveResidency(const PolicyRig::Shape& shape, int budget, int context, int total)
      : ring_(shape.block_tokens) {
    const int bt = shape.block_tokens;
    const int blocks = std::min(1 + budget / bt, (total + bt - 1) / bt);
    places_.assign(static_cast<size_t>((blocks - 1) * bt), {-1, 0});
    const int end = std::max(context - ring_ + 1, 0);
    const int count = std::min(static_cast<int>(places_.size()), end);
    for (int i = 0; i < count; ++i) {
      places_[static_cast<size_t>(i)].unit = i < bt ? i : end - count + i;
    }
  }

  // Gives places to what was selected, and returns all that the row attends to.
  std::set<int> Attend(int position, const std::set<int>& selected) {
    std::vector<int> missing;
    for (const int unit : selected) {
      if (position - unit < ring_) continue;
      const auto place = std::find_if(places_.begin(), places_.end(),
                                      [unit](const Place& p) { return p.unit == unit; });
      if (place == places_.end()) {
        missing.push_back(unit);
      } else {
        place->stamp = position;
      }
    }
    std::vector<Place*> given;
    for (size_t i = 0; i < missing.size(); ++i) {
      Place* const place = Next(position);
      if (place == nullptr) break;
      *place = {0, position};  // taken
      given.push_back(place);
    }
    std::ranges::sort(given);  // the lowest place goes to the lowest token
    for (size_t i = 0; i < given.size(); ++i) given[i]->unit = missing[i];
    std::set<int> attended;
    for (int unit = std::max(0, position - ring_ + 1); unit <= position; ++unit) {
      attended.insert(unit);
    }
    for (const Place& place : places_) {
      if (place.unit >= 0) attended.insert(place.unit);
    }
    if (position + 1 < ring_) return attended;
    Place* const place = Next(position);
    if (place != nullptr) *place = {position + 1 - ring_, position};
    return attended;
  }

 private:
  struct Place {
    int unit;
    int stamp;
  };
  // Returns the place that is to be given next; null: none is.
  Place* Next(int position) {
    Place* best = nullptr;
    const auto stamp = [](const Place& p) { return p.unit < 0 ? -1 : p.stamp; };
    for (Place& place : places_) {
      if (place.unit >= 0 && place.stamp == position) continue;
      if (best == nullptr || stamp(place) < stamp(*best)) best = &place;
    }
    return best;
  }

  const int ring_;
  std::vector<Place> places_;
};

struct Sums {
  int64_t selected = 0, missing = 0, recalled = 0, link_bytes = 0;
};
Sums SumsOf(const AttentionPolicy& policy) {
  Sums sums;
  for (const PolicyStatistics::Layer& layer : policy.Statistics().layers) {
    sums.selected += layer.selected;
    sums.missing += layer.missing;
    sums.recalled += layer.recalled;
    sums.link_bytes += layer.link_bytes;
  }
  return sums;
}

// Decodes one sequence and checks every row against softmax over the tokens that naive selection
// chooses and those that are in HBM anyway. With `by_layer` each layer has a margin of its own.
void CheckAgainstNaive(const PolicyRig::Shape& shape, int budget, float margin, bool fetch_all,
                       bool by_layer = false) {
  constexpr int kSteps = 40;
  const PolicyRig::Make make = RandomVectors(shape, 0.3f);
  PolicyRig rig(shape, make);
  PolicyOptions options = rig.Options();
  options.budget_tokens = budget;
  const auto margin_of = [&](int layer) {
    return by_layer ? margin * (1 + 0.5f * static_cast<float>(layer)) : margin;
  };
  if (by_layer) {
    for (int layer = 0; layer < shape.layers; ++layer) {
      options.recall.margins.push_back(margin_of(layer));
    }
  } else if (margin != kNoMargin) {
    options.recall.margin = margin;  // The default has none.
  }
  options.recall.fetch_all = fetch_all;
  const auto policy = MakePolicy(options);
  const int rank = shape.head_dim / 2;
  const std::vector<float> projection = PlainProjection({1, shape.kv_heads, shape.head_dim, rank});
  const int context = 12 * shape.block_tokens + 5;
  const uint64_t seed = TestSeed();
  rig.Admit(*policy, 1, seed, context, context + kSteps);
  int64_t selected = 0;
  std::vector<NaiveResidency> resident(static_cast<size_t>(shape.layers * shape.kv_heads),
                                       {shape, budget, context, context + kSteps});
  for (int step = 0; step < kSteps; ++step) {
    const int position = rig.position(1);
    const auto out = rig.Step(*policy, {1});
    for (int layer = 0; layer < shape.layers; ++layer) {
      INFO("step " << step << " layer " << layer);
      auto tokens = NaiveTokens(shape, make, seed, layer, position, budget, margin_of(layer),
                                projection, rank, rig.scale());
      for (size_t head = 0; head < tokens.size(); ++head) {
        selected += static_cast<int64_t>(tokens[head].size());
        if (fetch_all) continue;
        const size_t list = static_cast<size_t>(layer * shape.kv_heads) + head;
        tokens[head] = resident[list].Attend(position, tokens[head]);
      }
      const auto want = rig.Naive(seed, layer, position, [&](int kv_head, int token) {
        return tokens[static_cast<size_t>(kv_head)].contains(token) ? Who::kReal : Who::kNobody;
      });
      CHECK(RelativeError(out[static_cast<size_t>(layer)][0], want) <= kTolerance);
    }
  }
  const Sums sums = SumsOf(*policy);
  // Scores may lie at the threshold to the last bit.
  CHECK(std::abs(sums.selected - selected) <= 3);
  CHECK(sums.recalled == sums.missing);  // every chosen token is fetched, and nothing else
  CHECK(sums.missing > 0);
  const int64_t written = int64_t{kSteps} * shape.layers * shape.kv_heads;
  CHECK(sums.link_bytes == (sums.recalled + written) * 2 * shape.head_dim * 2);
  const int64_t ring = written * shape.block_tokens;
  if (fetch_all) {
    CHECK(sums.missing == sums.selected - ring);
  } else {
    CHECK(sums.missing < sums.selected - ring);
  }
  rig.Release(*policy, 1);
}

TEST_CASE("a row attends to what naive speculation on partial queries and keys chooses") {
  PolicyRig::Shape shape;
  CheckAgainstNaive(shape, 96, kNoMargin, false);  // about half of the tokens
  CheckAgainstNaive(shape, 96, kNoMargin, true);
  shape.row_bucket = 3;
  shape.heads = 6;
  shape.kv_heads = 1;
  CheckAgainstNaive(shape, 77, kNoMargin, false);  // no multiple of a block
}

TEST_CASE("a row attends to what naive speculation on partial queries and keys chooses (cuda)",
          "[cuda]") {
  testing::OnRig("cuda", [](const PolicyRig::Shape& of) {
    PolicyRig::Shape shape = of;
    CheckAgainstNaive(shape, 96, kNoMargin, false);
    CheckAgainstNaive(shape, 96, kNoMargin, true);
    shape.heads = 6;
    shape.kv_heads = 1;
    CheckAgainstNaive(shape, 77, kNoMargin, false);
    shape.heads = 8;  // as in a large model
    shape.kv_heads = 2;
    shape.head_dim = 128;
    shape.block_tokens = 32;
    CheckAgainstNaive(shape, 150, kNoMargin, false);
  });
}

void Margins(const PolicyRig::Shape& shape) {
  // The margin is wide enough for some tokens beside the ring, and too narrow to fill the budget.
  CheckAgainstNaive(shape, 160, 0.6f, false);
  CheckAgainstNaive(shape, 160, 0.6f, true);
  CheckAgainstNaive(shape, 160, 0.4f, false, /*by_layer=*/true);
}
SLUICE_TEST_ON_CPU_AND_GPU("a margin leaves out what scores far below the largest", Margins)

void WholeBudget(const PolicyRig::Shape& shape) {
  for (const bool fetch_all : {false, true}) {
    PolicyRig rig(shape, RandomVectors(shape, 5.0f));  // a worthless prediction
    PolicyOptions options = rig.Options();
    options.budget_tokens = shape.max_context;
    options.recall.margin = kNoMargin;
    options.recall.fetch_all = fetch_all;
    const auto policy = MakePolicy(options);
    const uint64_t seed = TestSeed();
    // Contexts that end inside a block, at its end, shorter than the ring, and of one token.
    const std::vector<int> contexts = {200, 192, 9, 1};
    for (size_t i = 0; i < contexts.size(); ++i) {
      rig.Admit(*policy, static_cast<int>(i), seed + i, contexts[i], contexts[i] + 20);
    }
    for (int step = 0; step < 20; ++step) {
      const auto out = rig.Step(*policy, {0, 1, 2, 3});
      for (int layer = 0; layer < shape.layers; ++layer) {
        for (size_t i = 0; i < contexts.size(); ++i) {
          INFO("step " << step << " layer " << layer << " context " << contexts[i]);
          const auto want =
              rig.Naive(seed + i, layer, contexts[i] + step, [](int, int) { return Who::kReal; });
          CHECK(RelativeError(out[static_cast<size_t>(layer)][i], want) <= kTolerance);
        }
      }
    }
    const Sums sums = SumsOf(*policy);
    CHECK(sums.recalled == sums.missing);
    if (!fetch_all) CHECK(sums.missing == 0);
    for (int slot = 0; slot < 4; ++slot) rig.Release(*policy, slot);
  }
}
SLUICE_TEST_ON_CPU_AND_GPU("with a budget of the whole context and no margin it is exact attention",
                           WholeBudget)

void FetchAll(const PolicyRig::Shape& shape) {
  std::vector<std::vector<std::vector<std::vector<float>>>> results[2];
  Sums sums[2];
  for (const bool fetch_all : {false, true}) {
    PolicyRig rig(shape, RandomVectors(shape, 0.3f));
    PolicyOptions options = rig.Options();
    options.budget_tokens = 272;  // everything
    options.dense_layers = 1;
    options.recall.margin = kNoMargin;
    options.recall.fetch_all = fetch_all;
    const auto policy = MakePolicy(options);
    for (int slot = 0; slot < 3; ++slot) {
      rig.Admit(*policy, slot, TestSeed() + static_cast<uint64_t>(slot), 30 + 90 * slot, 400);
    }
    for (int step = 0; step < 50; ++step) {
      results[fetch_all].push_back(rig.Step(*policy, {2, 0, 1}));
    }
    sums[fetch_all] = SumsOf(*policy);
    for (int slot = 0; slot < 3; ++slot) rig.Release(*policy, slot);
  }
  CHECK(results[0] == results[1]);
  CHECK(sums[0].selected == sums[1].selected);
  CHECK(sums[0].link_bytes < sums[1].link_bytes);
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "fetching everything in each step gives the same bits as keeping what is there", FetchAll)

void OwnProjection(const PolicyRig::Shape& shape) {
  constexpr int kRank = 5;
  constexpr int kBudget = 48;
  SplitMix64 random(TestSeed());
  std::vector<float> projection(static_cast<size_t>(shape.layers) * shape.kv_heads *
                                static_cast<size_t>(shape.head_dim) * kRank);
  // Each column has one power of two, so partial keys are exact in bf16.
  const size_t per_layer = projection.size() / static_cast<size_t>(shape.layers);
  for (size_t head = 0; head < projection.size() / (static_cast<size_t>(shape.head_dim) * kRank);
       ++head) {
    for (size_t r = 0; r < kRank; ++r) {
      const size_t d = random.Below(static_cast<uint64_t>(shape.head_dim));
      projection[(head * static_cast<size_t>(shape.head_dim) + d) * kRank + r] =
          random.Below(2) == 0 ? 0.5f : -2.0f;
    }
  }
  const PolicyRig::Make make = RandomVectors(shape, 0.3f);
  PolicyRig rig(shape, make);
  PolicyOptions options = rig.Options();
  options.budget_tokens = kBudget;
  options.recall.margin = kNoMargin;
  options.recall.projection = projection;
  const auto policy = MakePolicy(options);
  const uint64_t seed = TestSeed();
  rig.Admit(*policy, 0, seed, 150, 200);
  std::vector<NaiveResidency> resident(static_cast<size_t>(shape.layers * shape.kv_heads),
                                       {shape, kBudget, 150, 200});
  for (int step = 0; step < 20; ++step) {
    const auto out = rig.Step(*policy, {0});
    for (size_t layer = 0; layer < static_cast<size_t>(shape.layers); ++layer) {
      const std::vector<float> own(
          projection.begin() + static_cast<int64_t>(layer * per_layer),
          projection.begin() + static_cast<int64_t>((layer + 1) * per_layer));
      auto tokens = NaiveTokens(shape, make, seed, static_cast<int>(layer), 150 + step, kBudget,
                                kNoMargin, own, kRank, rig.scale());
      for (size_t head = 0; head < tokens.size(); ++head) {
        NaiveResidency& of_head = resident[layer * static_cast<size_t>(shape.kv_heads) + head];
        tokens[head] = of_head.Attend(150 + step, tokens[head]);
      }
      const auto want = rig.Naive(seed, static_cast<int>(layer), 150 + step, [&](int h, int t) {
        return tokens[static_cast<size_t>(h)].contains(t) ? Who::kReal : Who::kNobody;
      });
      INFO("step " << step << " layer " << layer);
      CHECK(RelativeError(out[layer][0], want) <= kTolerance);
    }
  }
  rig.Release(*policy, 0);
}
SLUICE_TEST_ON_CPU_AND_GPU("a projection that is handed in decides, not the plain columns",
                           OwnProjection)

void Traffic(const PolicyRig::Shape& of) {
  PolicyRig::Shape shape = of;
  const auto check = [&](float margin, bool fetch_all, kernels::GroupReduction reduction) {
    testing::CheckTraffic(shape, RandomVectors(shape, 0.3f), [&](const PolicyRig& rig, bool) {
      PolicyOptions options = rig.Options();
      options.budget_tokens = 70;
      options.dense_layers = 1;
      options.reduction = reduction;
      options.recall.margin = margin;
      options.recall.fetch_all = fetch_all;
      return MakePolicy(options);
    });
  };
  check(2, false, kernels::GroupReduction::kMax);
  shape.threads = 3;
  shape.row_bucket = 3;
  check(kNoMargin, false, kernels::GroupReduction::kSoftmaxSum);
  check(2, true, kernels::GroupReduction::kMean);
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "recall: sequences that come and go give to the bit what each gives alone", Traffic)

TEST_CASE("plain columns are the slowest pairs of RoPE") {
  const std::vector<float> p = PlainProjection({2, 1, 8, 4});
  REQUIRE(p.size() == 2 * 8 * 4);
  for (size_t layer = 0; layer < 2; ++layer) {
    for (size_t d = 0; d < 8; ++d) {
      float sum = 0;
      for (size_t r = 0; r < 4; ++r) sum += p[(layer * 8 + d) * 4 + r];
      CHECK(sum == (d % 4 >= 2 ? 1.0f : 0.0f));
    }
  }
  // An odd rank has one column without its pair; the whole is the identity.
  const std::vector<float> odd = PlainProjection({1, 1, 8, 3}), all = PlainProjection({1, 1, 8, 8});
  CHECK(std::count(odd.begin(), odd.end(), 1.0f) == 3);
  for (size_t i = 0; i < 64; ++i) CHECK(all[i] == (i % 9 == 0 ? 1.0f : 0.0f));
}

TEST_CASE("queries follow the drift of the residual unless a bench switches it off") {
  const PolicyRig::Shape shape;
  PolicyRig rig(shape, RandomVectors(shape, 0));
  PolicyOptions options = rig.Options();
  CHECK(MakePolicy(options)->kv_attention()->FollowsDrift());
  CHECK(MakePolicy(options)->rehearsals() == 1);
  options.recall.drift = false;
  CHECK_FALSE(MakePolicy(options)->kv_attention()->FollowsDrift());
}

TEST_CASE("recall: options out of range are refused by name") {
  const PolicyRig::Shape shape;
  PolicyRig rig(shape, RandomVectors(shape, 0));
  const auto refused = [&](const char* what, auto change) {
    PolicyOptions options = rig.Options();
    change(options);
    const absl::Status status = NewRecallPolicy(options).status();
    CHECK(absl::IsInvalidArgument(status));
    CHECK_THAT(std::string(status.message()), Catch::Matchers::Contains(what));
  };
  refused("budget_tokens: ", [](PolicyOptions& o) { o.budget_tokens = 16; });
  refused("recall rank: ", [](PolicyOptions& o) { o.recall.rank = 33; });
  refused("recall rank: ", [](PolicyOptions& o) { o.recall.rank = -1; });
  refused("[3][2][32][rank]", [](PolicyOptions& o) { o.recall.projection.resize(100); });
  refused("expected margins of 3 layers, found 2", [](PolicyOptions& o) {
    o.recall.margins = {1, 2};
  });
  refused("has 4 columns a head, found 3", [](PolicyOptions& o) {
    o.recall.projection.resize(3 * 2 * 32 * 4);
    o.recall.rank = 3;
  });
}

}  // namespace
}  // namespace sluice
