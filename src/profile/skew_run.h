// Makes the projection of policy `recall` out of the queries of prompts, and judges it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "src/attention/policy_profile.h"
#include "src/profile/query_capture.h"

namespace sluice {

// How well partial scores order the keys of a layer: RankCorrelation, as the mean over KV heads,
// for queries that the skew was not made from.
struct SkewQuality {
  double plain = 0;   // With PlainProjection's columns.
  double skewed = 0;  // With this projection.
};

struct SkewResult {
  std::vector<float> projection;  // [layers][kv_heads][head_dim][rank]
  std::vector<SkewQuality> layers;
};

// Makes the projection out of the first seven eighths of the tokens, and judges it by the rest.
// `progress(done, all)` gets numbers of heads; it is called on any thread, one call at a time.
// REQUIRES: 0 < rank <= head_dim.
SkewResult MakeSkew(const CapturedQueries& captured, int64_t rank, int threads,
                    const std::function<void(int64_t, int64_t)>& progress);

}  // namespace sluice
