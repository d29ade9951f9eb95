// Which part of a query and of a key stands for the whole of it in partial scores: a projection
// [layers][kv_heads][head_dim][rank] of queries and keys after RoPE and q_norm.
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

// Plain columns, where no profile says better: those of the pairs that RoPE turns slowest, the last
// ones of either half of a head. How similar they are does not depend on how far apart two tokens
// are. REQUIRES: 0 < rank <= head_dim.
std::vector<float> PlainProjection(const ProjectionShape& shape);

// The rank of a projection of `elements` numbers, or of plain columns (`elements` 0): `rank` where
// it is set, else a quarter of head_dim. INVALID_ARGUMENT: no rank fits, or not the one that is
// set.
absl::StatusOr<int32_t> ProjectionRank(int64_t layers, int64_t kv_heads, int64_t head_dim,
                                       int64_t elements, int64_t rank);

}  // namespace sluice
