#include "src/attention/policies/fluxion/fluxion_policy.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/e4m3.h"
#include "kernels/fluxion_segments.h"
#include "kernels/hash_params.h"
#include "tests/test_main.h"
#include "tests/unit/attention/constant_predictor.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice {
namespace {

using testing::ConstantPredictor;
using testing::PolicyRig;
using testing::RelativeError;

// Kernels may round queries to bf16 before a product.
constexpr double kTolerance = 1e-2;
constexpr int kRingTokens = 384;

std::unique_ptr<AttentionPolicy> Make(const PolicyOptions& options) {
  auto policy = NewFluxionPolicy(options);
  INFO(std::string(policy.status().ToString()));
  REQUIRE(policy.ok());
  return *std::move(policy);
}

// The digests of a sequence: a block is known by one of its own, or by those of its 16 tokens each,
// which have a spread.
struct Digests {
  int prompt = 0;  // tokens when the sequence was admitted, of which the centre is the mean
  bool all_levels = false;  // one of its own
};

// Returns an element of the centre of the prompt's keys.
float CentreOf(const std::vector<PolicyRig::Vectors>& tokens, int prompt, int element) {
  const int count = std::min(prompt, kernels::kCentreKeys);
  float sum = 0;
  for (int i = 0; i < count; ++i) {
    sum += tokens[static_cast<size_t>(i * prompt / count)].k[static_cast<size_t>(element)];
  }
  return sum / static_cast<float>(count);
}

// Returns an element of the mean of the keys [begin, end) less the centre, before it is rounded:
// that of four keys, or the middle of two halves.
float PieceOf(const std::vector<PolicyRig::Vectors>& tokens, int begin, int end, int element,
              float centre) {
  if (end - begin > 4) {
    const int middle = (begin + end) / 2;
    return 0.5f * (PieceOf(tokens, begin, middle, element, centre) +
                   PieceOf(tokens, middle, end, element, centre));
  }
  float sum = 0;
  for (int t = begin; t < end; ++t) {
    sum += tokens[static_cast<size_t>(t)].k[static_cast<size_t>(element)];
  }
  return sum / 4 - centre;
}

// Returns an element of the spread of 16 keys from `begin` on around the means of each four, before
// it is rounded.
float SpreadOf(const std::vector<PolicyRig::Vectors>& tokens, int begin, int element) {
  double sum = 0;
  for (int t = begin; t < begin + 16; ++t) {
    const int first = begin + (t - begin) / 4 * 4;
    const double mean = double{PieceOf(tokens, first, first + 4, element, 0)};
    const double off =
        double{tokens[static_cast<size_t>(t)].k[static_cast<size_t>(element)]} - mean;
    sum += off * off / 16;
  }
  return static_cast<float>(sum);
}

double Rounded(float v) { return double{kernels::E4M3ToFloat(kernels::FloatToE4M3(v))}; }

// Returns a query's best product with the pieces, of `length` tokens each, of the tokens [begin,
// end) of a KV head.
double BestPiece(const std::vector<PolicyRig::Vectors>& tokens, const float* q, int begin, int end,
                 int length, const std::vector<float>& centre, int first_element) {
  double best = -INFINITY;
  const int dim = static_cast<int>(centre.size());
  for (int first = begin; first < end; first += length) {
    double score = 0;
    for (int d = 0; d < dim; ++d) {
      const float piece =
          PieceOf(tokens, first, first + length, first_element + d, centre[static_cast<size_t>(d)]);
      score += double{q[d]} * Rounded(piece);
    }
    best = std::max(best, score);
  }
  return best;
}

// Returns a query's score of the 16 tokens from `begin` on by their digest, with its spread.
double ScoreOfUnit(const std::vector<PolicyRig::Vectors>& tokens, const float* q, int begin,
                   const std::vector<float>& centre, int first_element) {
  double spread = 0;
  for (int d = 0; d < static_cast<int>(centre.size()); ++d) {
    spread += double{q[d]} * double{q[d]} * Rounded(SpreadOf(tokens, begin, first_element + d));
  }
  return BestPiece(tokens, q, begin, begin + 16, 4, centre, first_element) + 2 * std::sqrt(spread);
}

// Returns the tokens that each KV head attends to if each query head reads `share` of its tokens in
// the blocks of `block` tokens with the highest scores. Nothing is resident but the sink and the
// ring.
std::vector<std::set<int>> Attended(const PolicyRig::Shape& shape, const PolicyRig::Make& make,
                                    std::pair<uint64_t, int> seed_and_layer, int position,
                                    const Digests& digests, int block, float share) {
  const auto& [seed, layer] = seed_and_layer;
  const kernels::FluxionSegments segments = kernels::SegmentsOf(position);
  int level = 0;
  while (kernels::LevelTokens(level) < block) ++level;
  const int ring_units = kRingTokens / shape.block_tokens;
  const int ring = std::max(position / shape.block_tokens - ring_units + 1, 0) * shape.block_tokens;
  std::vector<PolicyRig::Vectors> tokens;
  for (int t = 0; t <= position; ++t) tokens.push_back(make(seed, layer, t));
  const int wanted = kernels::BlocksOfShare(segments, level, share);
  const int group = shape.heads / shape.kv_heads;
  std::vector<std::set<int>> attended(static_cast<size_t>(shape.kv_heads));
  for (int head = 0; head < shape.heads; ++head) {
    const int kv = head / group;
    const float* const q = tokens.back().q.data() + head * shape.head_dim;
    std::vector<float> centre;
    for (int d = 0; d < shape.head_dim; ++d) {
      centre.push_back(CentreOf(tokens, digests.prompt, kv * shape.head_dim + d));
    }
    std::vector<std::pair<double, int>> scores;  // {-score, block}
    const int first = kernels::FirstBlock(segments, level);
    for (int b = first; b < kernels::EndBlock(segments, level); ++b) {
      const int begin = std::max(b * block, segments.sink), end = (b + 1) * block;
      double best = -INFINITY;
      if (digests.all_levels) {
        best = BestPiece(tokens, q, begin, end, block / 4, centre, kv * shape.head_dim);
      }
      for (int unit = begin; !digests.all_levels && unit < end; unit += 16) {
        best = std::max(best, ScoreOfUnit(tokens, q, unit, centre, kv * shape.head_dim));
      }
      scores.emplace_back(-best, b);
    }
    std::sort(scores.begin(), scores.end());
    for (int i = 0; i < wanted; ++i) {
      for (int t = 0; t < block; ++t) {
        attended[static_cast<size_t>(kv)].insert(scores[static_cast<size_t>(i)].second * block + t);
      }
    }
  }
  for (std::set<int>& of_head : attended) {
    for (int t = 0; t < segments.sink; ++t) of_head.insert(t);
    for (int t = ring; t <= position; ++t) of_head.insert(t);
  }
  return attended;
}

// Checks a step's rows of one slot against softmax over what `attended` says by layer, or over
// everything where it is null.
void CheckRow(const PolicyRig& rig, const std::vector<std::vector<std::vector<float>>>& out,
              size_t row, uint64_t seed, int position,
              const std::function<std::vector<std::set<int>>(int layer)>& attended) {
  for (int layer = 0; layer < rig.shape().layers; ++layer) {
    std::vector<std::set<int>> of_layer;
    if (attended != nullptr) of_layer = attended(layer);
    const auto want = rig.Naive(seed, layer, position, [&](int head, int token) {
      const bool is_read =
          attended == nullptr || of_layer[static_cast<size_t>(head)].contains(token);
      return is_read ? PolicyRig::Who::kReal : PolicyRig::Who::kNobody;
    });
    INFO("layer " << layer << ", position " << position);
    CHECK(RelativeError(out[static_cast<size_t>(layer)][row], want) <= kTolerance);
  }
}

PolicyStatistics::Layer SumsOf(const AttentionPolicy& policy) {
  PolicyStatistics::Layer sums;
  for (const PolicyStatistics::Layer& layer : policy.Statistics().layers) {
    sums.selected += layer.selected;
    sums.missing += layer.missing;
    sums.recalled += layer.recalled;
  }
  return sums;
}

using Placement = PolicyOptions::Fluxion::Placement;

using Division = PolicyOptions::Fluxion::Division;

void CheckReadsAll(const PolicyRig::Shape& shape, Placement placement, double device_share,
                   Division division = Division::kEachList) {
  PolicyRig rig(shape, testing::RandomVectors(shape, 0));
  PolicyOptions options = rig.Options();
  options.budget_tokens = 128;
  options.dense_layers = 0;
  options.workers = 2;
  options.worker_deadline = absl::Seconds(60);
  options.fluxion.placement = placement;
  options.fluxion.device_share = device_share;
  options.fluxion.division = division;
  const auto policy = Make(options);
  CHECK(policy->exact_tokens() == 128 + kRingTokens);
  const uint64_t seed = TestSeed();
  const std::vector<int> contexts = {700, 10, 505};
  for (int slot = 0; slot < 3; ++slot) {
    rig.Admit(*policy, slot, seed + static_cast<uint64_t>(slot),
              contexts[static_cast<size_t>(slot)], 900);
  }
  for (int step = 0; step < 20; ++step) {
    std::vector<int> positions;
    for (int slot = 0; slot < 3; ++slot) positions.push_back(rig.position(slot));
    const auto out = rig.Step(*policy, {0, 1, 2});
    for (size_t row = 0; row < 3 && step % 6 == 1; ++row) {
      CheckRow(rig, out, row, seed + row, positions[row], nullptr);
    }
  }
  const PolicyStatistics::Layer sums = SumsOf(*policy);
  CHECK(sums.missing > 0);
  CHECK(sums.missing < sums.selected);
  for (int slot = 0; slot < 3; ++slot) {
    CHECK(policy->SlotHealth(slot).ok());
    rig.Release(*policy, slot);
  }
}

void TestReadsAll(const PolicyRig::Shape& of) {
  for (const int block_tokens : {16, 32, 64}) {
    PolicyRig::Shape shape = of;
    shape.block_tokens = block_tokens;
    shape.layers = 2;
    for (const double device_share : {0.0, 0.4, 1.0}) {
      INFO("device share " << device_share << ", blocks of " << block_tokens);
      CheckReadsAll(shape, Placement::kFixed, device_share);
    }
    for (const Division division : {Division::kHeads, Division::kLengths}) {
      INFO("whole lists, blocks of " << block_tokens);
      CheckReadsAll(shape, Placement::kFixed, 0.5, division);
    }
    INFO("pull, blocks of " << block_tokens);
    CheckReadsAll(shape, Placement::kPull, -1);
  }
}
SLUICE_TEST_ON_CPU_AND_GPU("without a predictor every head reads all of its tokens", TestReadsAll)

void CheckFixed(const PolicyRig::Shape& of, bool in_dram, Placement placement) {
  PolicyRig::Shape shape = of;
  shape.heads = 6;
  const PolicyRig::Make make = testing::RandomVectors(shape, 0);
  for (const auto& [block, share] : {std::pair(16, 0.1f), {32, 0.3f}, {128, 0.4f}}) {
    PolicyRig rig(shape, make);
    PolicyOptions options = rig.Options();
    options.dense_layers = 1;
    options.fluxion.fixed_block = block;
    options.fluxion.fixed_share = share;
    options.fluxion.resident = false;
    options.fluxion.digests_in_dram = options.fluxion.all_levels = in_dram;
    options.fluxion.placement = placement;
    const auto policy = Make(options);
    const uint64_t seed = TestSeed();
    rig.Admit(*policy, 1, seed, 880, 1000);
    for (int step = 0; step < 24; ++step) {  // blocks become part of the cpu segment meanwhile
      const int position = rig.position(1);
      const auto out = rig.Step(*policy, {1});
      if (step % 8 != 0) continue;
      INFO("blocks of " << block << ", step " << step);
      CheckRow(rig, out, 0, seed, position, [&](int layer) {
        const Digests digests = {880, in_dram};
        if (layer > 0) return Attended(shape, make, {seed, layer}, position, digests, block, share);
        return Attended(shape, make, {seed, layer}, position, digests, 16, 1.0f);
      });
    }
    CHECK(SumsOf(*policy).recalled == 0);
    rig.Release(*policy, 1);
  }
}
void TestFixed(const PolicyRig::Shape& shape) {
  for (const bool in_dram : {false, true}) {
    for (const Placement placement : {Placement::kFixed, Placement::kPull}) {
      INFO("digests in " << (in_dram ? "DRAM" : "HBM") << ", placement "
                         << static_cast<int>(placement));
      CheckFixed(shape, in_dram, placement);
    }
  }
}
SLUICE_TEST_ON_CPU_AND_GPU("a fixed budget reads each query head's best blocks, and their union",
                           TestFixed)

enum class Anchor { kComputed, kHinted, kNone };

void CheckPrediction(const PolicyRig::Shape& shape, Anchor anchor, bool streaming, bool in_dram) {
  const PolicyRig::Make make = testing::RandomVectors(shape, 0);
  PolicyRig rig(shape, make);
  PolicyOptions options = rig.Options();
  options.dense_layers = 0;
  // Equation 3 takes blocks of 32 tokens: the other sizes need too much. Where lists have no
  // choice, they have blocks of the cache's size.
  const int block = in_dram ? 32 : shape.block_tokens;
  std::vector<float> budgets(kernels::kFluxionLevels, 1.0f);
  for (size_t level = 0; level < budgets.size(); ++level) {
    if (kernels::LevelTokens(static_cast<int32_t>(level)) == block) budgets[level] = 0.1f;
  }
  options.fluxion.predictor = ConstantPredictor(budgets, streaming);
  options.fluxion.resident = false;
  options.fluxion.digests_in_dram = options.fluxion.all_levels = in_dram;
  const auto policy = Make(options);
  CHECK(policy->hint_queries() == int64_t{shape.layers} * shape.heads * shape.head_dim);
  CHECK(policy->last_rows_wanted(900) == 1);
  const uint64_t seed = TestSeed();
  SelectionHints hints;
  for (int layer = 0; layer < shape.layers && anchor == Anchor::kHinted; ++layer) {
    const std::vector<float> q = make(seed, layer, 899).q;
    hints.queries.insert(hints.queries.end(), q.begin(), q.end());
  }
  rig.Admit(*policy, 0, seed, 900, 1000, anchor == Anchor::kComputed ? 3 : 0, hints);
  for (int step = 0; step < 3; ++step) {
    const int position = rig.position(0);
    const auto out = rig.Step(*policy, {0});
    INFO("step " << step);
    CheckRow(rig, out, 0, seed, position, [&](int layer) {
      const float share = anchor == Anchor::kNone ? 1.0f : streaming ? 0.0f : 0.1f;
      return Attended(shape, make, {seed, layer}, position, {900, in_dram}, block, share);
    });
  }
  rig.Release(*policy, 0);
}

void TestPredicted(const PolicyRig::Shape& shape) {
  for (const Anchor anchor : {Anchor::kComputed, Anchor::kHinted, Anchor::kNone}) {
    for (const bool streaming : {false, true}) {
      INFO("anchor " << static_cast<int>(anchor) << ", streaming " << streaming);
      CheckPrediction(shape, anchor, streaming, /*in_dram=*/false);
      CheckPrediction(shape, anchor, streaming, /*in_dram=*/true);
    }
  }
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "predicted budgets decide what is read, and without an anchor everything is", TestPredicted)

void TestHotBlocks(const PolicyRig::Shape& shape) {
  PolicyRig rig(shape, testing::RandomVectors(shape, 0));
  PolicyOptions options = rig.Options();
  options.dense_layers = 0;
  options.budget_tokens = 320;
  options.fluxion.fixed_block = 16;
  options.fluxion.fixed_share = 0.1;
  const auto policy = Make(options);
  rig.Admit(*policy, 0, TestSeed(), 900, 1000);
  rig.Step(*policy, {0});
  const int64_t first = SumsOf(*policy).missing;
  CHECK(first > 0);
  // The same row selects the same blocks, which lie in HBM by now.
  rig.Rewind(0);
  rig.Step(*policy, {0});
  CHECK(SumsOf(*policy).missing == first);
  CHECK(SumsOf(*policy).recalled == first);
  rig.Release(*policy, 0);
}
SLUICE_TEST_ON_CPU_AND_GPU("blocks that were selected have places in HBM afterwards", TestHotBlocks)

// Heads that stream select nothing, but they attend to what has a place: the blocks that the
// anchor's query scores highest.
void TestAnchorBlocks(const PolicyRig::Shape& of) {
  constexpr int kContext = 900, kBlock = 16, kPlaces = 16;
  PolicyRig::Shape shape = of;
  shape.block_tokens = kBlock;
  const PolicyRig::Make make = testing::RandomVectors(shape, 0);
  PolicyRig rig(shape, make);
  PolicyOptions options = rig.Options();
  options.dense_layers = 0;
  options.budget_tokens = kernels::kFluxionSinkTokens + kPlaces * kBlock;
  options.fluxion.predictor = ConstantPredictor({1, 0.1f, 1, 1}, /*streaming=*/true);
  const auto policy = Make(options);
  const uint64_t seed = TestSeed();
  rig.Admit(*policy, 0, seed, kContext, kContext + 100, /*computed=*/3);
  const auto out = rig.Step(*policy, {0});

  const kernels::FluxionSegments segments = kernels::SegmentsOf(kContext - 1);
  const int chosen = kPlaces / (shape.heads / shape.kv_heads);
  const float share =
      (static_cast<float>(chosen) - 0.5f) / static_cast<float>(kernels::CpuBlocks(segments, 0));
  CheckRow(rig, out, 0, seed, kContext, [&](int layer) {
    auto attended = Attended(shape, make, {seed, layer}, kContext - 1, {kContext}, kBlock, share);
    for (std::set<int>& tokens : attended) tokens.insert(kContext);
    return attended;
  });
  CHECK(SumsOf(*policy).selected == 0);
  rig.Release(*policy, 0);
}
SLUICE_TEST_ON_CPU_AND_GPU("what the prompt's end looks for has places before the first step",
                           TestAnchorBlocks)

TEST_CASE("fluxion refuses options that do not fit, by name") {
  PolicyRig::Shape shape;
  const auto refused = [&](const std::string& field, auto change) {
    PolicyRig rig(shape, testing::RandomVectors(shape, 0));
    PolicyOptions options = rig.Options();
    change(options);
    const auto policy = NewFluxionPolicy(options);
    REQUIRE_FALSE(policy.ok());
    CHECK(absl::IsInvalidArgument(policy.status()));
    CHECK_THAT(std::string(policy.status().message()), Catch::StartsWith(field + ": "));
  };
  refused("budget_tokens", [](PolicyOptions& o) { o.budget_tokens = 63; });
  refused("fluxion_device_share", [](PolicyOptions& o) { o.fluxion.device_share = 1.5; });
  refused("fluxion_device_share", [](PolicyOptions& o) {
    o.fluxion.placement = Placement::kPull;
    o.fluxion.device_share = 0.3;
  });
  refused("fluxion_placement", [](PolicyOptions& o) {
    o.fluxion.placement = Placement::kPull;
    o.fluxion.division = Division::kHeads;
  });
  refused("policy_workers", [](PolicyOptions& o) {
    o.fluxion.placement = Placement::kPull;
    o.workers = 64;
  });
  const auto publish = [](PolicyOptions& o) {
    o.fluxion.digests_in_dram = o.fluxion.all_levels = true;
    o.fluxion.resident = false;
  };
  refused("fluxion_device_share", [&](PolicyOptions& o) {
    publish(o);
    o.fluxion.device_share = 0.5;
  });
  refused("fluxion_placement", [&](PolicyOptions& o) {
    publish(o);
    o.fluxion.division = Division::kHeads;
  });
  refused("hot", [&](PolicyOptions& o) {
    publish(o);
    o.fluxion.resident = true;
  });
  refused("fluxion_fixed_block", [](PolicyOptions& o) { o.fluxion.fixed_block = 8; });
  refused("fluxion_fixed_block", [](PolicyOptions& o) { o.fluxion.fixed_block = 48; });
  refused("fluxion_fixed_block", [](PolicyOptions& o) { o.fluxion.fixed_block = 256; });
  refused("fluxion_fixed_share", [](PolicyOptions& o) { o.fluxion.fixed_share = 1.5; });
  refused("fluxion_predictor", [](PolicyOptions& o) {
    auto predictor = *ConstantPredictor({1, 1, 1, 1}, false);
    predictor.layers[0].bias[2] = std::numeric_limits<float>::quiet_NaN();
    o.fluxion.predictor = std::make_shared<const FluxionPredictor>(predictor);
  });
  refused("max_context", [](PolicyOptions& o) { o.max_context = 1 << 20; });
  refused("fluxion_predictor", [](PolicyOptions& o) {
    o.heads = 18;  // nine for each KV head
    o.fluxion.predictor = ConstantPredictor({1, 1, 1, 1}, false);
  });
  shape.block_tokens = 128;
  refused("block_tokens", [](PolicyOptions&) {});
}

}  // namespace
}  // namespace sluice
