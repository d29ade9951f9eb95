// Products of groups of rows, each with its own matrix of a stack. Linear with fp8 weights (one
// group), HeadLinear (a group is a head, with all rows in each) and ExpertLinear (a group is an
// expert, with the rows that chose it) share this.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace sluice::kernels::cuda {

// y[row] = x[row] W_g^T (+ bias) (+ y) for each group g and each of its rows. W_g is rows [g * n,
// (g + 1) * n) of w, kRowMajor, kFp8Blocks or kFp8Pairs (kernels/fp8_pairs.h). Strides are in
// elements.
struct GroupedProduct {
  const uint16_t* x;  // bf16; row r of group g starts at r * x_stride + g * x_group_stride
  int64_t x_stride;
  int64_t x_group_stride;
  WeightMatrix w;
  int32_t groups;
  int32_t n;          // features of a group
  const float* bias;  // [n] or null
  void* y;            // row r of group g starts at r * y_stride + g * y_group_stride
  int64_t y_stride;
  int64_t y_group_stride;
  DType y_type;     // float32, or bf16
  bool accumulate;  // float32 only
  int32_t rows;     // rows of every group
  // If not null, group g has the rows pairs[begins[g]] .. pairs[begins[g + 1] - 1], `rows` in all
  // groups together, and row r of x is that of r / pairs_per_row.
  const int32_t* pairs;
  const int32_t* begins;
  int32_t pairs_per_row;
  // Slices of k, added in order: a power of two up to 8, or 0 for as many as suit w.
  int32_t slices = 0;
};

// Launches the product. The order of additions of a row follows from the shape of w and `slices`
// alone, so its bits do too. Returns cudaErrorInvalidValue for a layout or a type that is not
// named above.
cudaError_t LaunchGroupedProduct(const GroupedProduct& product, cudaStream_t stream);

// The kernels behind it. The tile kernels run on tensor cores. REQUIRES: TakesTiles(), which
// is false for kFp8Blocks. The plain kernel takes any shape and alignment, with a warp for each
// element of y.
bool TakesTiles(const GroupedProduct& product);
cudaError_t LaunchTiledProductFp8(const GroupedProduct& product, cudaStream_t stream);
cudaError_t LaunchTiledProductBf16(const GroupedProduct& product, cudaStream_t stream);
cudaError_t LaunchPlainProduct(const GroupedProduct& product, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
