#include "kernels/cuda/tensor_map.h"

#include <cudaTypedefs.h>

namespace sluice::kernels::cuda {
namespace {

// The driver's encoder, found through the runtime: nothing links libcuda.
PFN_cuTensorMapEncodeTiled_v12000 Encoder() {
  static const auto encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &found);
    const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(usable ? entry : nullptr);
  }();
  return encoder;
}

}  // namespace

cudaError_t MakeTileMap(const void* data, int32_t rows, int32_t columns, int tile_rows,
                        CUtensorMap* map, DType type) {
  const auto encode = Encoder();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const auto element_bytes = static_cast<cuuint64_t>(SizeOf(type));
  const cuuint64_t row_bytes[1] = {sizes[0] * element_bytes};
  const cuuint32_t tile[2] = {static_cast<cuuint32_t>(128 / element_bytes),
                              static_cast<cuuint32_t>(tile_rows)};
  const CUtensorMapDataType data_type =
      type == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const cuuint32_t every_element[2] = {1, 1};
  const auto make = [&] {
    return encode(map, data_type, 2, const_cast<void*>(data), sizes, row_bytes, tile, every_element,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = make();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread's first call that is not the runtime's: the runtime binds the device's context.
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    result = make();
  }
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace sluice::kernels::cuda
