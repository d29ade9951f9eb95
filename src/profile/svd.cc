#include "src/profile/svd.h"

#include <Eigen/SVD>

#include "src/base/status_macros.h"

namespace sluice {

Svd SvdOf(absl::Span<const double> a, int64_t rows, int64_t columns) {
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  SLUICE_CHECK(static_cast<int64_t>(a.size()) == rows * columns);
  Svd svd;
  svd.singular_values.resize(static_cast<size_t>(columns));
  svd.v.resize(static_cast<size_t>(columns * columns));
  Eigen::Map<Matrix> v(svd.v.data(), columns, columns);
  v.setIdentity();
  if (rows == 0) return svd;
  const Eigen::JacobiSVD<Matrix> found(Eigen::Map<const Matrix>(a.data(), rows, columns),
                                       Eigen::ComputeFullV);
  const auto& values = found.singularValues();  // There are min(rows, columns) of them.
  Eigen::Map<Eigen::VectorXd>(svd.singular_values.data(), values.size()) = values;
  v = found.matrixV();
  return svd;
}

}  // namespace sluice
