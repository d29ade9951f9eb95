// The operators that the layers of every family are made of, with the parameters filled in that are
// always the same in a model, and the memory of activations. Models use them on the thread that
// enqueues.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "src/device/device.h"
#include "src/device/kernel_set.h"
#include "src/model/weight_loader.h"

namespace sluice {

// Rows [begin, begin + count) of a step. The first `decode` of them are decode rows.
struct RowRange {
  int32_t begin;
  int32_t count;
  int32_t decode;
};

class LayerOperators {
 public:
  explicit LayerOperators(KernelSet* kernels) : kernels_(*kernels) {}

  KernelSet& kernels() const { return kernels_; }
  DType activation_type() const { return kernels_.activation_type(); }
  int64_t activation_bytes() const { return SizeOf(activation_type()); }
  // Returns row `row` of activations that feed a product, where a row has `dim` elements.
  void* Activation(const Buffer& buffer, int64_t row, int64_t dim) const {
    return buffer.as<uint8_t>() + row * dim * activation_bytes();
  }

  // Returns the parameters of out = RMSNorm of rows of x, which have `dim` elements each and lie
  // `stride` apart. Rows of `out` have the activation type.
  kernels::RmsNormParams NormOf(const float* x, int64_t stride, int dim, float epsilon,
                                const DeviceVector& weight, void* out, int32_t rows) const;
  void Norm(Stream& stream, const float* x, int64_t stride, int dim, float epsilon,
            const DeviceVector& weight, void* out, int32_t rows) const {
    kernels_.RmsNorm(stream, NormOf(x, stride, dim, epsilon, weight, out, rows));
  }
  // Enqueues y = x W^T + bias, or adds that to y.
  void Product(Stream& stream, const void* x, const Weight& weight, const DeviceVector& bias,
               float* y, int32_t rows, int32_t decode_rows, bool accumulate) const;
  // Enqueues out[r] = silu(gate) * up, in the activation type. gate_up is [rows][2 * dim].
  void SiluMul(Stream& stream, const float* gate_up, void* out, int32_t rows, int dim) const;

 private:
  KernelSet& kernels_;
};

// The weights of a dense FFN, down(silu(gate) * up).
struct DenseFfn {
  Weight gate_up, down;
  DeviceVector gate_up_bias, down_bias;
};

// Allocates activations and counts their bytes.
class Workspace {
 public:
  explicit Workspace(Device* device) : device_(device) {}
  absl::Status Allocate(Buffer* buffer, int64_t rows, int64_t row_bytes, const char* what);
  int64_t bytes() const { return bytes_; }

 private:
  Device* const device_;
  int64_t bytes_ = 0;
};

}  // namespace sluice
