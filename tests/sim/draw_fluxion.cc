#include "tests/sim/draw_fluxion.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "src/attention/policies/fluxion/predictor.h"
#include "tests/sim/hash.h"
#include "tests/sim/hints.h"

namespace sluice::sim {
namespace {

using kernels::kFluxionFeatures;
using kernels::kFluxionLargestBlock;
using kernels::kFluxionSinkTokens;

// Longest contexts of nodes, in tokens: behind 448 of them and what the budget adds, rows read
// outside HBM.
constexpr int64_t kLeastContext = 560;
constexpr int64_t kMostContext = 800;
// A float whose sums and products overflow.
constexpr float kHuge = 3e38f;

// Returns a number from -most to most.
float DrawWeight(SplitMix64& random, double most) {
  return static_cast<float>((2 * random.Uniform() - 1) * most);
}

FluxionPredictor::Layer DrawLayer(SplitMix64& random, int in, int out, double most) {
  FluxionPredictor::Layer layer;
  layer.in = in;
  layer.out = out;
  for (int i = 0; i < in * out; ++i) layer.weights.push_back(DrawWeight(random, most));
  for (int i = 0; i < out; ++i) layer.bias.push_back(DrawWeight(random, most));
  return layer;
}

// Makes every head read everything: no budget is finite, or below 1, and no head streams.
void ReadEverything(FluxionPredictor::Layer* last) {
  std::fill(last->weights.begin(), last->weights.end(), 0.0f);
  std::fill(last->bias.begin(), last->bias.end(), kHuge);
  last->bias.back() = -kHuge;
}

// Draws a small network with weights that nobody trained. In some of them sums overflow, so that
// outputs are not numbers.
std::shared_ptr<const FluxionPredictor> DrawPredictor(SplitMix64& random, bool reads_all) {
  auto predictor = std::make_shared<FluxionPredictor>();
  predictor->model_fingerprint.assign(64, '0');
  predictor->form =
      OneIn(random, 2) ? FluxionPredictor::Form::kLine : FluxionPredictor::Form::kFour;
  predictor->tau = OneIn(random, 3) ? 0 : random.Uniform();
  predictor->streaming_threshold = static_cast<float>(random.Uniform());
  for (int i = 0; i < kFluxionFeatures; ++i) {
    predictor->mean.push_back(DrawWeight(random, 2));
    // Features 2 and 3 count tokens.
    const double scale = i == 2 || i == 3 ? 300 : 1;
    predictor->deviation.push_back(static_cast<float>(scale * (0.5 + 4 * random.Uniform())));
  }
  const bool overflows = OneIn(random, 5);
  int in = kFluxionFeatures;
  for (int64_t hidden = Between(random, 0, 2); hidden > 0; --hidden) {
    const int out = static_cast<int>(Between(random, 1, 6));
    predictor->layers.push_back(DrawLayer(random, in, out, overflows ? kHuge : 1));
    in = out;
  }
  predictor->layers.push_back(
      DrawLayer(random, in, FluxionOutputs(predictor->form), OneIn(random, 2) ? 0.2 : 1));
  if (reads_all) ReadEverything(&predictor->layers.back());
  return predictor;
}

// Draws who budgets: nobody, a constant or a predictor.
void DrawBudgets(SplitMix64& random, NodeSpec* node) {
  PolicyOptions::Fluxion& fluxion = node->policy.fluxion;
  node->selects_all = OneIn(random, 3);
  switch (random.Below(5)) {
    case 0:
      node->selects_all = true;
      break;
    case 1:
      fluxion.fixed_block = node->block_tokens;
      while (fluxion.fixed_block < kFluxionLargestBlock && OneIn(random, 2)) {
        fluxion.fixed_block *= 2;
      }
      fluxion.fixed_share = node->selects_all ? 1 : OneIn(random, 4) ? 0 : random.Uniform();
      break;
    default:
      fluxion.predictor = DrawPredictor(random, node->selects_all);
      break;
  }
}

}  // namespace

bool IsFluxion(const NodeSpec& node) {
  SplitMix64 random(node.engine.seed ^ 0xF1);
  return OneIn(random, 6);
}

void DrawFluxion(NodeSpec* node) {
  SplitMix64 random(node->engine.seed);
  PolicyOptions& policy = node->policy;
  policy.name = "fluxion";
  node->block_tokens = OneIn(random, 4) ? 64 : OneIn(random, 3) ? 32 : 16;
  const int64_t longest = Between(random, kLeastContext, kMostContext);
  node->engine.max_context = static_cast<uint32_t>(longest);
  node->engine.max_sequences = std::min<uint32_t>(node->engine.max_sequences, 3);
  node->engine.chunk_tokens = static_cast<uint32_t>(Between(random, 40, 200));
  DrawBudgets(random, node);
  policy.fluxion.resident = !OneIn(random, 3);
  policy.fluxion.digests_in_dram = OneIn(random, 4);
  policy.fluxion.all_levels = OneIn(random, 2);
  if (OneIn(random, 2)) policy.fluxion.device_share = random.Uniform();
  if (OneIn(random, 4)) policy.fluxion.device_share = OneIn(random, 2) ? 0 : 1;
  if (policy.fluxion.digests_in_dram) {
    policy.fluxion.resident = false;
    policy.fluxion.device_share = OneIn(random, 2) ? 0 : -1;
  }
  policy.recompute_last = static_cast<PolicyOptions::RecomputeLast>(random.Below(3));
  // The whole sequence has places, or those of the sink and some blocks.
  policy.budget_tokens = kFluxionSinkTokens + static_cast<int>(Between(random, 0, 112));
  if (OneIn(random, 8)) policy.budget_tokens = static_cast<int>(longest);
  const int64_t pages = (longest / node->block_tokens + 1) * kLayers;
  node->hbm_pages = pages * Between(random, 4, 6);
  node->dram_pages = Between(random, pages * 3 / 2, pages * 4);
  // Rounds are few here.
  node->device.worker_failures *= 5;
  node->device.late_workers *= 5;
  node->device.leaving_workers *= 5;
}

int64_t DrawFluxionPrompt(SplitMix64& random, const NodeSpec& node) {
  switch (random.Below(4)) {
    case 0:  // the answer outgrows the places
      return std::clamp<int64_t>(node.exact - Between(random, 0, 20), 1, node.longest - 2);
    case 1:
      return Between(random, 1, node.longest - 2);
    default:
      return node.longest - Between(random, 2, 100);
  }
}

std::optional<SelectionHints> DrawFluxionHints(uint32_t context, const NodeSpec& node,
                                               SplitMix64& random) {
  if (OneIn(random, 2)) return std::nullopt;
  SelectionHints hints = DrawHints(random, {context, static_cast<uint32_t>(node.block_tokens),
                                            node.hint_tokens, node.hint_queries});
  // Products of such queries are not finite, and neither are the anchor's features.
  if (OneIn(random, 5)) {
    for (float& query : hints.queries) query *= 1e30f;
  }
  return hints;
}

}  // namespace sluice::sim
