// The projection for policy `recall`, from the queries of prompts, and what it is worth.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "src/attention/policy_profile.h"
#include "src/profile/query_capture.h"

namespace sluice {

// How well partial scores order the keys of a layer: RankCorrelation, the mean over KV heads, of
// queries that the skew was not made from.
struct SkewQuality {
  double plain = 0;   // PlainProjection's columns
  double skewed = 0;  // this projection's
};

struct SkewResult {
  std::vector<float> projection;  // [layers][kv_heads][head_dim][rank]
  std::vector<SkewQuality> layers;
};

// From the first seven eighths of the tokens; judged by the rest. `progress(done, all)` is told of
// heads, from any thread, one at a time. REQUIRES: 0 < rank <= head_dim.
SkewResult MakeSkew(const CapturedQueries& captured, int64_t rank, int threads,
                    const std::function<void(int64_t, int64_t)>& progress);

}  // namespace sluice
