// cuBLASLt as a peer of our products, when it may choose its algorithms freely.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/params.h"

namespace sluice::bench {

// One shape of product with the library's algorithms for it, the one it thinks best first.
class CublasLtProduct {
 public:
  // The products share 32 MiB of workspace. The constructor ends the program if the library is
  // missing.
  explicit CublasLtProduct(const kernels::LinearParams& params);

  int algorithms() const { return static_cast<int>(found_.size()); }
  // Selects the algorithm that Launch uses.
  void Use(int algorithm) { used_ = algorithm; }
  // Launches the product with the operands' addresses in `params`, which must have the same
  // shape.
  void Launch(const kernels::LinearParams& params, cudaStream_t stream) const;

 private:
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr, x_ = nullptr, y_ = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> found_;
  int used_ = 0;
};

}  // namespace sluice::bench
