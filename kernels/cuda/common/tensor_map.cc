#include "kernels/cuda/common/tensor_map.h"

#include <cudaTypedefs.h>

namespace sluice::kernels::cuda {
namespace {

// Returns the driver's encoder, found through the runtime so that nothing links libcuda.
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

// Calls `make`, which encodes. In a thread that has not called the runtime before, it calls
// `make` once more after the runtime has bound the device's context.
template <typename Make>
cudaError_t InContext(Make make) {
  CUresult result = make();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    result = make();
  }
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t MakeTileMap(const void* data, int32_t rows, int32_t columns, int tile_rows,
                        CUtensorMap* map, DType type, int64_t pitch) {
  const auto encode = Encoder();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const auto element_bytes = static_cast<cuuint64_t>(SizeOf(type));
  const cuuint64_t row_bytes[1] = {(pitch > 0 ? static_cast<cuuint64_t>(pitch) : sizes[0]) *
                                   element_bytes};
  const cuuint32_t tile[2] = {static_cast<cuuint32_t>(128 / element_bytes),
                              static_cast<cuuint32_t>(tile_rows)};
  const CUtensorMapDataType data_type =
      type == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const cuuint32_t every_element[2] = {1, 1};
  return InContext([&] {
    return encode(map, data_type, 2, const_cast<void*>(data), sizes, row_bytes, tile, every_element,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}

cudaError_t MakeByteTileMap(const void* data, int64_t matrices, int64_t matrix_bytes, int32_t rows,
                            int tile_rows, CUtensorMap* map) {
  const auto encode = Encoder();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const cuuint64_t sizes[3] = {128, static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[2] = {128, static_cast<cuuint64_t>(matrix_bytes)};
  const cuuint32_t tile[3] = {128, static_cast<cuuint32_t>(tile_rows), 1};
  const cuuint32_t every_element[3] = {1, 1, 1};
  return InContext([&] {
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), sizes, strides,
                  tile, every_element, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}

}  // namespace sluice::kernels::cuda
