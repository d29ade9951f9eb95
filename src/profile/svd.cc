#include "src/profile/svd.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Columns of a square matrix, one after the other: what Jacobi turns.
class Columns {
 public:
  Columns(const std::vector<double>& rows_first, int64_t n) : n_(n), values_(rows_first.size()) {
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t c = 0; c < n; ++c) column(c)[r] = rows_first[static_cast<size_t>(r * n + c)];
    }
  }
  double* column(int64_t c) { return &values_[static_cast<size_t>(c * n_)]; }
  double Dot(int64_t a, int64_t b) {
    return std::inner_product(column(a), column(a) + n_, column(b), 0.0);
  }
  // [column a, column b] times the rotation by (c, s).
  void Rotate(int64_t a, int64_t b, double c, double s) {
    double *x = column(a), *y = column(b);
    for (int64_t i = 0; i < n_; ++i) {
      const double old = x[i];
      x[i] = c * old - s * y[i];
      y[i] = s * old + c * y[i];
    }
  }

 private:
  const int64_t n_;
  std::vector<double> values_;
};

std::vector<double> Identity(int64_t n) {
  std::vector<double> values(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i) values[static_cast<size_t>(i * n + i)] = 1;
  return values;
}

// Makes columns a and b orthogonal, in `w` and `v` alike; whether they were not.
bool MakeOrthogonal(Columns& w, Columns& v, int64_t a, int64_t b) {
  constexpr double kTolerance = 1e-15;
  const double aa = w.Dot(a, a), bb = w.Dot(b, b), ab = w.Dot(a, b);
  if (std::abs(ab) <= kTolerance * std::sqrt(aa) * std::sqrt(bb)) return false;
  const double zeta = (bb - aa) / (2 * ab);
  const double t = (zeta < 0 ? -1 : 1) / (std::abs(zeta) + std::hypot(1.0, zeta));
  const double c = 1 / std::hypot(1.0, t);
  w.Rotate(a, b, c, c * t);
  v.Rotate(a, b, c, c * t);
  return true;
}

}  // namespace

std::vector<double> TriangleOf(std::vector<double> a, int64_t rows, int64_t columns) {
  SLUICE_CHECK(static_cast<int64_t>(a.size()) == rows * columns);
  const auto at = [&](int64_t r, int64_t c) -> double& {
    return a[static_cast<size_t>(r * columns + c)];
  };
  std::vector<double> sums(static_cast<size_t>(columns));
  for (int64_t k = 0; k < std::min(rows, columns); ++k) {
    double norm = 0;
    for (int64_t r = k; r < rows; ++r) norm = std::hypot(norm, at(r, k));
    if (norm == 0) continue;
    // The reflection that takes column k to (alpha, 0, ..., 0) below its diagonal.
    const double alpha = at(k, k) > 0 ? -norm : norm;
    at(k, k) -= alpha;
    const double scale = -alpha * at(k, k);  // half of the reflector's squared length
    std::fill(sums.begin(), sums.end(), 0);
    for (int64_t r = k; r < rows; ++r) {
      for (int64_t c = k + 1; c < columns; ++c) sums[static_cast<size_t>(c)] += at(r, k) * at(r, c);
    }
    for (int64_t r = k; r < rows; ++r) {
      const double factor = at(r, k) / scale;
      for (int64_t c = k + 1; c < columns; ++c) at(r, c) -= factor * sums[static_cast<size_t>(c)];
    }
    at(k, k) = alpha;
    for (int64_t r = k + 1; r < rows; ++r) at(r, k) = 0;
  }
  a.resize(static_cast<size_t>(columns * columns));  // with few rows: zeros below
  return a;
}

Svd SvdOf(std::vector<double> a, int64_t rows, int64_t columns) {
  constexpr int kMaxSweeps = 60;  // about ten are enough; a NaN never is
  Columns w(TriangleOf(std::move(a), rows, columns), columns), v(Identity(columns), columns);
  bool turned = true;
  for (int sweep = 0; sweep < kMaxSweeps && turned; ++sweep) {
    turned = false;
    for (int64_t i = 0; i < columns; ++i) {
      for (int64_t j = i + 1; j < columns; ++j) turned = MakeOrthogonal(w, v, i, j) || turned;
    }
  }
  std::vector<double> values;
  for (int64_t c = 0; c < columns; ++c) values.push_back(std::sqrt(w.Dot(c, c)));
  std::vector<int64_t> order(static_cast<size_t>(columns));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) {
    return values[static_cast<size_t>(x)] > values[static_cast<size_t>(y)];
  });
  Svd svd;
  svd.v.resize(static_cast<size_t>(columns * columns));
  for (int64_t j = 0; j < columns; ++j) {
    const int64_t from = order[static_cast<size_t>(j)];
    svd.singular_values.push_back(values[static_cast<size_t>(from)]);
    for (int64_t r = 0; r < columns; ++r) {
      svd.v[static_cast<size_t>(r * columns + j)] = v.column(from)[r];
    }
  }
  return svd;
}

}  // namespace sluice
