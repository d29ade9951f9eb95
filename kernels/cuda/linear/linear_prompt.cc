// y = x W^T for the rows of prompts, by cuBLASLt.
//
// Bits: a row must come out the same whatever number of rows it is computed with, while the
// library is free to choose another algorithm for every shape. So only algorithms are taken that
// add up all of k in one block, in order (no split of k, no workspace), and that belong to one
// family of kernels for each (n, k): the family of the library's own first choice for
// kTypicalRows. Inside that family tiles may follow the number of rows: they change which block
// computes an element, not the order of its sum. The library does not promise this; tests/kernels
// and sluice-linear-bench check it.
//
// The products are bound by arithmetic: 2nk operations a row. Measured on an H100, Qwen3-8B's
// four products: 608-745 TFLOP/s with 512 rows, 671-774 with 2,048, 644-705 with 8,192. The best
// of eight algorithms tried for each shape is no more than 3 % better.
#include "kernels/cuda/linear/linear_prompt.h"

#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/linear/cublaslt.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int32_t kTypicalRows = 2048;  // a chunk of a prompt
constexpr int kCandidates = 32;         // algorithms asked for

cudaError_t FromStatus(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return cudaSuccess;
    case CUBLAS_STATUS_ALLOC_FAILED:
      return cudaErrorMemoryAllocation;
    case CUBLAS_STATUS_INVALID_VALUE:
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return cudaErrorInvalidValue;
    default:
      return cudaErrorUnknown;
  }
}

// One shape's descriptors, and its algorithms by the number of rows, rounded up to a power of
// two. In the library's column-major terms, y^T [n][rows] is the product of W, transposed, and
// x^T [k][rows].
struct ProductPlan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  std::optional<int32_t> family;  // CUBLASLT_ALGO_CONFIG_ID of every algorithm
  std::map<uint32_t, cublasLtMatmulAlgo_t> algorithms;
};

// One device's handle and plans. Plans live as long as the process: there is one for each shape
// of product in a model.
class Products {
 public:
  Products(const CublasLt& lt, cublasLtHandle_t handle) : lt_(lt), handle_(handle) {}

  cudaError_t Launch(const LinearParams& p, cudaStream_t stream) {
    std::lock_guard lock(mutex_);
    ProductPlan* plan = nullptr;
    const cublasLtMatmulAlgo_t* algorithm = nullptr;
    cublasStatus_t status = FindPlan(p, &plan);
    if (status == CUBLAS_STATUS_SUCCESS && p.bias != nullptr) {
      status = Set(plan->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    }
    if (status == CUBLAS_STATUS_SUCCESS) status = FindAlgorithm(*plan, p.rows, &algorithm);
    if (status == CUBLAS_STATUS_SUCCESS) status = SetRows(*plan, p.rows);
    if (status != CUBLAS_STATUS_SUCCESS) return FromStatus(status);
    const float one = 1, kept = p.accumulate ? 1 : 0;
    return FromStatus(lt_.matmul(handle_, plan->product, &one, p.w.data, plan->w, p.x, plan->x,
                                 &kept, p.y, plan->y, p.y, plan->y, algorithm, nullptr, 0, stream));
  }

 private:
  using Key = std::tuple<int32_t, int32_t, bool, bool>;  // n, k, bias, accumulate

  template <typename T>
  cublasStatus_t Set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, T value) {
    return lt_.desc_set(desc, attribute, &value, sizeof(value));
  }

  cublasStatus_t SetRows(const ProductPlan& plan, int32_t rows) {
    const uint64_t columns = static_cast<uint64_t>(rows);
    for (cublasLtMatrixLayout_t layout : {plan.x, plan.y}) {
      const cublasStatus_t status =
          lt_.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &columns, sizeof(columns));
      if (status != CUBLAS_STATUS_SUCCESS) return status;
    }
    return CUBLAS_STATUS_SUCCESS;
  }

  cublasStatus_t FindPlan(const LinearParams& p, ProductPlan** plan) {
    const Key key = {p.w.n, p.w.k, p.bias != nullptr, p.accumulate};
    auto it = plans_.find(key);
    if (it == plans_.end()) {
      ProductPlan made;
      const cublasStatus_t status = Describe(p, &made);
      if (status != CUBLAS_STATUS_SUCCESS) {
        Destroy(made);
        return status;
      }
      it = plans_.emplace(key, std::move(made)).first;
    }
    *plan = &it->second;
    return CUBLAS_STATUS_SUCCESS;
  }

  cublasStatus_t Describe(const LinearParams& p, ProductPlan* plan) {
    const uint64_t n = static_cast<uint64_t>(p.w.n), k = static_cast<uint64_t>(p.w.k);
    const int64_t n_stride = p.w.n, k_stride = p.w.k;
    cublasStatus_t status = lt_.desc_create(&plan->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const auto then = [&status](auto&& step) {
      if (status == CUBLAS_STATUS_SUCCESS) status = step();
    };
    then([&] { return Set(plan->product, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T); });
    if (p.bias != nullptr) {
      then([&] {
        return Set(plan->product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      });
    }
    then([&] { return lt_.layout_create(&plan->w, CUDA_R_16BF, k, n, k_stride); });
    then([&] { return lt_.layout_create(&plan->x, CUDA_R_16BF, k, kTypicalRows, k_stride); });
    then([&] { return lt_.layout_create(&plan->y, CUDA_R_32F, n, kTypicalRows, n_stride); });
    return status;
  }

  // Finds the algorithm for that many rows. It is of the plan's family, which the algorithm for
  // kTypicalRows sets.
  cublasStatus_t FindAlgorithm(ProductPlan& plan, int32_t rows,
                               const cublasLtMatmulAlgo_t** algorithm) {
    if (!plan.family.has_value()) {
      const cublasStatus_t status = Choose(plan, kTypicalRows);
      if (status != CUBLAS_STATUS_SUCCESS) return status;
    }
    const uint32_t rounded = std::bit_ceil(static_cast<uint32_t>(rows));
    if (!plan.algorithms.contains(rounded)) {
      // If the family has no algorithm for these rows, the one for kTypicalRows serves them too.
      if (Choose(plan, rounded) != CUBLAS_STATUS_SUCCESS) {
        plan.algorithms[rounded] = plan.algorithms[kTypicalRows];
      }
    }
    *algorithm = &plan.algorithms[rounded];
    return CUBLAS_STATUS_SUCCESS;
  }

  // Records the first candidate for `rows` that keeps a row's bits.
  cublasStatus_t Choose(ProductPlan& plan, uint32_t rows) {
    cublasLtMatmulPreference_t preference = nullptr;
    cublasStatus_t status = lt_.preference_create(&preference);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const uint64_t workspace_bytes = 0;
    const uint32_t no_reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
    lt_.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                       sizeof(workspace_bytes));
    lt_.preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &no_reduction,
                       sizeof(no_reduction));
    // Operands need not be aligned to more than 16 bytes.
    const uint32_t alignment = 16;
    for (auto operand :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      lt_.preference_set(preference, operand, &alignment, sizeof(alignment));
    }
    cublasLtMatmulHeuristicResult_t found[kCandidates];
    int count = 0;
    status = SetRows(plan, static_cast<int32_t>(rows));
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = lt_.heuristic(handle_, plan.product, plan.w, plan.x, plan.y, plan.y, preference,
                             kCandidates, found, &count);
    }
    lt_.preference_destroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    for (int i = 0; i < count; ++i) {
      const int32_t family = Config(found[i].algo, CUBLASLT_ALGO_CONFIG_ID);
      const bool in_one_piece = Config(found[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1;
      if (found[i].state != CUBLAS_STATUS_SUCCESS || !in_one_piece) continue;
      if (plan.family.value_or(family) != family) continue;
      plan.family = family;
      plan.algorithms[rows] = found[i].algo;
      return CUBLAS_STATUS_SUCCESS;
    }
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }

  int32_t Config(const cublasLtMatmulAlgo_t& algorithm,
                 cublasLtMatmulAlgoConfigAttributes_t attribute) const {
    int32_t value = 0;
    size_t written = 0;
    lt_.algo_get(&algorithm, attribute, &value, sizeof(value), &written);
    return value;
  }

  void Destroy(const ProductPlan& plan) {
    for (cublasLtMatrixLayout_t layout : {plan.w, plan.x, plan.y}) {
      if (layout != nullptr) lt_.layout_destroy(layout);
    }
    if (plan.product != nullptr) lt_.desc_destroy(plan.product);
  }

  const CublasLt& lt_;
  const cublasLtHandle_t handle_;
  std::mutex mutex_;
  std::map<Key, ProductPlan> plans_;  // guarded by mutex_
};

// Finds the current device's products, which are made at the first use.
cudaError_t FindProducts(Products** products) {
  static std::mutex mutex;
  static auto& all = *new std::map<int, std::unique_ptr<Products>>;
  const CublasLt* lt = LoadCublasLt();
  if (lt == nullptr) return cudaErrorSharedObjectInitFailed;
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  std::lock_guard lock(mutex);
  std::unique_ptr<Products>& mine = all[device];
  if (mine == nullptr) {
    cublasLtHandle_t handle = nullptr;
    const cublasStatus_t status = lt->create(&handle);
    if (status != CUBLAS_STATUS_SUCCESS) return FromStatus(status);
    mine = std::make_unique<Products>(*lt, handle);
  }
  *products = mine.get();
  return cudaSuccess;
}

}  // namespace

bool HasPromptProducts() { return LoadCublasLt() != nullptr; }

cudaError_t LaunchPromptProduct(const LinearParams& p, cudaStream_t stream) {
  // Allocations and loads of the library's first call must not become part of a capture of
  // `stream`.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  Products* products = nullptr;
  error = FindProducts(&products);
  if (error == cudaSuccess) error = products->Launch(p, stream);
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  return error != cudaSuccess ? error : restored;
}

}  // namespace sluice::kernels::cuda
