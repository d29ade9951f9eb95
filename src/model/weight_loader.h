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
#include "src/model/parallel.h"
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

  struct Part {
    std::string name;
    int rows;
  };
  // Returns the matrices of all parts, one below the other.
  absl::StatusOr<Weight> Matrix(const std::vector<Part>& parts, int columns) {
    std::vector<MatrixView> views;
    std::vector<MatrixPart> data;
    int64_t rows = 0;
    for (const Part& part : parts) {
      rows += part.rows;
      if (const auto formula = source_->Formula(part.name); formula.has_value()) {
        data.push_back({.data = nullptr,
                        .rows = part.rows,
                        .formula = *formula,
                        .fp8_formula = source_->IsFp8(part.name)});
        continue;
      }
      SLUICE_ASSIGN_OR_RETURN(MatrixView view, source_->Matrix(part.name, part.rows, columns));
      data.push_back({.data = view.data(),
                      .rows = part.rows,
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

  absl::StatusOr<DeviceVector> Vectors(const std::vector<Part>& parts) {
    std::vector<float> all;
    for (const Part& part : parts) {
      SLUICE_ASSIGN_OR_RETURN(const std::vector<float> values,
                              source_->Vector(part.name, part.rows));
      all.insert(all.end(), values.begin(), values.end());
    }
    return Upload(all, parts.front().name);
  }

  absl::StatusOr<DeviceVector> Upload(const std::vector<float>& values, const std::string& what) {
    const size_t bytes = values.size() * sizeof(float);
    DeviceVector vector;
    SLUICE_ASSIGN_OR_RETURN(vector.storage, device_->Allocate(MemoryKind::kDevice, bytes, what));
    stream_->Copy(vector.storage.data(), values.data(), bytes);
    stream_->Record(*done_);
    done_->Wait();
    SLUICE_RETURN_IF_ERROR(device_->Health());
    bytes_ += static_cast<int64_t>(bytes);
    return vector;
  }

  int64_t bytes() const { return bytes_; }

 private:
  Device* const device_;
  WeightSource* const source_;
  std::vector<MatrixView>* const kept_;
  const std::unique_ptr<Event> done_ = device_->NewEvent();
  const std::unique_ptr<Stream> stream_ = device_->NewStream(Device::StreamKind::kCopy);
  int64_t bytes_ = 0;
};

}  // namespace sluice
