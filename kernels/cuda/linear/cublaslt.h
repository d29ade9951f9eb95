// cuBLASLt, loaded at run time, so that a program starts without it where no GPU is used, and can
// report that it is missing where one is.
#pragma once

#include <cublasLt.h>

namespace sluice::kernels::cuda {

// The functions that are used, under the library's own names.
struct CublasLt {
  decltype(&::cublasLtCreate) create;
  decltype(&::cublasLtMatmulDescCreate) desc_create;
  decltype(&::cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&::cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&::cublasLtMatrixLayoutCreate) layout_create;
  decltype(&::cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&::cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&::cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&::cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&::cublasLtMatmulAlgoConfigGetAttribute) algo_get;
  decltype(&::cublasLtMatmul) matmul;
};

// Returns null if the library cannot be loaded. The first call that fails says so on stderr, in
// one line.
const CublasLt* LoadCublasLt();

}  // namespace sluice::kernels::cuda
