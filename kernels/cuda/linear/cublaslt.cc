#include "kernels/cuda/linear/cublaslt.h"

#include <dlfcn.h>

#include <cstdio>

namespace sluice::kernels::cuda {
namespace {

// The soname of the headers' version comes first. The interface used is the same in all of them.
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

bool Load(CublasLt* lt) {
  void* library = nullptr;
  for (const char* name : kNames) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) {
    const char* why = dlerror();
    std::fprintf(stderr,
                 "prompt rows on a GPU need libcublasLt.so.13 (of the CUDA Toolkit, or of the "
                 "package nvidia-cublas, on LD_LIBRARY_PATH): %s\n",
                 why != nullptr ? why : "not found");
    return false;
  }
  const bool complete =
      Find(library, "cublasLtCreate", &lt->create) &&
      Find(library, "cublasLtMatmulDescCreate", &lt->desc_create) &&
      Find(library, "cublasLtMatmulDescDestroy", &lt->desc_destroy) &&
      Find(library, "cublasLtMatmulDescSetAttribute", &lt->desc_set) &&
      Find(library, "cublasLtMatrixLayoutCreate", &lt->layout_create) &&
      Find(library, "cublasLtMatrixLayoutDestroy", &lt->layout_destroy) &&
      Find(library, "cublasLtMatrixLayoutSetAttribute", &lt->layout_set) &&
      Find(library, "cublasLtMatmulPreferenceCreate", &lt->preference_create) &&
      Find(library, "cublasLtMatmulPreferenceDestroy", &lt->preference_destroy) &&
      Find(library, "cublasLtMatmulPreferenceSetAttribute", &lt->preference_set) &&
      Find(library, "cublasLtMatmulAlgoGetHeuristic", &lt->heuristic) &&
      Find(library, "cublasLtMatmulAlgoConfigGetAttribute", &lt->algo_get) &&
      Find(library, "cublasLtMatmul", &lt->matmul);
  if (!complete) std::fprintf(stderr, "libcublasLt lacks a function: %s\n", dlerror());
  return complete;
}

}  // namespace

const CublasLt* LoadCublasLt() {
  static CublasLt lt{};
  static const bool loaded = Load(&lt);
  return loaded ? &lt : nullptr;
}

}  // namespace sluice::kernels::cuda
