// The topic-drift workload (topic_drift.h) for models with latent caches and an indexer. The
// selection of the model's own indexer is sparse, moves as fast as the papers measured, and moves
// at a different pace in each layer, so that the number of misses differs between layers as ESS
// reports it (17 to 605 misses per sequence and step at a ratio of 0.2, section 3.3 of its paper).
//
// A token's embedding has a part for each of a few paths through topics, from slow to fast, and the
// indexer of a layer sees one of them. Its keys are a random projection of that part into the
// dimensions that RoPE leaves alone. Its queries are the same projection, computed through the
// first rows of q_a, plus a small change for each head; so the score of a token follows the
// similarity of topics. Layers write to other dimensions: the residual's topics stay those of the
// embedding, and selection does not depend on the other weights, which are dummies. The head walks
// along the path, as topic_drift.h says.
//
// If a path goes `drift` of the way to the next topic per token, about drift * pi / 2 * phi(z) / p
// sqrt(2 pi) of a layer's selection is new in each step (topic_drift.h, without noise); an LRU pool
// absorbs the entries that come back. Samples of this construction in 64 dimensions, with contexts
// of 32K, 2,048 selected and a pool of 0.2, have these misses per sequence and step (mean of 96
// steps), by drift:
//   0.006: 8, 0.012: 34, 0.03: 61, 0.06: 138, 0.12: 260, 0.24: 484;   at 128K and 0.1: 19 to 509.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "src/model/model_config.h"
#include "src/model/weight_source.h"

namespace sluice::bench {

struct LatentDrift {
  uint64_t seed = 1;
  int topics = 256;
  int paths = 8;
  double slowest = 0.009;    // Drift of the first path per token.
  double fastest = 0.3;      // Drift of the last path; the others are spaced by a constant factor.
  double noise = 0.05;       // A token's own share of each topic's part.
  double head_change = 0.3;  // Deviation of a query head from the keys' projection.
};

// Return the path that the indexer of a layer sees, and the drift of a path. Neighbouring layers
// see different paths: a path comes back every `paths` layers.
int PathOfLayer(const LatentDrift& options, int layer);
double DriftOfPath(const LatentDrift& options, int path);

// INVALID_ARGUMENT: the model's geometry does not suit: it has no indexer, a tied head, a hidden
// size too small for the paths, or too few rows in q_a_proj.
absl::StatusOr<std::unique_ptr<WeightSource>> LatentDriftWeights(const ModelConfig& config,
                                                                 const LatentDrift& options);

}  // namespace sluice::bench
