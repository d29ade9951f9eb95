// Where a model's weights come from: a checkpoint, or the dummy formula. Used while a model is
// loaded, from one thread; the views it gives may be read from any thread while the source lives.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/weight_formula.h"
#include "src/model/model_config.h"

namespace sluice {

// A bf16 matrix [rows][cols], row-major: borrowed from a mapped file, or converted and owned by the
// view. A borrowed one is valid while its WeightSource lives.
class MatrixView {
 public:
  static MatrixView Borrowed(const uint16_t* data, int64_t rows, int64_t cols) {
    return MatrixView(nullptr, data, rows, cols);
  }
  static MatrixView Owned(std::unique_ptr<uint16_t[]> data, int64_t rows, int64_t cols) {
    const uint16_t* p = data.get();
    return MatrixView(std::move(data), p, rows, cols);
  }
  MatrixView(MatrixView&&) = default;
  MatrixView& operator=(MatrixView&&) = default;

  const uint16_t* data() const { return data_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  bool owned() const { return owned_ != nullptr; }
  // Memory that the view itself holds: 0 where it is borrowed.
  int64_t owned_bytes() const { return owned() ? rows_ * cols_ * 2 : 0; }

 private:
  MatrixView(std::unique_ptr<uint16_t[]> owned, const uint16_t* data, int64_t rows, int64_t cols)
      : owned_(std::move(owned)), data_(data), rows_(rows), cols_(cols) {}

  std::unique_ptr<uint16_t[]> owned_;
  const uint16_t* data_;
  int64_t rows_;
  int64_t cols_;
};

// Errors of Matrix, Vector and ReadBFloat16: NOT_FOUND (no such tensor), INVALID_ARGUMENT (another
// shape, or an element type other than BF16, F16 and F32), DATA_LOSS (the file could not be read).
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // What makes the matrix, where it comes from a formula: then nothing needs to ask for its bytes.
  virtual std::optional<kernels::WeightFormula> Formula(const std::string& name) const = 0;
  // The matrix as bf16: mapped where it is stored so, converted once (nearest, ties to even) where
  // it is F16 or F32.
  virtual absl::StatusOr<MatrixView> Matrix(const std::string& name, int64_t rows,
                                            int64_t cols) = 0;
  // A norm weight or a bias as float32; nothing is rounded.
  virtual absl::StatusOr<std::vector<float>> Vector(const std::string& name, int64_t n) = 0;
  // Elements [first, first + out.size()) of the flattened tensor as bf16, cheap whatever the
  // tensor's size. REQUIRES: the range lies inside `shape`.
  virtual absl::Status ReadBFloat16(const std::string& name, absl::Span<const int64_t> shape,
                                    int64_t first, absl::Span<uint16_t> out) = 0;
  // Gives up a view whose elements were copied elsewhere: mapped pages leave this process, owned
  // storage is freed.
  virtual void Release(MatrixView view) = 0;
  // INVALID_ARGUMENT naming tensors that are there and that the config does not imply, but for
  // those of IsIgnorableTensor.
  virtual absl::Status CheckNoLeftovers() = 0;
};

// The safetensors of `dir`. Fails as Checkpoint::Open does, and names every tensor (up to eight)
// that the config implies and the checkpoint lacks, or has in another shape or type.
absl::StatusOr<std::unique_ptr<WeightSource>> OpenCheckpoint(const std::string& dir,
                                                             const ModelConfig& config);

// Weights from a formula (dummy_weights.h), made as they are asked for.
std::unique_ptr<WeightSource> DummyWeights(const ModelConfig& config);

}  // namespace sluice
