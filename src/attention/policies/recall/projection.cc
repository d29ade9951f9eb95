#include "src/attention/policies/recall/projection.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {

std::vector<float> PlainProjection(const ProjectionShape& shape) {
  SLUICE_CHECK(0 < shape.rank && shape.rank <= shape.head_dim);
  std::vector<float> projection(static_cast<size_t>(shape.elements()));
  const int64_t half = shape.head_dim / 2;
  // Takes the first elements of the slowest pairs, then their second ones.
  const int64_t firsts = std::min((shape.rank + 1) / 2, half);
  float* head = projection.data();
  for (int64_t i = 0; i < shape.layers * shape.kv_heads; ++i) {
    for (int64_t r = 0; r < shape.rank; ++r) {
      const int64_t column =
          r < firsts ? half - firsts + r : shape.head_dim - (shape.rank - firsts) + (r - firsts);
      head[column * shape.rank + r] = 1;
    }
    head += shape.head_dim * shape.rank;
  }
  return projection;
}

absl::StatusOr<int32_t> ProjectionRank(int64_t layers, int64_t kv_heads, int64_t head_dim,
                                       int64_t elements, int64_t rank) {
  if (rank < 0 || rank > head_dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "recall rank: expected 1 to the model's head_dim of ", head_dim, ", found ", rank));
  }
  if (elements == 0) {
    return static_cast<int32_t>(rank > 0 ? rank : std::max<int64_t>(head_dim / 2, 1));
  }
  const int64_t columns = layers * kv_heads * head_dim;  // numbers in a projection of rank 1
  if (elements % columns != 0 || elements / columns > head_dim) {
    return absl::InvalidArgumentError(
        absl::StrCat("recall projection: expected [", layers, "][", kv_heads, "][", head_dim,
                     "][rank] numbers for this model, found ", elements,
                     " in all: make it with sluice-profile --skew for the model that is served"));
  }
  if (rank > 0 && rank != elements / columns) {
    return absl::InvalidArgumentError(absl::StrCat("recall rank: the projection has ",
                                                   elements / columns, " columns a head, found ",
                                                   rank, ": leave the rank out, or profile again"));
  }
  return static_cast<int32_t>(elements / columns);
}

}  // namespace sluice
