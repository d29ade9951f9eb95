// WeightLoader takes weights out of a source into the form in which the device's kernels read them.
// It is used while a model is loaded, from one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/base/dtype.h"
#include "src/base/status_macros.h"
#include "src/device/device.h"
#include "src/device/kernel_set.h"
#include "src/model/dummy_weights.h"
#include "src/model/parallel.h"
#include "src/model/shard.h"
#include "src/model/weight_source.h"

namespace sluice {

// A float32 vector on the device; empty if the model has none.
struct DeviceVector {
  Buffer storage;
  const float* data() const { return storage.as<float>(); }
};

// Moves weights from a source to the device, counting bytes.
class WeightLoader {
 public:
  WeightLoader(Device* device, WeightSource* source, std::vector<MatrixView>* kept)
      : device_(device), source_(source), kept_(kept) {}

  // A matrix of `rows` rows, or a vector of `rows` elements, of which a part is taken.
  struct Tensor {
    std::string name;
    int rows;
    ShardPart taken{0, -1};  // -1: all
    ShardPart part() const { return taken.count < 0 ? ShardPart{0, rows} : taken; }
  };
  // Returns the taken rows of all tensors, one below the other, and of them the columns `taken`.
  absl::StatusOr<Weight> Matrix(const std::vector<Tensor>& tensors, int all_columns,
                                ShardPart taken) {
    std::vector<MatrixView> views;
    std::vector<MatrixPart> data;
    int64_t rows = 0;
    const int columns = taken.count;
    const bool all_wide = columns == all_columns;
    for (const Tensor& tensor : tensors) {
      const ShardPart part = tensor.part();
      rows += part.count;
      const bool whole = all_wide && part.count == tensor.rows;
      if (const auto formula = source_->Formula(tensor.name); formula.has_value() && all_wide) {
        data.push_back({.data = nullptr,
                        .rows = part.count,
                        .formula = FormulaFrom(*formula, int64_t{part.first} * all_columns),
                        .fp8_formula = source_->IsFp8(tensor.name)});
        continue;
      }
      SLUICE_ASSIGN_OR_RETURN(
          MatrixView view,
          whole ? source_->Matrix(tensor.name, tensor.rows, columns)
                : source_->Slice(tensor.name, tensor.rows, all_columns,
                                 {part.first, part.count, taken.first, taken.count}));
      data.push_back({.data = view.data(),
                      .rows = part.count,
                      .fp8 = view.fp8(),
                      .scales = view.fp8() != nullptr ? view.scales().data() : nullptr});
      views.push_back(std::move(view));
    }
    SLUICE_ASSIGN_OR_RETURN(Weight weight, device_->kernels().Prepare(data, columns));
    bytes_ += weight.storage.bytes() > 0 ? static_cast<int64_t>(weight.storage.bytes())
                                         : rows * columns * 2;
    for (MatrixView& view : views) {
      if (weight.storage.bytes() > 0) {
        source_->Release(std::move(view));
      } else {
        kept_->push_back(std::move(view));
      }
    }
    return weight;
  }

  absl::StatusOr<Weight> Matrix(const std::vector<Tensor>& tensors, int columns) {
    return Matrix(tensors, columns, ShardPart{0, columns});
  }

  // Returns a matrix on the host, from which others can be made. Give it back to Release.
  absl::StatusOr<MatrixView> Host(const std::string& name, int rows, int columns) {
    return source_->Matrix(name, rows, columns);
  }
  void Release(MatrixView view) { source_->Release(std::move(view)); }

  // Returns whether the matrices of Host and Made have values (WeightSource::has_values).
  bool has_values() const { return source_->has_values(); }

  // Returns the device's form of a matrix that the caller made from those of Host. With `bf16` it
  // is rounded to bf16 first.
  absl::StatusOr<Weight> Made(absl::Span<const float> values, int columns, bool bf16) {
    const auto rows = static_cast<int32_t>(values.size() / static_cast<size_t>(columns));
    MatrixPart part{.data = nullptr, .rows = rows, .values = values.data()};
    auto narrow = std::make_unique_for_overwrite<uint16_t[]>(bf16 ? values.size() : 0);
    if (bf16) part = {.data = narrow.get(), .rows = rows};
    if (bf16 && has_values()) {
      ParallelRanges(rows, 256, [&](int64_t begin, int64_t end) {
        std::transform(values.data() + begin * columns, values.data() + end * columns,
                       narrow.get() + begin * columns, FloatToBFloat16);
      });
    }
    SLUICE_ASSIGN_OR_RETURN(Weight weight, device_->kernels().Prepare({&part, 1}, columns));
    if (weight.storage.bytes() > 0) {
      bytes_ += static_cast<int64_t>(weight.storage.bytes());
    } else {
      bytes_ += int64_t{rows} * columns * 2;
      kept_->push_back(MatrixView::Owned(std::move(narrow), rows, columns));
    }
    return weight;
  }

  absl::StatusOr<DeviceVector> Vectors(const std::vector<Tensor>& tensors) {
    std::vector<float> all;
    for (const Tensor& tensor : tensors) {
      SLUICE_ASSIGN_OR_RETURN(const std::vector<float> values,
                              source_->Vector(tensor.name, tensor.rows));
      const auto first = values.begin() + tensor.part().first;
      all.insert(all.end(), first, first + tensor.part().count);
    }
    return Upload(all, tensors.front().name);
  }

  absl::StatusOr<DeviceVector> Upload(const std::vector<float>& values, const std::string& what) {
    DeviceVector vector;
    SLUICE_ASSIGN_OR_RETURN(vector.storage,
                            UploadBytes(values.data(), values.size() * sizeof(float), what));
    return vector;
  }

  absl::StatusOr<Buffer> Numbers(const std::vector<int32_t>& values, const std::string& what) {
    return UploadBytes(values.data(), values.size() * sizeof(int32_t), what);
  }

  int64_t bytes() const { return bytes_; }

 private:
  absl::StatusOr<Buffer> UploadBytes(const void* values, size_t bytes, const std::string& what) {
    SLUICE_ASSIGN_OR_RETURN(Buffer buffer, device_->Allocate(MemoryKind::kDevice, bytes, what));
    stream_->Copy(buffer.data(), values, bytes);
    stream_->Record(*done_);
    done_->Wait();
    SLUICE_RETURN_IF_ERROR(device_->Health());
    bytes_ += static_cast<int64_t>(bytes);
    return buffer;
  }

  Device* const device_;
  WeightSource* const source_;
  std::vector<MatrixView>* const kept_;
  const std::unique_ptr<Event> done_ = device_->NewEvent();
  const std::unique_ptr<Stream> stream_ = device_->NewStream(Device::StreamKind::kCopy);
  int64_t bytes_ = 0;
};

}  // namespace sluice
