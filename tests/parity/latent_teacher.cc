#include "tests/parity/latent_teacher.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/fp8.h"
#include "tests/support/device.h"
#include "tests/support/or_fail.h"

namespace sluice::testing {
namespace {

constexpr int kMaxRows = 256;
constexpr int kMaxContext = 256;
constexpr int kBlockTokens = 32;

// Returns golden values, which are bf16, as float32.
std::vector<float> Wide(const std::vector<uint16_t>& values, size_t row, size_t dim) {
  std::vector<float> out(dim);
  std::transform(values.begin() + static_cast<ptrdiff_t>(row * dim),
                 values.begin() + static_cast<ptrdiff_t>((row + 1) * dim), out.begin(),
                 BFloat16ToFloat);
  return out;
}

template <typename T>
void Append(const T* values, size_t count, std::string* to) {
  to->append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

// Appends bf16 values in another form of caches, unscaled.
void AppendElements(const std::vector<float>& values, DType type, std::string* to) {
  for (const float value : values) {
    const uint16_t narrow = FloatToBFloat16(value);
    type == DType::kFloat32 ? Append(&value, 1, to) : Append(&narrow, 1, to);
  }
}

// Returns the packed entry of latent and RoPE values.
std::string PackedEntry(const std::vector<float>& latent, const std::vector<float>& rope) {
  std::string values, scales;
  for (size_t i = 0; i < latent.size(); i += kernels::kPackedScaleTokens) {
    uint8_t quantised[kernels::kPackedScaleTokens];
    const float scale = kernels::QuantizeLatents(&latent[i], quantised);
    Append(quantised, kernels::kPackedScaleTokens, &values);
    Append(&scale, 1, &scales);
  }
  std::string out = values + scales;
  AppendElements(rope, DType::kBFloat16, &out);
  return out;
}

// Returns the packed key: its values and its scale, which lie apart in a block.
std::pair<std::string, float> PackedKey(std::vector<float> key) {
  for (size_t half = 1; half < key.size(); half *= 2) {  // Walsh-Hadamard
    for (size_t i = 0; i < key.size(); ++i) {
      if ((i & half) != 0) continue;
      const float a = key[i], b = key[i + half];
      key[i] = a + b;
      key[i + half] = a - b;
    }
  }
  for (float& value : key) value /= std::sqrt(static_cast<float>(key.size()));
  uint8_t quantised[kernels::kIndexDim];
  const float scale = kernels::QuantizeE4M3(key.data(), kernels::kIndexDim, quantised);
  return {std::string(reinterpret_cast<const char*>(quantised), sizeof(quantised)), scale};
}

}  // namespace

LatentTeacher::LatentTeacher(const std::string& model_dir, const std::string& kernels,
                             DType kv_dtype, const std::string& load_format) {
  device_ = OrFail(TestDevice(kernels));
  Model::Options options;
  options.directory = model_dir;
  options.load_format = load_format;
  options.kv_dtype = kv_dtype;
  options.block_tokens = kBlockTokens;
  options.max_context = kMaxContext;
  options.max_rows = kMaxRows;
  options.max_logits = 1;
  model_ = OrFail(Model::Load(options, device_.get()));
  policy_ = std::make_unique<PlainLatentPolicy>(device_.get(), model_->config(),
                                                model_->cache_layout(), kMaxRows, kMaxContext);
  stream_ = device_->NewStream(Device::StreamKind::kCompute);
  done_ = device_->NewEvent();
  const auto allocate = [this](size_t words) {
    return OrFail(device_->Allocate(MemoryKind::kDevice, words * 4, "test"));
  };
  tokens_ = allocate(kMaxContext);
  rows_ = allocate(2 * kMaxRows + 1);
  logits_ = allocate(static_cast<size_t>(model_->config().vocab_size));
}

void LatentTeacher::Finish() {
  stream_->Record(*done_);
  done_->Wait();
  INFO(device_->Health());
  REQUIRE(device_->Health().ok());
}

std::string LatentTeacher::Read(const Buffer& from) {
  const Buffer host = OrFail(device_->Allocate(MemoryKind::kPinned, from.bytes(), "test"));
  stream_->Copy(host.data(), from.data(), from.bytes());
  Finish();
  return {host.as<char>(), from.bytes()};
}

void LatentTeacher::Write(const Buffer& to, const std::string& bytes) {
  REQUIRE(bytes.size() <= to.bytes());
  const Buffer host = OrFail(device_->Allocate(MemoryKind::kPinned, bytes.size(), "test"));
  std::memcpy(host.data(), bytes.data(), bytes.size());
  stream_->Copy(to.data(), host.data(), bytes.size());
  Finish();
}

void LatentTeacher::Begin(const std::vector<int32_t>& tokens) {
  Write(tokens_, {reinterpret_cast<const char*>(tokens.data()), tokens.size() * 4});
  // Caches begin as NaN in every form: an entry that was not appended must not be read.
  for (int layer = 0; layer < model_->cache_layout().layers; ++layer) {
    for (size_t kind = 0; kind < model_->cache_layout().kinds.size(); ++kind) {
      const Buffer& cache = policy_->Cache(layer, kind);
      Write(cache, std::string(cache.bytes(), '\xFF'));
    }
  }
}

std::vector<float> LatentTeacher::Step(int position, int count, bool generates, int padding) {
  std::vector<int32_t> rows(2 * kMaxRows + 1, -1);
  for (int i = 0; i < count + padding; ++i) {
    rows[static_cast<size_t>(i)] = i < count ? 0 : -1;
    rows[static_cast<size_t>(kMaxRows + i)] = i < count ? position + i : 0;
  }
  last_row_ = rows.back() = count - 1;
  const auto all = static_cast<size_t>(count + padding);
  policy_->BeginStep(*stream_, {rows.data(), all}, {rows.data() + kMaxRows, all});
  Write(rows_, {reinterpret_cast<const char*>(rows.data()), rows.size() * 4});
  StepInputs in;
  in.tokens = tokens_.as<int32_t>();
  in.token_stride = kMaxContext;
  in.slots = rows_.as<int32_t>();
  in.positions = in.slots + kMaxRows;
  in.rows = count + padding;
  in.decode_rows = generates ? in.rows : 0;
  in.logit_rows = in.positions + kMaxRows;
  in.logit_count = 1;
  in.logits = logits_.as<float>();
  model_->Forward(*stream_, in, *policy_);
  const std::string bytes = Read(logits_);
  const auto* logits = reinterpret_cast<const float*>(bytes.data());
  return {logits, logits + model_->config().vocab_size};
}

std::vector<int32_t> LatentTeacher::Selected(int layer) {
  const std::string counts = Read(policy_->Counts()), all = Read(policy_->Selected(layer));
  const int32_t count = reinterpret_cast<const int32_t*>(counts.data())[last_row_];
  const auto* list = reinterpret_cast<const int32_t*>(all.data()) +
                     last_row_ * model_->config().latent->indexer->top_k;
  return {list, list + count};
}

std::vector<float> LatentTeacher::Scores(int layer, int count) {
  const std::string all = Read(policy_->Scores(layer));
  const auto* row = reinterpret_cast<const float*>(all.data()) + last_row_ * kMaxContext;
  return {row, row + count};
}

std::vector<std::string> LatentTeacher::Caches() {
  std::vector<std::string> out;
  for (int layer = 0; layer < model_->cache_layout().layers; ++layer) {
    for (size_t kind = 0; kind < model_->cache_layout().kinds.size(); ++kind) {
      out.push_back(Read(policy_->Cache(layer, kind)));
    }
  }
  return out;
}

void LatentTeacher::SetCaches(const std::vector<std::string>& caches) {
  const size_t kinds = model_->cache_layout().kinds.size();
  for (size_t i = 0; i < caches.size(); ++i) {
    Write(policy_->Cache(static_cast<int>(i / kinds), i % kinds), caches[i]);
  }
}

void LatentTeacher::SetGolden(const fixtures::GoldenCase& golden) {
  const LatentConfig& latent = *config().latent;
  const DType type = model_->cache_layout().kinds[0].element_type;
  const bool packed = type == DType::kFloat8E4M3;
  const auto rank = static_cast<size_t>(latent.rank), rope = static_cast<size_t>(latent.rope_dim);
  for (size_t layer = 0; layer < golden.latent.size(); ++layer) {
    std::string entries, keys, scales;
    for (size_t t = 0; t < golden.prompt.size(); ++t) {
      const std::vector<float> values = Wide(golden.latent[layer], t, rank);
      const std::vector<float> turned = Wide(golden.rope[layer], t, rope);
      const std::vector<float> key = Wide(golden.index[layer], t, kernels::kIndexDim);
      if (!packed) {
        AppendElements(values, type, &entries);
        AppendElements(turned, type, &entries);
        AppendElements(key, type, &keys);
        continue;
      }
      entries += PackedEntry(values, turned);
      const auto [elements, scale] = PackedKey(key);
      keys += elements;
      Append(&scale, 1, &scales);
      // A block has its keys' values, then their scales.
      const bool last = t + 1 == golden.prompt.size();
      if (last || (t + 1) % kBlockTokens == 0) {
        const size_t missing = (kBlockTokens - (t + 1) % kBlockTokens) % kBlockTokens;
        keys.append(missing * kernels::kIndexDim, '\0');
        keys += scales;
        keys.append(missing * 4, '\0');
        scales.clear();
      }
    }
    Write(policy_->Cache(static_cast<int>(layer), 0), entries);
    Write(policy_->Cache(static_cast<int>(layer), 1), keys);
  }
}

}  // namespace sluice::testing
