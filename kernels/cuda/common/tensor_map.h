// Descriptors of matrices for the copy engine (TMA).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/params.h"

namespace sluice::kernels::cuda {

// Describes a row-major matrix [rows][columns] of bf16, or of bytes, that is copied in tiles of
// tile_rows rows (<= 256) and 128 bytes of columns. Each row of a tile is swizzled over those 128
// bytes. `pitch` is the number of elements from a row to the next; 0 means `columns`. Returns
// cudaErrorInvalidValue if `data` or a row is not 16-byte aligned. The call is host work of under
// a microsecond.
cudaError_t MakeTileMap(const void* data, int32_t rows, int32_t columns, int tile_rows,
                        CUtensorMap* map, DType type = DType::kBFloat16, int64_t pitch = 0);

// Describes `matrices` matrices of [rows][128] bytes, one after the other, matrix_bytes apart,
// that are copied in tiles of tile_rows rows (<= 256) of one matrix, swizzled as above. Rows past
// the last arrive as zeros. Returns cudaErrorInvalidValue if `data` or matrix_bytes is not a
// multiple of 16.
cudaError_t MakeByteTileMap(const void* data, int64_t matrices, int64_t matrix_bytes, int32_t rows,
                            int tile_rows, CUtensorMap* map);

}  // namespace sluice::kernels::cuda
