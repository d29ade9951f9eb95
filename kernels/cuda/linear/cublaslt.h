// cuBLASLt, loaded at run time: a program starts without it where no GPU is used, and can say what
// is missing where one is.
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

// Null where the library cannot be loaded; the first such call says so on stderr, in one line.
const CublasLt* LoadCublasLt();

}  // namespace sluice::kernels::cuda
