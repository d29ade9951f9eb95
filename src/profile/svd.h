// A singular value decomposition for tall matrices of a few hundred columns, in float64.
//
// Householder QR, then one-sided Jacobi on R (Hestenes 1958; Demmel and Veselic 1992): slow, and
// accurate to the last digits however the singular values are spread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace sluice {

// a = U diag(singular_values) v^T.
struct Svd {
  std::vector<double> singular_values;  // [columns], largest first; 0 past the rank
  std::vector<double> v;  // [columns][columns] orthogonal; column j belongs to value j
};

// The upper triangle R [columns][columns] of a = QR. `a`: [rows][columns], rows >= 0; with fewer
// rows than columns the rest of R is 0.
std::vector<double> TriangleOf(std::vector<double> a, int64_t rows, int64_t columns);

// U is not made: a v / singular_values is its columns.
Svd SvdOf(std::vector<double> a, int64_t rows, int64_t columns);

}  // namespace sluice
