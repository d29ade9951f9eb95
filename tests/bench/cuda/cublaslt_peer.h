// cuBLASLt as a peer of our products: what it does when it may choose freely.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/params.h"

namespace sluice::bench {

// One shape of product, with the library's algorithms for it, the one it thinks best first.
class CublasLtProduct {
 public:
  // With 32 MiB of workspace, which all products share. Ends the program without the library.
  explicit CublasLtProduct(const kernels::LinearParams& params);

  int algorithms() const { return static_cast<int>(found_.size()); }
  // Which of them Launch uses.
  void Use(int algorithm) { used_ = algorithm; }
  // The product with the operands' addresses of `params`, of the same shape.
  void Launch(const kernels::LinearParams& params, cudaStream_t stream) const;

 private:
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr, x_ = nullptr, y_ = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> found_;
  int used_ = 0;
};

}  // namespace sluice::bench
