// Workload of topic drift: a model of any geometry whose attention is sparse and moves as the
// papers measured it, from a formula, without training (design, section 10).
//
// The vocabulary is a path: token v's embedding is the topic that the path has reached at v, plus
// noise of its own, and every 1 / drift tokens the path has turned into another of a few hundred
// topics, which come back. W_q of a group's heads is W_k plus a small change, and both see nearly
// nothing but the pairs of dimensions that RoPE hardly turns over the longest context: so q k
// follows the likeness of topics. What a layer adds to the residual turns it by about the same
// angle in each: the predicted query's. Nearly all of it is attention, a mean over tokens of like
// topics: an MLP would turn two like residuals further apart in every layer.
//
// Which token it is, an eighth of the residual's dimensions say, so softly that norms and MLPs do
// not notice; queries, keys and what layers write have zeros there, and the head has them there
// alone. Its row u is the identity of u - 1: a greedy decode walks along the path exactly, whatever
// the noise, and a step is fed the token after the last one's.
//
// What the share of policy scout's budget that is not resident t steps after the last recall
// depends on. Topics are random directions, of which queries and keys keep `n` dimensions (24 of
// head_dim 128 at 64K tokens): a block's score is nearly normal over the context, and the budget is
// the tail above its quantile z of p = budget / context. Between two steps the query turns by an
// angle d, and of the tail leaves
//   away = d * phi(z) / (p sqrt(2 pi)),   d^2 = 2 noise^2 + (drift t pi / 2)^2
// (phi: the normal density; p = 1/32: away = 0.9 d; 1/16: 0.8 d). So the first step's share is the
// noise, of queries alone: 0.5 of it, as one would give a token, changes more than the paper's
// whole interval. The rest is drift, in proportion to t. Blocks whose keys are alike have tight
// digests, so bounds add little. A block that leaves the ring of the newest is of the topic of the
// day and not resident: 1 / budget blocks every block_tokens steps. A topic that a context comes
// back to often fills the budget by itself, whose boundary then falls in a gap, and the share stays
// flat: contexts differ much, and figures want several. Drawn from this model (64K tokens, budget
// 2,048, blocks of 32, layer 0, eight contexts): 4.8 % after one step (2.7-6.2), 11.2 % after nine
// (7.4-14.8) at drift 0.0105 and noise 0.042. Other layers see what attention made of both.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/base/rng.h"
#include "src/model/model_config.h"
#include "src/model/weight_source.h"

namespace sluice::bench {

struct TopicDrift {
  uint64_t seed = 1;
  int topics = 256;
  double drift = 0.011;        // of the way to the next topic that a token goes
  double noise = 0.042;        // a token's own part of its embedding; its topic's part is 1
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

}  // namespace sluice::bench
