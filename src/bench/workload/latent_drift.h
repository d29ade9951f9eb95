// The workload of topic drift (topic_drift.h) for models with latent caches and an indexer: what
// the model's own indexer selects is sparse, moves as the papers measured it, and moves at another
// pace in each layer, so that misses differ between layers as ESS reports them (17 to 605 of a
// sequence and step at a ratio of 0.2, section 3.3 of its paper).
//
// A token's embedding has a part for each of a few paths through topics, from slow to fast; the
// indexer of a layer sees one of them. Its keys are a random projection of that part into the
// dimensions that RoPE leaves alone, its queries the same projection, by way of the first rows of
// q_a, plus a small change for each head; so the score of a token follows the likeness of topics.
// What layers write lies in dimensions of its own: the residual's topics stay those of the
// embedding, and selection does not depend on the other weights, which are dummies. The head walks
// along the path, as topic_drift.h says.
//
// What is fresh in a step of a layer whose path goes `drift` of the way to the next topic a token
// is about drift * pi / 2 * phi(z) / p sqrt(2 pi) of the selection (topic_drift.h, without noise);
// an LRU pool takes what comes back. Drawn from this construction in 64 dimensions, contexts of
// 32K, 2,048 selected, a pool of 0.2: misses of a sequence and step, mean of 96 steps, by drift:
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
  double slowest = 0.009;    // drift of the first path, by token
  double fastest = 0.3;      // of the last; the others lie between, a factor apart
  double noise = 0.05;       // a token's own part of each topic
  double head_change = 0.3;  // of a query head against the keys' projection
};

// Which path the indexer of a layer sees, and how fast that is. Neighbours differ: a path comes
// back every `paths` layers.
int PathOfLayer(const LatentDrift& options, int layer);
double DriftOfPath(const LatentDrift& options, int path);

// INVALID_ARGUMENT: a geometry that it does not suit: no indexer, a tied head, too small a hidden
// size for the paths, too few rows in q_a_proj.
absl::StatusOr<std::unique_ptr<WeightSource>> LatentDriftWeights(const ModelConfig& config,
                                                                 const LatentDrift& options);

}  // namespace sluice::bench
