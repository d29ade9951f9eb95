// The projection of policy recall: [layers][kv_heads][head_dim][rank], applied to queries and keys
// after RoPE and q_norm. Its result stands for the whole vector in partial scores.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace sluice {

struct ProjectionShape {
  int64_t layers = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rank = 0;
  int64_t elements() const { return layers * kv_heads * head_dim * rank; }
};

// Returns plain columns, for use without a profile: those of the pairs that RoPE turns slowest,
// which are the last ones of either half of a head. Their similarity does not depend on how far
// apart two tokens are. REQUIRES: 0 < rank <= head_dim.
std::vector<float> PlainProjection(const ProjectionShape& shape);

// Returns the rank of a projection of `elements` numbers, or of plain columns (`elements` 0):
// `rank` if it is set, else half of head_dim: a quarter of the plain columns loses facts
// (README.md). INVALID_ARGUMENT: no rank fits, or the one that is set does not.
absl::StatusOr<int32_t> ProjectionRank(int64_t layers, int64_t kv_heads, int64_t head_dim,
                                       int64_t elements, int64_t rank);

}  // namespace sluice
