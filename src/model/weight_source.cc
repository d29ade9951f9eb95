#include "src/model/weight_source.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kernels/e4m3.h"
#include "src/base/dtype.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"
#include "src/model/checkpoint.h"
#include "src/model/dummy_weights.h"
#include "src/model/parallel.h"
#include "src/model/tensor_list.h"

namespace sluice {
namespace {

// The most names in one message.
constexpr size_t kMaxNamed = 8;
// Elements of a dummy tensor that a thread makes at a time.
constexpr int64_t kFillAtOnce = 1 << 18;

float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1Fu;
  const uint32_t mantissa = half & 0x3FFu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1.0p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 0x1F ? 0xFFu : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

// Every F16 value as bf16. The table takes 128 KiB; a conversion would have branches.
const std::vector<uint16_t>& HalfToBFloat16Table() {
  static const auto* table = [] {
    auto* t = new std::vector<uint16_t>(1 << 16);
    for (uint32_t h = 0; h < t->size(); ++h) {
      (*t)[h] = FloatToBFloat16(HalfToFloat(static_cast<uint16_t>(h)));
    }
    return t;
  }();
  return *table;
}

template <typename T>
T LoadAt(const uint8_t* from, size_t i) {  // shards need not align their data
  T value;
  std::memcpy(&value, from + i * sizeof(T), sizeof(T));
  return value;
}

// Converts `n` stored elements to bf16. REQUIRES: the type is BF16, F16, F32, or F8_E4M3, whose
// values bf16 has.
void ConvertToBFloat16(TensorType type, const uint8_t* from, size_t n, uint16_t* to) {
  if (type == TensorType::kBF16) {
    std::memcpy(to, from, n * 2);
  } else if (type == TensorType::kF16) {
    const uint16_t* table = HalfToBFloat16Table().data();
    for (size_t i = 0; i < n; ++i) to[i] = table[LoadAt<uint16_t>(from, i)];
  } else if (type == TensorType::kF8E4M3) {
    for (size_t i = 0; i < n; ++i) to[i] = FloatToBFloat16(kernels::E4M3ToFloat(from[i]));
  } else {
    for (size_t i = 0; i < n; ++i) to[i] = FloatToBFloat16(LoadAt<float>(from, i));
  }
}

void ConvertToFloat(TensorType type, const uint8_t* from, size_t n, float* to) {
  for (size_t i = 0; i < n; ++i) {
    to[i] = type == TensorType::kBF16  ? BFloat16ToFloat(LoadAt<uint16_t>(from, i))
            : type == TensorType::kF16 ? HalfToFloat(LoadAt<uint16_t>(from, i))
                                       : LoadAt<float>(from, i);
  }
}

bool IsFloatingWeight(TensorType type) {
  return type == TensorType::kBF16 || type == TensorType::kF16 || type == TensorType::kF32;
}

// Returns "a; b; ... and 3 more".
std::string ListText(const std::vector<std::string>& items) {
  const size_t shown = std::min(items.size(), kMaxNamed);
  return absl::StrCat(
      absl::StrJoin(items.begin(), items.begin() + static_cast<ptrdiff_t>(shown), "; "),
      shown < items.size() ? absl::StrCat("; and ", items.size() - shown, " more") : "");
}

absl::Status NoFp8Slice(const std::string& name) {
  return absl::UnimplementedError(
      absl::StrCat("tensor ", name, " is of e4m3, which is not divided among ranks"));
}

class CheckpointSource : public WeightSource {
 public:
  CheckpointSource(std::string dir, const ModelConfig& config, Checkpoint checkpoint)
      : dir_(std::move(dir)), config_(config), checkpoint_(std::move(checkpoint)) {
    for (const auto& [name, entry] : checkpoint_.tensors()) {
      by_address_.emplace(entry.file->Data(*entry.tensor), entry);
    }
  }

  absl::Status CheckTensors(absl::Span<const TensorSpec> tensors) const override {
    std::vector<std::string> faults;
    for (const TensorSpec& spec : tensors) {
      const auto found = Find(spec.name, spec.shape, spec.form);
      if (!found.ok()) faults.emplace_back(found.status().message());
    }
    if (faults.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(dir_, ": the weights do not fit config.json: ", ListText(faults)));
  }

  std::optional<kernels::WeightFormula> Formula(const std::string&) const override {
    return std::nullopt;
  }

  bool IsFp8(const std::string& name) const override {
    const Checkpoint::Entry* entry = checkpoint_.Find(name);
    return entry != nullptr && entry->tensor->type == TensorType::kF8E4M3;
  }

  absl::StatusOr<MatrixView> Matrix(const std::string& name, int64_t rows, int64_t cols) override {
    SLUICE_ASSIGN_OR_RETURN(const Checkpoint::Entry entry, Find(name, {rows, cols}));
    const TensorInfo& tensor = *entry.tensor;
    const uint8_t* data = entry.file->Data(tensor);
    if (tensor.type == TensorType::kF8E4M3) {
      SLUICE_ASSIGN_OR_RETURN(std::vector<float> scales, Scales(name, rows, cols));
      entry.file->WillNeed(tensor);
      return MatrixView::BorrowedFp8(data, std::move(scales), rows, cols);
    }
    entry.file->WillNeed(tensor);
    if (tensor.type == TensorType::kBF16 && reinterpret_cast<uintptr_t>(data) % 2 == 0) {
      return MatrixView::Borrowed(reinterpret_cast<const uint16_t*>(data), rows, cols);
    }
    const auto n = static_cast<size_t>(tensor.elements());
    auto owned = std::make_unique_for_overwrite<uint16_t[]>(n);
    ConvertToBFloat16(tensor.type, data, n, owned.get());
    entry.file->DontNeed(tensor);
    return MatrixView::Owned(std::move(owned), rows, cols);
  }

  absl::StatusOr<MatrixView> Slice(const std::string& name, int64_t rows, int64_t cols,
                                   const MatrixRange& range) override {
    SLUICE_ASSIGN_OR_RETURN(const Checkpoint::Entry entry,
                            Find(name, {rows, cols}, TensorForm::kFloating));
    const TensorInfo& tensor = *entry.tensor;
    const auto unit = static_cast<uint64_t>(TensorTypeBytes(tensor.type));
    const uint64_t first = static_cast<uint64_t>(range.first_row * cols + range.first_col) * unit;
    const bool whole_rows = range.cols == cols;
    const uint8_t* data = entry.file->Data(tensor) + first;
    if (whole_rows && tensor.type == TensorType::kBF16 &&
        reinterpret_cast<uintptr_t>(data) % 2 == 0) {
      entry.file->WillNeed(tensor, first, static_cast<uint64_t>(range.rows * cols) * unit);
      return MatrixView::Borrowed(reinterpret_cast<const uint16_t*>(data), range.rows, cols);
    }
    // Read, not mapped: what lies between the pieces stays on the disk.
    const int64_t pieces = whole_rows ? 1 : range.rows;
    const auto n = static_cast<size_t>(range.rows * range.cols / pieces);
    auto owned = std::make_unique_for_overwrite<uint16_t[]>(n * static_cast<size_t>(pieces));
    std::vector<uint8_t> stored(n * unit);
    for (int64_t i = 0; i < pieces; ++i) {
      SLUICE_RETURN_IF_ERROR(entry.file->Read(
          tensor, first + static_cast<uint64_t>(i * cols) * unit, stored.size(), stored.data()));
      ConvertToBFloat16(tensor.type, stored.data(), n, owned.get() + static_cast<size_t>(i) * n);
    }
    return MatrixView::Owned(std::move(owned), range.rows, range.cols);
  }

  absl::StatusOr<std::vector<float>> Vector(const std::string& name, int64_t n) override {
    SLUICE_ASSIGN_OR_RETURN(const Checkpoint::Entry entry, Find(name, {n}, TensorForm::kFloating));
    std::vector<float> out(static_cast<size_t>(n));
    std::vector<uint8_t> stored(entry.tensor->bytes);
    SLUICE_RETURN_IF_ERROR(entry.file->Read(*entry.tensor, 0, stored.size(), stored.data()));
    ConvertToFloat(entry.tensor->type, stored.data(), out.size(), out.data());
    return out;
  }

  absl::Status ReadBFloat16(const std::string& name, absl::Span<const int64_t> shape, int64_t first,
                            absl::Span<uint16_t> out) override {
    SLUICE_ASSIGN_OR_RETURN(const Checkpoint::Entry entry, Find(name, shape));
    const auto size = static_cast<uint64_t>(TensorTypeBytes(entry.tensor->type));
    stored_.resize(out.size() * size);
    SLUICE_RETURN_IF_ERROR(entry.file->Read(*entry.tensor, static_cast<uint64_t>(first) * size,
                                            stored_.size(), stored_.data()));
    ConvertToBFloat16(entry.tensor->type, stored_.data(), out.size(), out.data());
    return absl::OkStatus();
  }

  void Release(MatrixView view) override {
    if (view.owned()) return;
    // A view may begin inside a tensor.
    const auto after = by_address_.upper_bound(
        view.fp8() != nullptr ? view.fp8() : reinterpret_cast<const uint8_t*>(view.data()));
    SLUICE_CHECK(after != by_address_.begin(), "a view of another source was released");
    const Checkpoint::Entry& entry = std::prev(after)->second;
    entry.file->DontNeed(*entry.tensor);
  }

  absl::Status CheckNoLeftovers() override {
    std::vector<TensorSpec> expected = ExpectedTensors(config_);
    std::vector<std::string> extra;
    for (const auto& [name, entry] : checkpoint_.tensors()) {
      const bool known = std::binary_search(
          expected.begin(), expected.end(), TensorSpec{name, {}},
          [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
      if (!known && !IsIgnorableTensor(config_, name)) {
        extra.push_back(absl::StrCat(Shown(name), " ", ShapeText(entry.tensor->shape)));
      }
    }
    if (extra.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        dir_, ": the weights hold ", extra.size(), " tensor", extra.size() > 1 ? "s" : "",
        " that config.json does not imply: ", ListText(extra)));
  }

 private:
  // Without a form, the tensor is floating or e4m3, as it is stored.
  absl::StatusOr<Checkpoint::Entry> Find(const std::string& name, absl::Span<const int64_t> shape,
                                         std::optional<TensorForm> form = std::nullopt) const {
    const Checkpoint::Entry* entry = checkpoint_.Find(name);
    if (entry == nullptr) {
      return absl::NotFoundError(
          absl::StrCat("tensor ", name, " ", ShapeText(shape), " is missing"));
    }
    const TensorInfo& tensor = *entry->tensor;
    if (absl::MakeConstSpan(tensor.shape) != shape) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", name, ": expected shape ",
                                                     ShapeText(shape), ", found ",
                                                     ShapeText(tensor.shape)));
    }
    const bool fp8 = tensor.type == TensorType::kF8E4M3;
    const auto wrong = [&](const char* expected) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", name, ": expected dtype ", expected,
                                                     ", found ", TensorTypeName(tensor.type)));
    };
    if (!form.has_value()) form = fp8 ? TensorForm::kFp8 : TensorForm::kFloating;
    if (form == TensorForm::kScales && tensor.type != TensorType::kF32) return wrong("F32");
    if (form == TensorForm::kFp8 && !fp8) {
      return wrong("F8_E4M3, as config.json has a quantization_config");
    }
    if (form == TensorForm::kFloating && !IsFloatingWeight(tensor.type)) {
      return wrong(fp8 && !config_.latent.value_or(LatentConfig{}).fp8_weights
                       ? "BF16, F16 or F32, as config.json has no quantization_config of fp8"
                       : "BF16, F16 or F32");
    }
    return *entry;
  }

  absl::StatusOr<std::vector<float>> Scales(const std::string& matrix, int64_t rows,
                                            int64_t cols) const {
    const int64_t shape[] = {(rows + kScaleBlock - 1) / kScaleBlock,
                             (cols + kScaleBlock - 1) / kScaleBlock};
    SLUICE_ASSIGN_OR_RETURN(const Checkpoint::Entry entry,
                            Find(ScalesTensor(matrix), shape, TensorForm::kScales));
    std::vector<float> out(static_cast<size_t>(ScaleCount(rows, cols)));
    SLUICE_RETURN_IF_ERROR(entry.file->Read(*entry.tensor, 0, out.size() * 4, out.data()));
    return out;
  }

  const std::string dir_;
  const ModelConfig config_;
  const Checkpoint checkpoint_;
  std::map<const uint8_t*, Checkpoint::Entry> by_address_;  // by the tensors' first bytes
  std::vector<uint8_t> stored_;                             // scratch of ReadBFloat16
};

class DummySource : public WeightSource {
 public:
  explicit DummySource(const ModelConfig& config) : config_(config) {
    for (const auto& list : {ExpectedTensors(config), DraftTensors(config)}) {
      for (const TensorSpec& spec : list) tensors_.emplace(spec.name, spec);
    }
  }

  std::optional<kernels::WeightFormula> Formula(const std::string& name) const override {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) return std::nullopt;
    return DummyFormula(it->second, config_.tie_word_embeddings, kDummySeed);
  }

  bool IsFp8(const std::string& name) const override {
    const auto it = tensors_.find(name);
    return it != tensors_.end() && it->second.form == TensorForm::kFp8;
  }

  absl::StatusOr<MatrixView> Matrix(const std::string& name, int64_t rows, int64_t cols) override {
    SLUICE_ASSIGN_OR_RETURN(const TensorSpec* spec, Find(name, {rows, cols}));
    const auto n = static_cast<size_t>(spec->elements());
    if (spec->form == TensorForm::kFp8) {
      const kernels::WeightFormula formula = *Formula(name);
      auto values = std::make_unique_for_overwrite<uint8_t[]>(n);
      ParallelRanges(spec->elements(), kFillAtOnce, [&](int64_t begin, int64_t end) {
        kernels::FillWeights(formula, begin, end - begin, values.get() + begin);
      });
      return MatrixView::OwnedFp8(std::move(values),
                                  std::vector<float>(static_cast<size_t>(ScaleCount(rows, cols)),
                                                     kernels::FormulaScale(formula)),
                                  rows, cols);
    }
    auto owned = std::make_unique_for_overwrite<uint16_t[]>(n);
    FillDummy(*spec, config_.tie_word_embeddings, kDummySeed, 0, absl::MakeSpan(owned.get(), n));
    return MatrixView::Owned(std::move(owned), rows, cols);
  }

  absl::StatusOr<MatrixView> Slice(const std::string& name, int64_t rows, int64_t cols,
                                   const MatrixRange& range) override {
    SLUICE_ASSIGN_OR_RETURN(const TensorSpec* spec, Find(name, {rows, cols}));
    if (spec->form == TensorForm::kFp8) return NoFp8Slice(name);
    auto owned =
        std::make_unique_for_overwrite<uint16_t[]>(static_cast<size_t>(range.rows * range.cols));
    const int64_t rows_at_once = std::max<int64_t>(1, kFillAtOnce / range.cols);
    ParallelRanges(range.rows, rows_at_once, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        FillDummy(*spec, config_.tie_word_embeddings, kDummySeed,
                  (range.first_row + row) * cols + range.first_col,
                  absl::MakeSpan(owned.get() + row * range.cols, static_cast<size_t>(range.cols)));
      }
    });
    return MatrixView::Owned(std::move(owned), range.rows, range.cols);
  }

  absl::StatusOr<std::vector<float>> Vector(const std::string& name, int64_t n) override {
    SLUICE_ASSIGN_OR_RETURN(const TensorSpec* spec, Find(name, {n}));
    std::vector<uint16_t> bf16(static_cast<size_t>(n));
    FillDummy(*spec, config_.tie_word_embeddings, kDummySeed, 0, absl::MakeSpan(bf16));
    std::vector<float> out(bf16.size());
    std::transform(bf16.begin(), bf16.end(), out.begin(), BFloat16ToFloat);
    return out;
  }

  absl::Status ReadBFloat16(const std::string& name, absl::Span<const int64_t> shape, int64_t first,
                            absl::Span<uint16_t> out) override {
    SLUICE_ASSIGN_OR_RETURN(const TensorSpec* spec, Find(name, shape));
    if (spec->form == TensorForm::kScales) {
      const std::string matrix(absl::StripSuffix(name, ScalesTensor("")));
      std::fill(out.begin(), out.end(), FloatToBFloat16(kernels::FormulaScale(*Formula(matrix))));
    } else if (spec->form == TensorForm::kFp8) {
      const kernels::WeightFormula formula = *Formula(name);
      for (size_t i = 0; i < out.size(); ++i) {
        out[i] = FloatToBFloat16(
            kernels::E4M3ToFloat(kernels::FormulaE4M3(formula, static_cast<uint64_t>(first) + i)));
      }
    } else {
      FillDummy(*spec, config_.tie_word_embeddings, kDummySeed, first, out);
    }
    return absl::OkStatus();
  }

  void Release(MatrixView) override {}
  absl::Status CheckNoLeftovers() override { return absl::OkStatus(); }

 protected:
  absl::StatusOr<const TensorSpec*> Find(const std::string& name,
                                         absl::Span<const int64_t> shape) const {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) {
      return absl::NotFoundError(absl::StrCat("tensor ", name, " is not implied by config.json"));
    }
    if (absl::MakeConstSpan(it->second.shape) != shape) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", name, ": expected shape ",
                                                     ShapeText(shape), ", config.json implies ",
                                                     ShapeText(it->second.shape)));
    }
    return &it->second;
  }

 private:
  const ModelConfig config_;
  std::map<std::string, TensorSpec> tensors_;
};

class ShapeSource : public DummySource {
 public:
  using DummySource::DummySource;
  bool has_values() const override { return false; }
  absl::StatusOr<MatrixView> Matrix(const std::string& name, int64_t rows, int64_t cols) override {
    SLUICE_RETURN_IF_ERROR(Find(name, {rows, cols}).status());
    const auto n = static_cast<size_t>(rows * cols);
    if (!IsFp8(name)) {
      return MatrixView::Owned(std::make_unique_for_overwrite<uint16_t[]>(n), rows, cols);
    }
    return MatrixView::OwnedFp8(std::make_unique_for_overwrite<uint8_t[]>(n),
                                std::vector<float>(static_cast<size_t>(ScaleCount(rows, cols))),
                                rows, cols);
  }
  absl::StatusOr<MatrixView> Slice(const std::string& name, int64_t rows, int64_t cols,
                                   const MatrixRange& range) override {
    SLUICE_RETURN_IF_ERROR(Find(name, {rows, cols}).status());
    const auto n = static_cast<size_t>(range.rows * range.cols);
    return MatrixView::Owned(std::make_unique_for_overwrite<uint16_t[]>(n), range.rows, range.cols);
  }
};

}  // namespace

absl::StatusOr<MatrixView> WeightSource::Slice(const std::string& name, int64_t rows, int64_t cols,
                                               const MatrixRange& range) {
  SLUICE_ASSIGN_OR_RETURN(MatrixView whole, Matrix(name, rows, cols));
  if (whole.data() == nullptr) return NoFp8Slice(name);
  auto owned =
      std::make_unique_for_overwrite<uint16_t[]>(static_cast<size_t>(range.rows * range.cols));
  for (int64_t row = 0; row < range.rows; ++row) {
    std::copy_n(whole.data() + (range.first_row + row) * cols + range.first_col, range.cols,
                owned.get() + row * range.cols);
  }
  Release(std::move(whole));
  return MatrixView::Owned(std::move(owned), range.rows, range.cols);
}

void MatrixView::FloatRow(int64_t row, float* out) const {
  if (data_ != nullptr) {
    std::transform(data_ + row * cols_, data_ + (row + 1) * cols_, out, BFloat16ToFloat);
    return;
  }
  const float* scales = scales_.data() + row / kScaleBlock * ScaleCount(1, cols_);
  for (int64_t col = 0; col < cols_; ++col) {
    out[col] = kernels::E4M3ToFloat(fp8_[row * cols_ + col]) * scales[col / kScaleBlock];
  }
}

absl::StatusOr<std::unique_ptr<WeightSource>> OpenCheckpoint(const std::string& dir,
                                                             const ModelConfig& config) {
  SLUICE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(dir));
  auto source = std::make_unique<CheckpointSource>(dir, config, std::move(checkpoint));
  SLUICE_RETURN_IF_ERROR(source->CheckTensors(ExpectedTensors(config)));
  return source;
}

std::unique_ptr<WeightSource> DummyWeights(const ModelConfig& config) {
  return std::make_unique<DummySource>(config);
}

std::unique_ptr<WeightSource> WeightShapes(const ModelConfig& config) {
  return std::make_unique<ShapeSource>(config);
}

}  // namespace sluice
