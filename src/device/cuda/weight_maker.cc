#include "src/device/cuda/weight_maker.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/launch.h"
#include "kernels/fp8_pairs.h"
#include "src/base/status_macros.h"
#include "src/device/cuda/cuda_memory.h"
#include "src/device/weight_rows.h"

namespace sluice {
namespace {

constexpr int32_t kBlockRows = kernels::kFp8BlockRows;
constexpr int32_t kPublishedRows = 128;  // rows of a block of MatrixPart::scales

bool IsFp8(const MatrixPart& part) {
  const bool has_others = part.data != nullptr || part.values != nullptr;
  return !has_others && (part.fp8 != nullptr || part.fp8_formula);
}

bool AreFp8(absl::Span<const MatrixPart> parts) {
  return !parts.empty() && std::all_of(parts.begin(), parts.end(), IsFp8);
}

int32_t Rows(absl::Span<const MatrixPart> parts) {
  int32_t rows = 0;
  for (const MatrixPart& part : parts) rows += part.rows;
  return rows;
}

int32_t ScaleColumns(int32_t k) {
  return (k + kernels::kFp8BlockColumns - 1) / kernels::kFp8BlockColumns;
}

// Returns the offset of the scales behind the values.
int64_t ScalesAt(int32_t n, int32_t k) { return (int64_t{n} * k + 255) / 256 * 256; }

// Appends the scales of a part's blocks of 32 rows.
void AppendScales(const MatrixPart& part, int32_t k, std::vector<float>& scales) {
  const int32_t columns = ScaleColumns(k);
  for (int32_t row = 0; row < part.rows; row += kBlockRows) {
    if (part.fp8 == nullptr) {
      scales.insert(scales.end(), static_cast<size_t>(columns), FormulaScale(part.formula));
    } else {
      const float* published = part.scales + int64_t{row / kPublishedRows} * columns;
      scales.insert(scales.end(), published, published + columns);
    }
  }
}

}  // namespace

WeightMaker::WeightMaker(DeviceHealth* health)
    : health_(health), setup_(health, Device::StreamKind::kCompute), set_up_(health, false) {}

int64_t WeightMaker::Bytes(absl::Span<const MatrixPart> parts, int32_t k) {
  const int32_t n = Rows(parts);
  if (!AreFp8(parts)) return int64_t{n} * k * 2;
  return ScalesAt(n, k) + int64_t{(n + kBlockRows - 1) / kBlockRows} * ScaleColumns(k) * 4;
}

absl::StatusOr<Weight> WeightMaker::Make(absl::Span<const MatrixPart> parts, int32_t k) {
  const int32_t n = Rows(parts);
  Weight weight;
  SLUICE_ASSIGN_OR_RETURN(weight.storage,
                          AllocateHbm(static_cast<size_t>(Bytes(parts, k)),
                                      absl::StrCat("a matrix of weights, ", n, " x ", k)));
  weight.matrix = {weight.storage.as<uint16_t>(), n, k, kernels::WeightLayout::kRowMajor};
  SLUICE_RETURN_IF_ERROR(AreFp8(parts) ? MakeFp8(parts, k, weight)
                                       : MakeBFloat16(parts, k, weight));
  setup_.Record(set_up_);
  set_up_.Wait();
  SLUICE_RETURN_IF_ERROR(health_->status());
  return weight;
}

absl::Status WeightMaker::MakeFp8(absl::Span<const MatrixPart> parts, int32_t k, Weight& weight) {
  auto* const values = weight.storage.as<uint8_t>();
  auto* const scales = reinterpret_cast<float*>(values + ScalesAt(weight.matrix.n, k));
  std::vector<float> host_scales;
  int32_t first = 0;
  for (const MatrixPart& part : parts) {
    if (first % kBlockRows != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a matrix of fp8 weights with ", k, " columns: a part begins at row ", first,
          ", no multiple of ", kBlockRows, ": run with --device cpu, or from a bf16 checkpoint"));
    }
    uint8_t* const out = values + int64_t{first} * k;
    const int64_t count = int64_t{part.rows} * k;
    if (part.fp8 == nullptr) {
      setup_.Check(kernels::cuda::LaunchFillWeights(part.formula, count, out, setup_.handle()),
                   "weights by formula");
    } else {
      SLUICE_RETURN_IF_ERROR(Upload(out, part.fp8, static_cast<size_t>(count)));
    }
    AppendScales(part, k, host_scales);
    first += part.rows;
  }
  SLUICE_RETURN_IF_ERROR(Upload(scales, host_scales.data(), host_scales.size() * sizeof(float)));
  weight.matrix.layout = kernels::WeightLayout::kFp8Blocks;
  if (kernels::HasFp8Pairs(k)) {
    setup_.Check(
        kernels::cuda::LaunchPairWeights(int64_t{weight.matrix.n} * k, values, setup_.handle()),
        "the order of fp8 weights");
    weight.matrix.layout = kernels::kFp8Pairs;
  }
  weight.matrix.scales = scales;
  return absl::OkStatus();
}

absl::Status WeightMaker::MakeBFloat16(absl::Span<const MatrixPart> parts, int32_t k,
                                       Weight& weight) {
  // Rows that are rounded on the host at a time: 32 MiB.
  const int32_t rows_at_once = std::max<int32_t>(1, (16 << 20) / std::max(k, 1));
  std::vector<uint16_t> rounded;
  auto* out = weight.storage.as<uint16_t>();
  for (const MatrixPart& part : parts) {
    const int64_t count = int64_t{part.rows} * k;
    if (part.data != nullptr) {
      SLUICE_RETURN_IF_ERROR(Upload(out, part.data, static_cast<size_t>(count) * 2));
    } else if (IsBFloat16(part)) {
      setup_.Check(kernels::cuda::LaunchFillWeights(part.formula, count, out, setup_.handle()),
                   "weights by formula");
    } else {
      for (int32_t first = 0; first < part.rows; first += rows_at_once) {
        const int32_t rows = std::min(rows_at_once, part.rows - first);
        rounded.resize(static_cast<size_t>(rows) * static_cast<size_t>(k));
        for (int32_t row = 0; row < rows; ++row) {
          BFloat16Row(part, first + row, k, rounded.data() + int64_t{row} * k);
        }
        SLUICE_RETURN_IF_ERROR(
            Upload(out + int64_t{first} * k, rounded.data(), rounded.size() * 2));
      }
    }
    out += count;
  }
  return absl::OkStatus();
}

absl::Status WeightMaker::Upload(void* target, const void* source, size_t bytes) {
  if (uploader_ == nullptr) {
    SLUICE_ASSIGN_OR_RETURN(uploader_, WeightUploader::Create(health_));
  }
  uploader_->Upload(target, source, bytes);
  return absl::OkStatus();
}

}  // namespace sluice
