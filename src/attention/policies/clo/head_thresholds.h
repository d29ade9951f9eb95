// The rules by which CLO treats each head by what a profile says of it: from which similarity on it
// keeps its selection (equations 7 to 9), and which heads lie wholly in HBM (equations 11 to 13).
#pragma once

#include <cstdint>
#include <vector>

namespace sluice {

// Returns the threshold of a KV head with gate `gate` from 0 (it attends to the first and the
// newest tokens alone) to 1 (it retrieves): the cosine of the angle lambda theta + (1 - lambda) pi,
// where theta is the angle of cosine `eta`, and lambda = gate^3. Gate 1 gives eta, gate 0 gives -1,
// with which a head never selects again.
float ThresholdOf(double gate, double eta);

// Returns how much a head lacks to keep its selection, D = threshold - (similarity - 0.1), where
// `similarity` is the mean similarity of its queries in neighbouring steps.
float DifficultyOf(double threshold, double similarity);

// HeadRules has what follows from a profile's gates and similarities, [layers][kv_heads].
struct HeadRules {
  std::vector<float> thresholds, difficulty;
};
// A KV head has the largest gate of its query heads. `gates` is [layers][heads], `similarities` is
// [layers][kv_heads].
HeadRules RulesOf(const std::vector<float>& gates, const std::vector<float>& similarities,
                  double eta);

// Returns how many refills of a head a layer hides (equation 12): those that the link carries, at
// `link_rate` bytes a second, in the `layer_seconds` that the layer computes. A refill has
// `refill_bytes`: what the head selects, for every row of the batch.
double PrefetchableHeads(double layer_seconds, double link_rate, double refill_bytes);

// HeadLoads says how hard heads are to serve, [layers][kv_heads]. A list may be empty: then all
// heads are alike.
struct HeadLoads {
  std::vector<float> difficulty;
  std::vector<float> misses;  // the share of a head's lookups that miss
  // [layers] The mean cosine of a layer's queries with those that were predicted.
  std::vector<float> predicted = {};
};

// Returns whether a layer's queries are predicted so badly, with a cosine below 0.9, that what they
// select ahead of time is of little use.
bool IsUnpredictable(const std::vector<float>& predicted, int64_t layer);

// Returns heads (layer * kv_heads + head) in the order in which they become persistent. Layer 0
// comes first, because nothing comes before it that could hide a fetch. The layers that cannot be
// predicted follow, the worst first: their heads select by their own queries. Then one head follows
// another: the layer whose other heads miss most together, lower ones first among equals, gives its
// most difficult one. So no layer waits much longer for the link than others. It ends where heads
// of every layer together miss at most `prefetchable` times a row, because their fetches are hidden
// (equation 13, with what heads miss in place of the number of hard ones), or, if that is 0, when
// all heads are there.
std::vector<int64_t> PersistenceOrder(int64_t layers, int64_t kv_heads, const HeadLoads& loads,
                                      double prefetchable);

// Returns which heads are persistent, [layers][kv_heads]: the first ones of that order, up to
// `share` of all heads. Empty: none is. REQUIRES: 0 <= share <= 1.
std::vector<uint8_t> PersistentHeads(int64_t layers, int64_t kv_heads, const HeadLoads& loads,
                                     double share, double prefetchable);

}  // namespace sluice
