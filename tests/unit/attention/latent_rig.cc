#include "tests/unit/attention/latent_rig.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/latent_params.h"
#include "src/attention/policy_factory.h"
#include "src/base/dtype.h"
#include "src/base/rng.h"
#include "src/device/kernel_set.h"
#include "tests/support/device.h"
#include "tests/support/or_fail.h"

namespace sluice::testing {
namespace {

constexpr int kMaxPromptRows = 64;
constexpr float kEpsilon = 1e-6f;

std::vector<float> Random(uint64_t seed, int count) {
  SplitMix64 random(seed * 0x9E3779B97F4A7C15ull + 12345);
  std::vector<float> out;
  for (int i = 0; i < count; ++i) {
    double sum = 0;  // near enough to a normal distribution
    for (int j = 0; j < 4; ++j) sum += static_cast<double>(random.Below(1 << 20)) / (1 << 20);
    out.push_back(static_cast<float>((sum - 2) * 1.7));
  }
  return out;
}

float Scale(const LatentRig::Shape& s) {
  return 1 / std::sqrt(static_cast<float>(s.rank + s.rope));
}

}  // namespace

LatentRig::LatentRig(const Shape& shape, const PolicyOptions::Ess& ess, const std::string& name)
    : shape_(shape), type_(shape.packed ? DType::kFloat8E4M3 : DType::kFloat32) {
  device_ = OrFail(TestDevice(shape.kernels, 1, shape.row_bucket));
  CacheKind latent;
  latent.name = "latent";
  latent.element_type = type_;
  latent.heads = 1;
  latent.block_tokens = shape.block_tokens;
  latent.SetEqualParts(1, kernels::EntryBytes(type_, shape.rank, shape.rope));
  CacheKind index = latent;
  index.name = "index";
  index.SetEqualParts(1, kernels::IndexKeyBytes(type_));
  if (shape.packed) index.part_bytes = {kernels::kIndexDim, 4};
  const CacheLayout layout{shape.layers, {latent, index}};
  options_.name = name;
  options_.device = device_.get();
  options_.slots = shape.slots;
  options_.max_context = shape.max_context;
  options_.heads = shape.heads;
  options_.rows_per_sequence = shape.rows_per_sequence;
  options_.max_rows =
      std::max(kMaxPromptRows, shape.slots * shape.rows_per_sequence + shape.row_bucket);
  options_.latent_rank = shape.rank;
  options_.index_top_k = shape.top_k;
  options_.workers = shape.workers;
  options_.worker_deadline = shape.worker_deadline;
  options_.hbm_bytes = static_cast<int64_t>(shape.pool_bytes);
  options_.ess = ess;
  const TierShapes tiers = TierShapesOf(options_, layout);
  hbm_ = OrFail(PagePool::Create(
      "hbm", tiers.hbm, OrFail(device_->Allocate(MemoryKind::kDevice, shape.pool_bytes, "hbm"))));
  dram_ = OrFail(
      PagePool::Create("dram", tiers.dram,
                       OrFail(device_->Allocate(MemoryKind::kPinned, shape.pool_bytes, "dram"))));
  options_.hbm = hbm_.get();
  options_.dram = dram_.get();
  const BufferAllocator allocator(device_.get(), "test");
  const auto allocate = [&allocator](MirroredBuffer* both, int64_t words) {
    REQUIRE(allocator.MirroredWords(words, both).ok());
  };
  const int64_t rows = options_.max_rows;
  layers_.resize(static_cast<size_t>(shape.layers));
  for (Layer& layer : layers_) {
    allocate(&layer.kv, rows * (shape.rank + shape.rope));
    allocate(&layer.k, rows * kernels::kIndexDim);
    allocate(&layer.index_q, rows * shape.index_heads * kernels::kIndexDim);
    allocate(&layer.weights, rows * shape.index_heads);
    allocate(&layer.q, rows * shape.heads * (shape.rank + shape.rope));
    allocate(&layer.out, rows * shape.heads * shape.rank);
    const auto bytes = static_cast<size_t>(rows * shape.index_heads * kernels::kIndexDim * 4);
    layer.made_q = OrFail(device_->Allocate(MemoryKind::kDevice, bytes, "test"));
    layer.made_weights = OrFail(device_->Allocate(MemoryKind::kDevice, bytes, "test"));
  }
  allocate(&slots_, rows);
  allocate(&positions_, rows);
  allocate(&cos_sin_, rows * kernels::kIndexDim);
  const int ones = std::max(shape.rank, kernels::kIndexDim);
  allocate(&ones_, ones + kernels::kIndexDim);
  for (int64_t i = 0; i < rows * kernels::kIndexDim; ++i) {  // no rotation
    cos_sin_.host.as<float>()[i] = i % 2 == 0 ? 1.0f : 0.0f;
  }
  std::fill_n(ones_.host.as<float>(), ones, 1.0f);  // then biases of 0
  done_ = device_->NewEvent();
  stream_ = device_->NewStream(Device::StreamKind::kCompute);
  stream_->Copy(cos_sin_.device.data(), cos_sin_.host.data(), cos_sin_.host.bytes());
  stream_->Copy(ones_.device.data(), ones_.host.data(), ones_.host.bytes());
  Finish();
  policy_ = OrFail(NewPolicy(options_));
}

LatentRig::~LatentRig() = default;

void LatentRig::Finish() {
  stream_->Record(*done_);
  done_->Wait();
  INFO(std::string(device_->Health().message()));
  REQUIRE(device_->Health().ok());
}

LatentRig::Token LatentRig::Make(uint64_t seed, int layer, int position) const {
  const uint64_t own = seed * 1000003 + static_cast<uint64_t>(layer) * 7919;
  const auto at = [&](uint64_t what) {
    return own * 31 + what * 1299709 + static_cast<uint64_t>(position) * 104729;
  };
  Token token;
  token.kv = Random(at(1), shape_.rank + shape_.rope);
  token.k = Random(at(2), kernels::kIndexDim);
  token.q = Random(at(3), shape_.heads * (shape_.rank + shape_.rope));
  // The indexer's queries turn slowly, so that the selection drifts.
  const double angle = shape_.drift * position;
  for (int h = 0; h < shape_.index_heads; ++h) {
    const auto a = Random(own * 77 + static_cast<uint64_t>(h) * 3 + 1, kernels::kIndexDim);
    const auto b = Random(own * 77 + static_cast<uint64_t>(h) * 3 + 2, kernels::kIndexDim);
    for (size_t d = 0; d < a.size(); ++d) {
      token.index_q.push_back(
          static_cast<float>(std::cos(angle) * double{a[d]} + std::sin(angle) * double{b[d]}));
    }
    token.weights.push_back(1.0f + 0.25f * static_cast<float>(h));
  }
  return token;
}

std::vector<double> LatentRig::Entry(const Token& token) const {
  std::vector<double> entry(token.kv.begin(), token.kv.end());
  double squares = 0;
  for (int d = 0; d < shape_.rank; ++d) squares += entry[d] * entry[d];
  const double scale = 1 / std::sqrt(squares / shape_.rank + double{kEpsilon});
  for (int d = 0; d < shape_.rank; ++d) entry[d] = static_cast<float>(entry[d] * scale);
  return entry;
}

std::vector<double> LatentRig::Key(const Token& token) const {
  std::vector<double> key(token.k.begin(), token.k.end());
  const double mean = std::accumulate(key.begin(), key.end(), 0.0) / kernels::kIndexDim;
  double squares = 0;
  for (const double x : key) squares += (x - mean) * (x - mean);
  const double scale = 1 / std::sqrt(squares / kernels::kIndexDim + double{kEpsilon});
  for (double& x : key) x = static_cast<float>((x - mean) * scale);
  return key;
}

bool LatentRig::Admit(int slot, uint64_t seed, int context, int total, int prompt) {
  REQUIRE((context == 0 || !shape_.packed));
  std::unique_ptr<SequenceCache> home;
  if (context > 0) {
    Reservation room = dram_->TryReserve(policy_->FootprintOf(context, total).dram_tokens);
    if (room.empty()) return false;
    home = std::make_unique<SequenceCache>(dram_.get(), std::move(room));
    home->EnsureTokens(context);
  }
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (int t = 0; t < context; ++t) {
      const Token token = Make(seed, layer, t);
      const auto put = [&](size_t kind, const std::vector<double>& values) {
        auto* block =
            reinterpret_cast<float*>(home->BlockAddress(layer, kind, 0, t / shape_.block_tokens));
        float* at = block + static_cast<size_t>(t % shape_.block_tokens) * values.size();
        for (const double value : values) *at++ = static_cast<float>(value);
      };
      put(0, Entry(token));
      put(1, Key(token));
    }
  }
  if (!policy_->Admit(slot, context, total, Promise::kFirm, home)) return false;
  policy_->BeginPrompt(slot, prompt == 0 ? context : prompt, context);
  sequences_[slot] = {seed, context};
  return true;
}

void LatentRig::Readmit(int slot, uint64_t seed, int context, int total, int prompt,
                        std::unique_ptr<SequenceCache> home) {
  REQUIRE(policy_->Admit(slot, context, total, Promise::kFirm, home));
  policy_->BeginPrompt(slot, prompt, context);
  sequences_[slot] = {seed, context};
}

void LatentRig::AwaitWarm(int slot) {
  policy_->WarmEvent(slot).Wait();
  REQUIRE(policy_->Warm(slot));
}

void LatentRig::EndPrompt(int slot, const SelectionHints& hints) {
  policy_->EndPrompt(slot, position(slot), hints);  // at once after Admit, too
}

std::vector<std::vector<std::vector<float>>> LatentRig::Prompt(int slot, int count) {
  return Run(std::vector<int32_t>(static_cast<size_t>(count), slot), 0);
}

std::vector<std::vector<std::vector<float>>> LatentRig::Step(const std::vector<int32_t>& slots,
                                                             const std::vector<bool>& wrong) {
  return Run(slots, static_cast<int>(slots.size()), wrong);
}

std::vector<std::vector<std::vector<float>>> LatentRig::Mixed(std::vector<int32_t> slots,
                                                              int prompt_slot, int count) {
  const auto decode_rows = static_cast<int>(slots.size());
  slots.insert(slots.end(), static_cast<size_t>(count), prompt_slot);
  return Run(slots, decode_rows);
}

void LatentRig::Enqueue(Stream& stream, int rows, int decode_rows) {
  const auto send = [&](const MirroredBuffer& both, int width) {
    stream.Copy(both.device.data(), both.host.data(), static_cast<size_t>(rows) * width * 4);
  };
  send(slots_, 1);
  send(positions_, 1);
  for (int i = 0; i < shape_.layers; ++i) {
    const Layer& layer = layers_[static_cast<size_t>(i)];
    send(layer.kv, shape_.rank + shape_.rope);
    send(layer.k, kernels::kIndexDim);
    send(layer.index_q, shape_.index_heads * kernels::kIndexDim);
    send(layer.weights, shape_.index_heads);
    kernels::LatentAppendParams entry{};
    entry.kv = layer.kv.device.as<float>();
    entry.kv_stride = shape_.rank + shape_.rope;
    entry.norm = ones_.device.as<float>();
    entry.cos_sin = cos_sin_.device.as<float>();
    entry.slots = slots_.device.as<int32_t>();
    entry.positions = positions_.device.as<int32_t>();
    entry.rows = rows;
    entry.epsilon = kEpsilon;
    entry.decode_rows = decode_rows;
    policy_->latent_attention()->AppendLatent(stream, i, entry, 0);
    kernels::IndexAppendParams key{};
    key.k = layer.k.device.as<float>();
    key.k_stride = kernels::kIndexDim;
    key.norm_weight = ones_.device.as<float>();
    key.norm_bias = key.norm_weight + std::max(shape_.rank, kernels::kIndexDim);
    key.cos_sin = entry.cos_sin;
    key.slots = entry.slots;
    key.positions = entry.positions;
    key.rows = rows;
    key.rope_dim = shape_.rope;
    key.epsilon = kEpsilon;
    key.decode_rows = decode_rows;
    policy_->latent_attention()->AppendIndex(stream, i, key);
    kernels::IndexQueryParams index{};
    index.q = layer.index_q.device.as<float>();
    index.weights = layer.weights.device.as<float>();
    index.weights_stride = shape_.index_heads;
    index.cos_sin = entry.cos_sin;
    index.out = layer.made_q.data();
    index.out_weights = layer.made_weights.as<float>();
    index.type = type_;
    index.rows = rows;
    index.heads = shape_.index_heads;
    index.rope_dim = shape_.rope;
    index.weight_scale = 1;
    device_->kernels().IndexQuery(stream, index);
    const auto make_queries = [&](Stream& on) {
      on.Copy(layer.q.device.data(), layer.q.host.data(),
              static_cast<size_t>(rows) * shape_.heads * (shape_.rank + shape_.rope) *
                  SizeOf(device_->kernels().activation_type()));
    };
    LatentAttention::Params attention{.make_queries = make_queries};
    attention.index_q = index.out;
    attention.index_weights = index.out_weights;
    attention.index_heads = shape_.index_heads;
    attention.top_k = shape_.top_k;
    attention.q = layer.q.device.data();
    attention.slots = entry.slots;
    attention.positions = entry.positions;
    attention.rows = rows;
    attention.decode_rows = decode_rows;
    attention.heads = shape_.heads;
    attention.scale = Scale(shape_);
    attention.out = layer.out.device.data();
    policy_->latent_attention()->AttendLatent(stream, i, attention);
    stream.Copy(layer.out.host.data(), layer.out.device.data(),
                static_cast<size_t>(rows) * shape_.heads * shape_.rank * 4);
  }
  policy_->EndStep(stream);
}

std::vector<std::vector<std::vector<float>>> LatentRig::Run(const std::vector<int32_t>& slots,
                                                            int decode_rows,
                                                            const std::vector<bool>& wrong) {
  const bool generates = decode_rows == static_cast<int>(slots.size());
  const int bucket = generates ? device_->RowBucket(static_cast<int>(slots.size())) : 0;
  const int rows = std::max(bucket, static_cast<int>(slots.size()));
  for (int row = 0; row < rows; ++row) {  // all padded, except those set below
    slots_.host.as<int32_t>()[row] = -1;
    positions_.host.as<int32_t>()[row] = 0;
  }
  std::vector<int32_t> real_positions;
  for (size_t r = 0; r < slots.size(); ++r) {
    AwaitWarm(slots[r]);
    Sequence& sequence = sequences_.at(slots[r]);
    const int position = sequence.length++;
    slots_.host.as<int32_t>()[r] = slots[r];
    positions_.host.as<int32_t>()[r] = position;
    real_positions.push_back(position);
    REQUIRE(policy_->Grow(slots[r], sequence.length));
    for (int i = 0; i < shape_.layers; ++i) {
      const uint64_t seed = sequence.seed + (r < wrong.size() && wrong[r] ? 1000 : 0);
      const Token token = Make(seed, i, position);
      const Layer& layer = layers_[static_cast<size_t>(i)];
      const auto put = [&](const MirroredBuffer& both, const std::vector<float>& values) {
        std::copy(values.begin(), values.end(), both.host.as<float>() + r * values.size());
      };
      put(layer.kv, token.kv);
      put(layer.k, token.k);
      put(layer.index_q, token.index_q);
      put(layer.weights, token.weights);
      if (device_->kernels().activation_type() == DType::kFloat32) {
        put(layer.q, token.q);
      } else {
        std::transform(token.q.begin(), token.q.end(),
                       layer.q.host.as<uint16_t>() + r * token.q.size(), FloatToBFloat16);
      }
    }
  }
  if (policy_->WantsRecording(generates ? rows : decode_rows)) {
    ++recordings_;
    programs_.erase(rows);
  }
  policy_->BeginStep(*stream_, slots, real_positions);
  if (bucket > 0) {
    std::unique_ptr<Program>& program = programs_[rows];
    if (program == nullptr) {
      program = OrFail(
          device_->Record(*stream_, [this, rows](Stream& stream) { Enqueue(stream, rows, rows); }));
    }
    program->Run(*stream_);
  } else {
    Enqueue(*stream_, rows, decode_rows);
  }
  Finish();
  std::vector<std::vector<std::vector<float>>> out;
  const auto width = static_cast<size_t>(shape_.heads) * static_cast<size_t>(shape_.rank);
  for (const Layer& layer : layers_) {
    std::vector<std::vector<float>>& of_layer = out.emplace_back();
    for (size_t r = 0; r < slots.size(); ++r) {
      const float* row = layer.out.host.as<float>() + r * width;
      of_layer.emplace_back(row, row + width);
    }
  }
  return out;
}

std::vector<int32_t> LatentRig::Ranked(uint64_t seed, int layer, int position) const {
  const Token own = Make(seed, layer, position);
  std::vector<std::pair<double, int32_t>> order;
  for (int t = 0; t <= position; ++t) {
    const std::vector<double> key = Key(Make(seed, layer, t));
    double score = 0;
    for (int h = 0; h < shape_.index_heads; ++h) {
      double dot = 0;
      for (int d = 0; d < kernels::kIndexDim; ++d) {
        dot += double{own.index_q[static_cast<size_t>(h * kernels::kIndexDim + d)]} *
               key[static_cast<size_t>(d)];
      }
      score += double{own.weights[static_cast<size_t>(h)]} * std::max(dot, 0.0);
    }
    order.emplace_back(-double{static_cast<float>(score)}, t);
  }
  std::sort(order.begin(), order.end());
  std::vector<int32_t> ranked;
  for (const auto& [minus, unit] : order) ranked.push_back(unit);
  return ranked;
}

std::vector<int32_t> LatentRig::Selected(uint64_t seed, int layer, int position) const {
  std::vector<int32_t> selected = Ranked(seed, layer, position);
  selected.resize(std::min(selected.size(), static_cast<size_t>(shape_.top_k)));
  std::sort(selected.begin(), selected.end());
  return selected;
}

std::vector<int32_t> LatentRig::RunnersUp(uint64_t seed, int layer, int position, int count) const {
  std::vector<int32_t> units = Ranked(seed, layer, position);
  units.erase(units.begin(),
              units.begin() + std::min<int64_t>(std::ssize(units), int64_t{shape_.top_k}));
  units.resize(std::min(units.size(), static_cast<size_t>(count)));
  std::sort(units.begin(), units.end());
  return units;
}

std::vector<float> LatentRig::Naive(uint64_t seed, int layer, int position) const {
  const Token own = Make(seed, layer, position);
  std::vector<std::vector<double>> entries;
  for (const int32_t t : Selected(seed, layer, position)) {
    entries.push_back(Entry(Make(seed, layer, t)));
  }
  const auto dim = static_cast<size_t>(shape_.rank + shape_.rope);
  std::vector<float> out;
  for (size_t head = 0; head < static_cast<size_t>(shape_.heads); ++head) {
    std::vector<double> scores, sum(static_cast<size_t>(shape_.rank), 0);
    for (const std::vector<double>& entry : entries) {
      double dot = 0;
      for (size_t d = 0; d < dim; ++d) dot += double{own.q[head * dim + d]} * entry[d];
      scores.push_back(dot * double{Scale(shape_)});
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    double total = 0;
    for (size_t i = 0; i < entries.size(); ++i) {
      const double weight = std::exp(scores[i] - largest);
      total += weight;
      for (size_t d = 0; d < sum.size(); ++d) sum[d] += weight * entries[i][d];
    }
    for (const double x : sum) out.push_back(static_cast<float>(x / total));
  }
  return out;
}

SelectionHints LatentRig::Hints(uint64_t seed, int tokens, int rows) const {
  SelectionHints hints;
  hints.unit_tokens = 1;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (int p = tokens - rows; p < tokens; ++p) {
      SelectionHints::Entry entry;
      entry.layer = static_cast<uint32_t>(layer);
      entry.position = static_cast<uint32_t>(p);
      for (const int32_t unit : Selected(seed, layer, p)) {
        entry.units.push_back(static_cast<uint32_t>(unit));
      }
      hints.entries.push_back(entry);
    }
  }
  return hints;
}

}  // namespace sluice::testing
