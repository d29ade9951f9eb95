// Rows of a part of a matrix of weights, whatever form it comes in. Pure functions, for any thread.
#pragma once

#include <cstdint>

#include "src/device/kernel_set.h"

namespace sluice {

// Rows and columns of a block of e4m3 values that have one scale, as published checkpoints have
// them (weight_block_size; MatrixPart::scales).
inline constexpr int64_t kScaleBlock = 128;

// Whether the part's elements are bf16 values: then nothing is rounded by BFloat16Row.
bool IsBFloat16(const MatrixPart& part);

// Row `row` of the part, [k]. Of fp8 a value's product with its scale, rounded once.
void FloatRow(const MatrixPart& part, int32_t row, int32_t k, float* out);
// The same, rounded to nearest, ties to even.
void BFloat16Row(const MatrixPart& part, int32_t row, int32_t k, uint16_t* out);

}  // namespace sluice
