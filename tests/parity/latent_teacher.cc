#include "tests/parity/latent_teacher.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "tests/support/device.h"

namespace sluice::testing {
namespace {

constexpr int kMaxRows = 256;
constexpr int kMaxContext = 256;
constexpr int kBlockTokens = 32;

template <typename T>
T OrFail(absl::StatusOr<T> value) {
  INFO(std::string(value.status().ToString()));
  REQUIRE(value.ok());
  return *std::move(value);
}

// Values of a golden row as elements of a cache.
void AppendElements(const uint16_t* from, size_t count, DType type, std::string* to) {
  for (size_t i = 0; i < count; ++i) {
    const float wide = BFloat16ToFloat(from[i]);
    if (type == DType::kFloat32) {
      to->append(reinterpret_cast<const char*>(&wide), 4);
    } else {
      to->append(reinterpret_cast<const char*>(&from[i]), 2);
    }
  }
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
  // What is not appended must not be read: NaN in every form.
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
  const auto rank = static_cast<size_t>(latent.rank), rope = static_cast<size_t>(latent.rope_dim);
  for (size_t layer = 0; layer < golden.latent.size(); ++layer) {
    std::string entries, keys;
    for (size_t t = 0; t < golden.prompt.size(); ++t) {
      AppendElements(golden.latent[layer].data() + t * rank, rank, type, &entries);
      AppendElements(golden.rope[layer].data() + t * rope, rope, type, &entries);
      AppendElements(golden.index[layer].data() + t * kernels::kIndexDim, kernels::kIndexDim, type,
                     &keys);
    }
    Write(policy_->Cache(static_cast<int>(layer), 0), entries);
    Write(policy_->Cache(static_cast<int>(layer), 1), keys);
  }
}

}  // namespace sluice::testing
