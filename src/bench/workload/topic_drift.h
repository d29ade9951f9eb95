// The topic-drift workload: a formula gives a model of any geometry attention that is sparse and
// moves as the papers measured it, without training (design, section 10).
//
// With `jump` set the path leaves its topic at once every so many tokens, and a decode that walks
// along it jumps when it is fed token k * jump.
//
// The vocabulary is a path: token v's embedding is the topic that the path has reached at v, plus
// noise of its own, and every 1 / drift tokens the path has turned into another of a few hundred
// topics, which come back. W_q of a group's heads is W_k plus a small change, and both see nearly
// nothing but the pairs of dimensions that RoPE hardly turns over the longest context: so q k
// follows the similarity of topics. Each layer's addition turns the residual by about the same
// angle, which is also the angle of the predicted query. Nearly all of that addition is attention,
// a mean over tokens of similar topics: an MLP would turn two similar residuals further apart in
// every layer.
//
// An eighth of the residual's dimensions hold the token's identity, so softly that norms and MLPs
// do not notice. Queries, keys and the layers' output have zeros there, and the head has its
// weights only there. Row u of the head is the identity of u - 1: a greedy decode walks along the
// path exactly, whatever the noise, and each step is fed the token that follows the last one.
//
// The following determines the share of policy scout's budget that is not resident t steps after
// the last recall. Topics are random directions, of which queries and keys keep `n` dimensions (24
// of head_dim 128 at 64K tokens): a block's score is nearly normal over the context, and the budget
// is the tail above its quantile z of p = budget / context. Between two steps the query turns by an
// angle d, and the following share of the tail leaves:
//   away = d * phi(z) / (p sqrt(2 pi)),   d^2 = 2 noise^2 + (drift t pi / 2)^2
// (phi is the normal density; p = 1/32 gives away = 0.9 d, p = 1/16 gives 0.8 d). So the first
// step's share comes from the noise of queries alone: a noise of 0.5, as one might give a token,
// would change more than the paper's whole interval. The rest is drift, in proportion to t. Blocks
// whose keys are similar have tight digests, so bounds add little. A block that leaves the ring of
// the newest blocks has the current topic and is not resident: 1 / budget blocks every block_tokens
// steps. A topic that a context often returns to may fill the budget by itself; the boundary of the
// budget then falls in a gap, and the share stays flat. So contexts differ much, and figures need
// several. Samples of this model (64K tokens, budget 2,048, blocks of 32, layer 0, eight contexts)
// gave 4.8 % after one step (2.7-6.2) and 11.2 % after nine (7.4-14.8) at drift 0.0105 and noise
// 0.042. Other layers see what attention made of both.
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
  double drift = 0.011;        // Fraction of the way to the next topic per token.
  double noise = 0.042;        // A token's own part of its embedding; its topic's part is 1.
  double head_change = 0.3;    // A query head's deviation from its KV head; 1: as large as W_k.
  double layer_change = 0.25;  // Approximate size of a layer's addition relative to the residual.
  double sharpness = 12;       // Logit of two equal embeddings.
  int segment = 96;            // Consecutive tokens of the path in a context.
  // The share of a layer's KV heads whose queries turn with a path of their own, which drifts by
  // `turning` a token: heads of a real model differ in how fast they turn. 0: every head sees the
  // one path. Otherwise half of the embedding's topic is the second path's.
  double turning_heads = 0;
  double turning = 0.25;
  int jump = 0;            // Tokens of the path between jumps to other topics; 0: it only drifts.
  int max_context = 4096;  // Tokens over which RoPE must hardly turn the topics' dimensions.
};

// INVALID_ARGUMENT: the model's geometry does not suit: it has a tied head, or no pair of
// dimensions that RoPE turns by less than a radian over max_context.
absl::StatusOr<std::unique_ptr<WeightSource>> TopicDriftWeights(const ModelConfig& config,
                                                                const TopicDrift& options);

// Returns `tokens` tokens in segments of the path. The last segment can be continued by `more`
// tokens that are not returned: after it, token v + 1 follows v. Equal states of `random` give
// equal contexts.
std::vector<int32_t> TopicDriftContext(const ModelConfig& config, const TopicDrift& options,
                                       int tokens, int more, SplitMix64& random);

}  // namespace sluice::bench
