#include "src/model/layer_operators.h"
#include "src/device/allocation.h"

namespace sluice {

kernels::RmsNormParams LayerOperators::NormOf(const float* x, int64_t stride, int dim,
                                              float epsilon, const DeviceVector& weight, void* out,
                                              int32_t rows) const {
  kernels::RmsNormParams norm{};
  norm.x = x;
  norm.weight = weight.data();
  norm.out = out;
  norm.x_stride = stride;
  norm.rows = rows;
  norm.dim = dim;
  norm.epsilon = epsilon;
  norm.out_type = activation_type();
  return norm;
}

void LayerOperators::Product(Stream& stream, const void* x, const Weight& weight,
                             const DeviceVector& bias, float* y, int32_t rows, int32_t decode_rows,
                             bool accumulate) const {
  kernels::LinearParams linear{};
  linear.x = x;
  linear.w = weight.matrix;
  linear.bias = bias.data();
  linear.y = y;
  linear.rows = rows;
  linear.decode_rows = decode_rows;
  linear.x_type = activation_type();
  linear.accumulate = accumulate;
  kernels_.Linear(stream, linear);
}

void LayerOperators::SiluMul(Stream& stream, const float* gate_up, void* out, int32_t rows,
                             int dim) const {
  kernels::SiluMulParams silu{};
  silu.gate_up = gate_up;
  silu.out = out;
  silu.rows = rows;
  silu.dim = dim;
  silu.out_type = activation_type();
  kernels_.SiluMul(stream, silu);
}

absl::Status Workspace::Allocate(Buffer* buffer, int64_t rows, int64_t row_bytes,
                                 const char* what) {
  SLUICE_RETURN_IF_ERROR(
      BufferAllocator(device_, what).Array(MemoryKind::kDevice, rows, row_bytes, buffer));
  bytes_ += rows * row_bytes;
  return absl::OkStatus();
}

}  // namespace sluice
