// Access to the rows of a part of a matrix of weights, in whatever form the part comes. The
// functions are pure; any thread may call them.
#pragma once

#include <cstdint>

#include "src/device/kernel_set.h"

namespace sluice {

// Rows and columns of a block of e4m3 values that share a scale, in published checkpoints
// (weight_block_size; MatrixPart::scales).
inline constexpr int64_t kScaleBlock = 128;

// Returns whether the part's elements are bf16 values: then BFloat16Row rounds nothing.
bool IsBFloat16(const MatrixPart& part);

// Writes row `row` of the part, [k]. An fp8 element is its value times its scale, rounded once.
void FloatRow(const MatrixPart& part, int32_t row, int32_t k, float* out);
// Writes the same row, rounded to nearest, ties to even.
void BFloat16Row(const MatrixPart& part, int32_t row, int32_t k, uint16_t* out);

}  // namespace sluice
