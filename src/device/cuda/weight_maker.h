// Makes matrices of weights in HBM, in the form in which the kernels read them, from parts in any
// form.
//
// If all parts are e4m3, the matrix stays e4m3 (kFp8Pairs where k is a multiple of 16, else
// kFp8Blocks), each scale repeated for its 4 blocks of 32 rows. Else the parts become one bf16
// matrix, every weight rounded once.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/device/cuda/cuda_stream.h"
#include "src/device/cuda/weight_uploader.h"
#include "src/device/device_health.h"
#include "src/device/kernel_set.h"

namespace sluice {

class WeightMaker {
 public:
  explicit WeightMaker(DeviceHealth* health);

  // Returns the bytes that Make allocates.
  static int64_t Bytes(absl::Span<const MatrixPart> parts, int32_t k);
  // INVALID_ARGUMENT: an e4m3 part does not begin at a multiple of 32 rows. RESOURCE_EXHAUSTED:
  // HBM. One caller at a time.
  absl::StatusOr<Weight> Make(absl::Span<const MatrixPart> parts, int32_t k);

 private:
  absl::Status MakeFp8(absl::Span<const MatrixPart> parts, int32_t k, Weight& weight);
  absl::Status MakeBFloat16(absl::Span<const MatrixPart> parts, int32_t k, Weight& weight);
  absl::Status Upload(void* target, const void* source, size_t bytes);

  DeviceHealth* const health_;
  CudaStream setup_;
  CudaEvent set_up_;
  std::unique_ptr<WeightUploader> uploader_;  // made for the first matrix that has bytes
};

}  // namespace sluice
