// The attention of one row's group of query heads over the cache of their KV head, in float64, with
// what Fluxion measures of it: the parts of the segments, the error of a selection (equation 2),
// and the least budgets with which the error stays within a bound (section 5.2). It is the
// reference for kernels, and the source of training labels.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/fluxion_params.h"

namespace sluice {

// The keys and values of one KV head, [tokens][head_dim] each.
struct HeadCache {
  const float* k = nullptr;
  const float* v = nullptr;
  int64_t head_dim = 0;
};

// Attention to a part of the tokens: the natural-log sum-exp of the scores, and the output.
struct AttentionPart {
  double lse = -INFINITY;
  std::vector<double> o;  // [head_dim]; zeros if the part is empty
  double Length() const;  // of o
};

// The digests of a sequence's KV head by which its blocks are known: of every 16 keys the means of
// each four, and, if `has_spread`, the spread around them. They are those of kernels::LevelDigests
// at level 0, but for the centre, which changes no order, and the rounding to e4m3.
class UnitDigests {
 public:
  // Covers all whole blocks of [0, tokens).
  UnitDigests(const HeadCache& cache, int64_t tokens, bool has_spread);
  // Returns the score of a block of level 0, as kernels::LevelScores does.
  double Score(const float* q, int64_t block) const;
  bool has_spread() const { return has_spread_; }

 private:
  const int64_t dim_;
  const bool has_spread_;
  std::vector<float> vectors_;  // [blocks][kDigestVectors][head_dim]
};

class GroupAttention {
 public:
  // `q` is [group][head_dim]. `digests` cover the row's cpu segment. Both outlive this.
  GroupAttention(const HeadCache& cache, const UnitDigests& digests, const float* q, int64_t group,
                 const kernels::FluxionSegments& segments);

  int64_t group() const { return group_; }
  const HeadCache& cache() const { return cache_; }
  const kernels::FluxionSegments& segments() const { return segments_; }
  std::vector<double> Query(int64_t g) const;
  const AttentionPart& sink(int64_t g) const { return Of(g).sink; }
  const AttentionPart& cpu(int64_t g) const { return Of(g).cpu; }
  const AttentionPart& local(int64_t g) const { return Of(g).local; }
  const AttentionPart& whole(int64_t g) const { return Of(g).whole; }
  // Returns attention to the default set alone, and its error.
  AttentionPart Resident(int64_t g) const;
  double ResidentError(int64_t g) const;
  // Returns how many tokens of K and V, in bf16, have as many bytes as the digests by which the cpu
  // segment's blocks of a level are ranked.
  int64_t DigestTokens(int32_t level) const;
  // Returns q k / (|q| sqrt(head_dim)) of each token of the cpu segment.
  std::vector<double> Interactions(int64_t g) const;

  // Returns the cpu segment's blocks from the one with the highest score to the one with the
  // lowest, lower blocks first among equals.
  std::vector<int32_t> Order(int64_t g, int32_t level) const;
  // Returns the share of the cpu segment in the shortest prefix of Order(g, level) from which on
  // every longer one has an error of at most `bound`, which is a length (tau times the largest
  // output of the layer's heads). TokenBudget does the same for single tokens in the order of
  // their scores.
  double Budget(int64_t g, int32_t level, double bound) const;
  double TokenBudget(int64_t g, double bound) const;
  // Returns the share in the shortest prefix that holds `share` of the row's attention, together
  // with the default set.
  double ScoreBudget(int64_t g, int32_t level, double share) const;

  // Tokens that a head attends to, and the error |o' - o| of that.
  struct Kept {
    int64_t tokens = 0;
    double error = 0;
  };
  // Returns for each of `shares`, which ascend and lie in (0, 1), the fewest tokens that hold that
  // share of the row's attention. With `beside` the head attends to the default set in any case;
  // what that holds counts, and the tokens are those of the cpu segment beside it.
  std::vector<Kept> KeepScores(int64_t g, const std::vector<double>& shares, bool beside) const;

  // What a group reads and misses if each head selects its best blocks and all heads attend to the
  // union of these.
  struct Outcome {
    int64_t tokens = 0;           // of the union
    std::vector<double> errors;   // |o' - o| by query head
    std::vector<double> outputs;  // o', [group][head_dim]
  };
  // `blocks` are numbers of blocks by query head, at one level.
  Outcome Select(int32_t level, const std::vector<int64_t>& blocks) const;

 private:
  // Weights and weighted values of units, which a head may select.
  struct Units {
    std::vector<double> weights;  // [units] sum of exp(score - largest)
    std::vector<double> values;   // [units][head_dim]
  };
  struct Head {
    AttentionPart sink, cpu, local, whole;
    double largest = 0;                // score
    std::vector<double> scores;        // [tokens]
    std::vector<double> unit_scores;   // of the cpu segment's blocks of level 0, by their digests
    Units units;                       // the cpu segment's blocks of level 0
    double resident = 0;               // weight of the default set
    std::vector<double> resident_sum;  // [head_dim] weighted values of the default set
  };

  const Head& Of(int64_t g) const { return heads_[static_cast<size_t>(g)]; }
  AttentionPart Part(const std::vector<double>& scores, int64_t begin, int64_t end) const;
  double Weight(const Head& head, int64_t token) const;
  // Returns the tokens [begin, end) from the one with the highest score to the one with the lowest.
  std::vector<int32_t> TokenOrder(const Head& head, int64_t begin, int64_t end) const;
  Units UnitsOfSegment(const Head& head) const;
  // Returns blocks of the level, in their order.
  Units Blocks(const Head& head, int32_t level, const std::vector<int32_t>& order) const;
  // Returns the number of units in the shortest prefix that keeps to the bound.
  size_t Prefix(const Head& head, const Units& units, double bound) const;

  const HeadCache cache_;
  const float* const q_;
  const int64_t group_;
  const kernels::FluxionSegments segments_;
  const bool has_spread_;
  std::vector<Head> heads_;
};

}  // namespace sluice
