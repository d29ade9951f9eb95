#include "tests/parity/latent_watch.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "kernels/e4m3.h"
#include "kernels/latent_params.h"
#include "src/device/kernel_set.h"

namespace sluice::testing {
namespace {

Buffer Allocate(Device* device, MemoryKind kind, size_t bytes) {
  absl::StatusOr<Buffer> buffer = device->Allocate(kind, bytes, "test");
  REQUIRE(buffer.ok());
  return *std::move(buffer);
}

size_t IndexQueryBytes(const ModelConfig& config, kernels::DType type) {
  const auto elements =
      static_cast<size_t>(config.latent->indexer->heads) * size_t{kernels::kIndexDim};
  return elements * (type == kernels::DType::kFloat8E4M3 ? 1 : 4);
}

int64_t ResultElements(const ModelConfig& config) {
  return int64_t{config.heads} * config.latent->rank;
}

}  // namespace

LatentWatch::LatentWatch(AttentionPolicy* policy, Device* device, const Model& model)
    : ForwardingPolicy(policy),
      device_(device),
      config_(model.config()),
      type_(model.cache_layout().kinds[1].element_type),
      key_bytes_(static_cast<size_t>(kernels::IndexKeyBytes(type_))),
      query_bytes_(IndexQueryBytes(config_, type_)),
      result_bytes_(static_cast<size_t>(ResultElements(config_) *
                                        SizeOf(device->kernels().activation_type()))) {
  const auto rows = static_cast<size_t>(model.max_rows());
  written_ = Allocate(device, MemoryKind::kDevice, rows * key_bytes_);
  for (int layer = 0; layer < config_.layers; ++layer) {
    Layer& l = layers_.emplace_back();
    l.keys = Allocate(device, MemoryKind::kPinned, rows * key_bytes_);
    const auto weights = static_cast<size_t>(config_.latent->indexer->heads) * 4;
    l.query = Allocate(device, MemoryKind::kPinned, query_bytes_ + weights);
    l.result = Allocate(device, MemoryKind::kPinned, result_bytes_);
  }
}

void LatentWatch::AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) {
  ForwardingPolicy::AppendIndex(stream, layer, params);
  params.cache.base = nullptr;
  params.written = written_.data();
  device_->kernels().IndexAppend(stream, params);
  stream.Copy(layers_[static_cast<size_t>(layer)].keys.data(), written_.data(),
              static_cast<size_t>(params.rows) * key_bytes_);
}

void LatentWatch::AttendLatent(Stream& stream, int layer, const Params& a) {
  const Layer& l = layers_[static_cast<size_t>(layer)];
  const auto last = static_cast<size_t>(a.rows - 1);
  const auto weights = static_cast<size_t>(a.index_heads);
  stream.Copy(l.query.data(), static_cast<const uint8_t*>(a.index_q) + last * query_bytes_,
              query_bytes_);
  stream.Copy(l.query.as<uint8_t>() + query_bytes_, a.index_weights + last * weights, weights * 4);
  ForwardingPolicy::AttendLatent(stream, layer, a);
  stream.Copy(l.result.data(), static_cast<const uint8_t*>(a.out) + last * result_bytes_,
              result_bytes_);
}

void LatentWatch::Collect(int position, int count) {
  length_ = position + count;
  for (Layer& layer : layers_) {
    layer.all_keys.resize(static_cast<size_t>(length_) * key_bytes_);
    std::memcpy(layer.all_keys.data() + static_cast<size_t>(position) * key_bytes_,
                layer.keys.data(), static_cast<size_t>(count) * key_bytes_);
  }
}

std::string LatentWatch::Query(int layer) const {
  const Buffer& query = layers_[static_cast<size_t>(layer)].query;
  return {query.as<char>(), query.bytes()};
}

std::string LatentWatch::Result(int layer) const {
  const Buffer& result = layers_[static_cast<size_t>(layer)].result;
  return {result.as<char>(), result.bytes()};
}

std::vector<double> LatentWatch::Scores(int layer) const {
  const Layer& l = layers_[static_cast<size_t>(layer)];
  const bool packed = type_ == kernels::DType::kFloat8E4M3;
  const auto elements = [&](const char* from, size_t count) {
    std::vector<double> out(count);
    for (size_t i = 0; i < count; ++i) {
      float value = 0;
      if (packed) {
        value = kernels::E4M3ToFloat(static_cast<uint8_t>(from[i]));
      } else {
        std::memcpy(&value, from + i * 4, 4);
      }
      out[i] = value;
    }
    return out;
  };
  const auto dim = size_t{kernels::kIndexDim};
  const auto heads = static_cast<size_t>(config_.latent->indexer->heads);
  const std::vector<double> q = elements(l.query.as<char>(), heads * dim);
  const auto* weights = reinterpret_cast<const float*>(l.query.as<char>() + query_bytes_);
  std::vector<double> out;
  for (int t = 0; t < length_; ++t) {
    const char* key = l.all_keys.data() + static_cast<size_t>(t) * key_bytes_;
    const std::vector<double> k = elements(key, dim);
    float scale = 1;
    if (packed) std::memcpy(&scale, key + dim, 4);
    double score = 0;
    for (size_t h = 0; h < heads; ++h) {
      const double dot =
          std::inner_product(k.begin(), k.end(), q.begin() + static_cast<ptrdiff_t>(h * dim), 0.0);
      score += double{weights[h]} * std::max(dot, 0.0);
    }
    out.push_back(score * double{scale});
  }
  return out;
}

std::vector<int32_t> LatentWatch::Selected(int layer) const {
  const std::vector<double> scores = Scores(layer);
  std::vector<int32_t> units(scores.size());
  std::iota(units.begin(), units.end(), 0);
  std::stable_sort(units.begin(), units.end(), [&](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  units.resize(std::min(units.size(), static_cast<size_t>(config_.latent->indexer->top_k)));
  std::sort(units.begin(), units.end());
  return units;
}

BothPolicies::BothPolicies(AttentionPolicy* first, AttentionPolicy* second, Device* device,
                           const Model& model)
    : ForwardingPolicy(first),
      first_(first),
      second_(second),
      row_(ResultElements(model.config())) {
  const auto bytes = static_cast<size_t>(row_ * model.max_rows()) * sizeof(float);
  out_ = Allocate(device, MemoryKind::kDevice, bytes);
  for (int layer = 0; layer < model.config().layers; ++layer) {
    results_.push_back({Allocate(device, MemoryKind::kPinned, bytes),
                        Allocate(device, MemoryKind::kPinned, bytes)});
  }
}

bool BothPolicies::Admit(int slot, int64_t context, int64_t total, Promise promise,
                         std::unique_ptr<SequenceCache>& home) {
  REQUIRE(context == 0);
  return first_->Admit(slot, context, total, promise, home) &&
         second_->Admit(slot, context, total, promise, home);
}

bool BothPolicies::Warm(int slot) { return first_->Warm(slot) && second_->Warm(slot); }

Event& BothPolicies::WarmEvent(int slot) {
  return first_->Warm(slot) ? second_->WarmEvent(slot) : first_->WarmEvent(slot);
}

bool BothPolicies::Grow(int slot, int64_t tokens) {
  return first_->Grow(slot, tokens) && second_->Grow(slot, tokens);
}

void BothPolicies::BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                             absl::Span<const int32_t> positions) {
  first_->BeginStep(stream, slots, positions);
  second_->BeginStep(stream, slots, positions);
}

void BothPolicies::Release(int slot) {
  first_->Release(slot);
  second_->Release(slot);
}

void BothPolicies::EndPrompt(int slot, int64_t tokens, SelectionHints hints) {
  first_->EndPrompt(slot, tokens, hints);
  second_->EndPrompt(slot, tokens, std::move(hints));
}

void BothPolicies::BeginPrompt(int slot, int64_t tokens, int64_t cached) {
  first_->BeginPrompt(slot, tokens, cached);
  second_->BeginPrompt(slot, tokens, cached);
}

void BothPolicies::EndStep(Stream& stream) {
  first_->EndStep(stream);
  second_->EndStep(stream);
}

void BothPolicies::AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                                int32_t first_row) {
  first_->latent_attention()->AppendLatent(stream, layer, params, first_row);
  second_->latent_attention()->AppendLatent(stream, layer, params, first_row);
}

void BothPolicies::AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) {
  first_->latent_attention()->AppendIndex(stream, layer, params);
  second_->latent_attention()->AppendIndex(stream, layer, params);
}

void BothPolicies::AttendLatent(Stream& stream, int layer, const Params& params) {
  first_->latent_attention()->AttendLatent(stream, layer, params);
  const auto made = [](Stream&) {};  // the queries are there
  const Params again = {.index_q = params.index_q,
                        .index_weights = params.index_weights,
                        .index_heads = params.index_heads,
                        .top_k = params.top_k,
                        .make_queries = made,
                        .q = params.q,
                        .slots = params.slots,
                        .positions = params.positions,
                        .rows = params.rows,
                        .decode_rows = params.decode_rows,
                        .heads = params.heads,
                        .scale = params.scale,
                        .out = out_.data(),
                        .out_type = kernels::DType::kFloat32};
  const auto bytes = static_cast<size_t>(row_ * params.rows) * sizeof(float);
  const Results& results = results_[static_cast<size_t>(layer)];
  first_->latent_attention()->AttendLatent(stream, layer, again);
  stream.Copy(results.first.data(), out_.data(), bytes);
  second_->latent_attention()->AttendLatent(stream, layer, again);
  stream.Copy(results.second.data(), out_.data(), bytes);
}

std::vector<std::vector<float>> BothPolicies::Rows(const Buffer& from, int rows) const {
  std::vector<std::vector<float>> out;
  for (int r = 0; r < rows; ++r) {
    out.emplace_back(from.as<float>() + r * row_, from.as<float>() + (r + 1) * row_);
  }
  return out;
}

std::vector<std::vector<float>> BothPolicies::First(int layer, int rows) const {
  return Rows(results_[static_cast<size_t>(layer)].first, rows);
}

std::vector<std::vector<float>> BothPolicies::Second(int layer, int rows) const {
  return Rows(results_[static_cast<size_t>(layer)].second, rows);
}

}  // namespace sluice::testing
