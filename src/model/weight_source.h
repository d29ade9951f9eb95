// WeightSource is where a model's weights come from: a checkpoint, or the dummy formula. It is used
// while a model is loaded, from one thread. Its views may be read from any thread while it lives.
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
#include "src/model/tensor_list.h"

namespace sluice {

// A matrix [rows][cols], row-major, of bf16, or of e4m3 with a scale for each block of 128 x 128.
// It is borrowed from a mapped file, or owned by the view. A borrowed one is valid while its
// WeightSource lives.
class MatrixView {
 public:
  static MatrixView Borrowed(const uint16_t* data, int64_t rows, int64_t cols) {
    return MatrixView(data, nullptr, rows, cols);
  }
  static MatrixView Owned(std::unique_ptr<uint16_t[]> data, int64_t rows, int64_t cols) {
    MatrixView view(data.get(), nullptr, rows, cols);
    view.owned_ = std::move(data);
    return view;
  }
  // `scales` is [ceil(rows / 128)][ceil(cols / 128)].
  static MatrixView BorrowedFp8(const uint8_t* data, std::vector<float> scales, int64_t rows,
                                int64_t cols) {
    MatrixView view(nullptr, data, rows, cols);
    view.scales_ = std::move(scales);
    return view;
  }
  static MatrixView OwnedFp8(std::unique_ptr<uint8_t[]> data, std::vector<float> scales,
                             int64_t rows, int64_t cols) {
    MatrixView view = BorrowedFp8(data.get(), std::move(scales), rows, cols);
    view.owned_fp8_ = std::move(data);
    return view;
  }
  MatrixView(MatrixView&&) = default;
  MatrixView& operator=(MatrixView&&) = default;

  const uint16_t* data() const { return data_; }  // bf16; null if it is e4m3
  const uint8_t* fp8() const { return fp8_; }     // e4m3; null if it is bf16
  const std::vector<float>& scales() const { return scales_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  bool owned() const { return owned_ != nullptr || owned_fp8_ != nullptr; }
  // Returns the memory of elements that the view itself holds, which is 0 if it is borrowed.
  int64_t owned_bytes() const { return owned() ? rows_ * cols_ * (data_ != nullptr ? 2 : 1) : 0; }
  // Sets out[cols] to a row's elements as float32. Those of e4m3 are multiplied by their scale and
  // rounded once.
  void FloatRow(int64_t row, float* out) const;

 private:
  MatrixView(const uint16_t* data, const uint8_t* fp8, int64_t rows, int64_t cols)
      : data_(data), fp8_(fp8), rows_(rows), cols_(cols) {}

  std::unique_ptr<uint16_t[]> owned_;
  std::unique_ptr<uint8_t[]> owned_fp8_;
  const uint16_t* data_;
  const uint8_t* fp8_;
  std::vector<float> scales_;
  int64_t rows_;
  int64_t cols_;
};

// Rows [first_row, first_row + rows) and columns [first_col, first_col + cols) of a matrix.
struct MatrixRange {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_col = 0;
  int64_t cols = 0;
};

// The errors of Matrix, Slice, Vector and ReadBFloat16 are NOT_FOUND (no such tensor),
// INVALID_ARGUMENT (another shape, or an element type other than BF16, F16 and F32, or other than
// quantization_config says) and DATA_LOSS (the file could not be read).
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // Returns whether elements have values. If not, only shapes and forms are right, and Matrix
  // returns memory that nothing has touched.
  virtual bool has_values() const { return true; }
  // Returns the formula that makes the matrix, if one does; then nothing needs to ask for its
  // bytes.
  virtual std::optional<kernels::WeightFormula> Formula(const std::string& name) const = 0;
  // Returns whether the matrix is one of e4m3. Matrix then returns it as such, and Formula is to be
  // taken as such (kernels::FormulaE4M3).
  virtual bool IsFp8(const std::string& name) const = 0;
  // Returns the matrix, as e4m3 if IsFp8, else as bf16. It is mapped if it is stored as bf16, and
  // converted once (nearest, ties to even) if it is F16 or F32.
  virtual absl::StatusOr<MatrixView> Matrix(const std::string& name, int64_t rows,
                                            int64_t cols) = 0;
  // Returns a part of a bf16, F16 or F32 matrix of [rows][cols], as bf16, without touching the
  // others. UNIMPLEMENTED: it is stored as e4m3. (A source that does not know better makes the
  // whole matrix and keeps the part.)
  virtual absl::StatusOr<MatrixView> Slice(const std::string& name, int64_t rows, int64_t cols,
                                           const MatrixRange& range);
  // Returns a norm weight or a bias as float32. Nothing is rounded.
  virtual absl::StatusOr<std::vector<float>> Vector(const std::string& name, int64_t n) = 0;
  // Reads the elements [first, first + out.size()) of the flattened tensor as bf16, those of e4m3
  // without their scales. It is cheap whatever the tensor's size. REQUIRES: the range lies inside
  // `shape`.
  virtual absl::Status ReadBFloat16(const std::string& name, absl::Span<const int64_t> shape,
                                    int64_t first, absl::Span<uint16_t> out) = 0;
  // Gives up a view whose elements were copied elsewhere. Mapped pages leave this process, and
  // owned storage is freed.
  virtual void Release(MatrixView view) = 0;
  // Returns INVALID_ARGUMENT, which says what is wrong with up to eight of `tensors`, unless all of
  // them are there in their shape and form.
  virtual absl::Status CheckTensors(absl::Span<const TensorSpec> tensors) const {
    (void)tensors;  // a formula makes any tensor
    return absl::OkStatus();
  }
  // Returns INVALID_ARGUMENT, which names tensors that are there although the config does not imply
  // them, except those of IsIgnorableTensor.
  virtual absl::Status CheckNoLeftovers() = 0;
};

// Returns the safetensors of `dir`. Fails as Checkpoint::Open does. It also fails, and names up to
// eight tensors, if the checkpoint lacks tensors that the config implies, or has them in another
// shape or type.
absl::StatusOr<std::unique_ptr<WeightSource>> OpenCheckpoint(const std::string& dir,
                                                             const ModelConfig& config);

// Returns weights from a formula (dummy_weights.h), made as they are asked for.
std::unique_ptr<WeightSource> DummyWeights(const ModelConfig& config);
// Returns the same without values, for a device that computes nothing.
std::unique_ptr<WeightSource> WeightShapes(const ModelConfig& config);

}  // namespace sluice
