// Singular value decomposition in float64, for tall matrices of a few hundred columns.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace sluice {

// a = U diag(singular_values) v^T. U is not computed: its columns are those of
// a v / singular_values.
struct Svd {
  std::vector<double> singular_values;  // [columns], largest first; 0 past the rank.
  std::vector<double> v;  // [columns][columns], orthogonal; column j belongs to value j.
};

// Returns the decomposition of `a`: [rows][columns], rows >= 0. Eigen's two-sided Jacobi on the
// triangle of a pivoted QR is slow, and accurate to the last digits however the singular values are
// spread.
Svd SvdOf(absl::Span<const double> a, int64_t rows, int64_t columns);

}  // namespace sluice
