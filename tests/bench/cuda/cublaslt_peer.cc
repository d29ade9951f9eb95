#include "tests/bench/cuda/cublaslt_peer.h"

#include <cstdio>
#include <cstdlib>

#include "kernels/cuda/linear/cublaslt.h"

namespace sluice::bench {
namespace {

constexpr size_t kWorkspaceBytes = 32 << 20;
constexpr int kAlgorithms = 8;

void Check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "%s: cuBLAS status %d\n", what, static_cast<int>(status));
  std::exit(1);
}

struct Library {
  const kernels::cuda::CublasLt* lt = kernels::cuda::LoadCublasLt();
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;

  Library() {
    if (lt == nullptr) std::exit(1);
    Check(lt->create(&handle), "cublasLtCreate");
    if (cudaMalloc(&workspace, kWorkspaceBytes) != cudaSuccess) std::exit(1);
  }
};

const Library& TheLibrary() {
  static const Library library;
  return library;
}

}  // namespace

CublasLtProduct::CublasLtProduct(const kernels::LinearParams& p) {
  const Library& library = TheLibrary();
  const kernels::cuda::CublasLt& lt = *library.lt;
  const uint64_t n = static_cast<uint64_t>(p.w.n), k = static_cast<uint64_t>(p.w.k);
  const uint64_t rows = static_cast<uint64_t>(p.rows);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  Check(lt.desc_create(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  Check(lt.desc_set(product_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)),
        "cublasLtMatmulDescSetAttribute");
  Check(lt.layout_create(&w_, CUDA_R_16BF, k, n, p.w.k), "cublasLtMatrixLayoutCreate");
  Check(lt.layout_create(&x_, CUDA_R_16BF, k, rows, p.w.k), "cublasLtMatrixLayoutCreate");
  Check(lt.layout_create(&y_, CUDA_R_32F, n, rows, p.w.n), "cublasLtMatrixLayoutCreate");
  cublasLtMatmulPreference_t preference = nullptr;
  Check(lt.preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  Check(lt.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspaceBytes,
                          sizeof(kWorkspaceBytes)),
        "cublasLtMatmulPreferenceSetAttribute");
  found_.resize(kAlgorithms);
  int count = 0;
  Check(lt.heuristic(library.handle, product_, w_, x_, y_, y_, preference, kAlgorithms,
                     found_.data(), &count),
        "cublasLtMatmulAlgoGetHeuristic");
  found_.resize(static_cast<size_t>(count));
  lt.preference_destroy(preference);
}

void CublasLtProduct::Launch(const kernels::LinearParams& p, cudaStream_t stream) const {
  const Library& library = TheLibrary();
  const float one = 1, kept = p.accumulate ? 1 : 0;
  Check(library.lt->matmul(library.handle, product_, &one, p.w.data, w_, p.x, x_, &kept, p.y, y_,
                           p.y, y_, &found_[static_cast<size_t>(used_)].algo, library.workspace,
                           kWorkspaceBytes, stream),
        "cublasLtMatmul");
}

}  // namespace sluice::bench
