// The operators as models and policies see them: each is enqueued on a stream and returns at once.
// Contracts: kernels/params.h. Pointers must stay valid until the stream has passed the operator.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/params.h"
#include "src/base/dtype.h"
#include "src/device/device.h"

namespace sluice {

// Rows of a matrix of weights as a checkpoint has them: bf16, row-major.
struct MatrixPart {
  const uint16_t* data;
  int32_t rows;
};

// Weights in the form in which the kernels read them.
struct Weight {
  Buffer storage;  // empty where `matrix` points to the checkpoint's own bytes
  kernels::WeightMatrix matrix{};
};

class KernelSet {
 public:
  virtual ~KernelSet() = default;
  virtual const std::string& name() const = 0;
  // Element type of what Linear reads.
  virtual DType activation_type() const = 0;
  // Puts matrices of `k` columns one below the other. The result may refer to a single part's data
  // where no copy is needed (then storage is empty, and the part must stay).
  virtual absl::StatusOr<Weight> Prepare(absl::Span<const MatrixPart> parts, int32_t k) = 0;
  // Bytes of scratch that Sample needs for a vocabulary.
  virtual int64_t SampleScratchBytes(int32_t vocab) const = 0;

  virtual void Embedding(Stream& stream, const kernels::EmbeddingParams& params) = 0;
  virtual void RmsNorm(Stream& stream, const kernels::RmsNormParams& params) = 0;
  virtual void Linear(Stream& stream, const kernels::LinearParams& params) = 0;
  virtual void RopeTable(Stream& stream, const kernels::RopeTableParams& params) = 0;
  virtual void RopeAppend(Stream& stream, const kernels::RopeAppendParams& params) = 0;
  virtual void Attention(Stream& stream, const kernels::AttentionParams& params) = 0;
  virtual void Merge(Stream& stream, const kernels::MergeParams& params) = 0;
  virtual void SiluMul(Stream& stream, const kernels::SiluMulParams& params) = 0;
  virtual void Sample(Stream& stream, const kernels::SampleParams& params) = 0;
};

}  // namespace sluice
