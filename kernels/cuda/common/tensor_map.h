// How the copy engine (TMA) is told of a matrix.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/params.h"

namespace sluice::kernels::cuda {

// A row-major matrix [rows][columns] of bf16, or of bytes, to be copied in tiles of tile_rows rows
// (<= 256) and 128 bytes of columns, each row of a tile swizzled over those. `pitch`: elements from
// a row to the next, columns if 0. cudaErrorInvalidValue: `data` or a row is not 16-byte aligned.
// Host work of under a microsecond.
cudaError_t MakeTileMap(const void* data, int32_t rows, int32_t columns, int tile_rows,
                        CUtensorMap* map, DType type = DType::kBFloat16, int64_t pitch = 0);

// `matrices` matrices of [rows][128] bytes, one after the other at matrix_bytes, to be copied in
// tiles of tile_rows rows (<= 256) of one matrix, swizzled likewise; rows past the last arrive as
// zeros. cudaErrorInvalidValue: `data` or matrix_bytes is no multiple of 16.
cudaError_t MakeByteTileMap(const void* data, int64_t matrices, int64_t matrix_bytes, int32_t rows,
                            int tile_rows, CUtensorMap* map);

}  // namespace sluice::kernels::cuda
