// Workload of topic drift: a model of any geometry whose attention is sparse and moves as the
// papers measured it, from a formula, without training (design, section 10).
//
// The vocabulary is a path: token v's embedding is the topic that the path has reached at v, plus
// noise of its own, and every 1 / drift tokens the path has turned into another of a few hundred
// topics, which come back. W_q of a group's heads is W_k plus a small change, and both see nearly
// nothing but the pairs of dimensions that RoPE hardly turns over the longest context: so q k
// follows the likeness of embeddings. What layers add to the residual is scaled so that each turns
// it by about the same angle: the predicted query's. The head's row u is the embedding of u - 1, so
// that a greedy decode walks along the path: a step is fed the token after the last one's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/base/rng.h"
#include "src/model/model_config.h"
#include "src/model/weight_source.h"

namespace sluice {

struct TopicDrift {
  uint64_t seed = 1;
  int topics = 256;
  double drift = 0.01;         // of the way to the next topic that a token goes
  double noise = 0.5;          // a token's own part of its embedding; its topic's part is 1
  double head_change = 0.3;    // of a query head against its KV head; 1: as large as W_k itself
  double layer_change = 0.25;  // what a layer adds to the residual, as a part of it, about
  double sharpness = 12;       // logit of two equal embeddings
  int segment = 96;            // tokens of the path that a context has at a time
  int max_context = 4096;      // over which RoPE must hardly turn the topics' dimensions
};

// INVALID_ARGUMENT: a geometry that it does not suit: a tied head, or no pair of dimensions that
// RoPE turns by less than a radian over max_context.
absl::StatusOr<std::unique_ptr<WeightSource>> TopicDriftWeights(const ModelConfig& config,
                                                                const TopicDrift& options);

// `tokens` tokens of segments of the path, the last of which goes on for `more` tokens that are
// not among them: after it, token v + 1 follows v. Equal for equal draws of `random`.
std::vector<int32_t> TopicDriftContext(const ModelConfig& config, const TopicDrift& options,
                                       int tokens, int more, SplitMix64& random);

}  // namespace sluice
