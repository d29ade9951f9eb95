#include "tests/unit/attention/policy_rig.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "src/base/dtype.h"
#include "src/base/rng.h"
#include "src/kv/sequence_cache.h"
#include "tests/support/device.h"
#include "tests/support/or_fail.h"
#include "tests/test_main.h"

namespace sluice::testing {
namespace {

constexpr int64_t kLeastPoolBytes = int64_t{8} << 20;

// The device's steps may be padded further than the CPU device's are.
int64_t MaxRows(const PolicyRig::Shape& shape, const Device& device) {
  return std::max(shape.slots + shape.row_bucket, device.RowBucket(shape.slots));
}

}  // namespace

PolicyRig::PolicyRig(const Shape& shape, Make make) : shape_(shape), make_(std::move(make)) {
  CacheKind kv;
  kv.name = "kv";
  kv.heads = shape.kv_heads;
  kv.block_tokens = shape.block_tokens;
  kv.SetEqualParts(2, int64_t{2} * shape.head_dim * 2);
  const CacheLayout layout{shape.layers, {kv}};
  const auto pool_bytes =
      static_cast<size_t>(std::max(kLeastPoolBytes, 2 * layout.BytesFor(shape.max_context)));
  device_ = OrFail(TestDevice(shape.kernels, shape.threads, shape.row_bucket));
  hbm_ = OrFail(PagePool::Create(
      "hbm", layout, OrFail(device_->Allocate(MemoryKind::kDevice, pool_bytes, "hbm"))));
  dram_ = OrFail(PagePool::Create(
      "dram", layout, OrFail(device_->Allocate(MemoryKind::kPinned, pool_bytes, "dram"))));
  const BufferAllocator allocator(device_.get(), "test");
  const auto allocate = [&allocator](MirroredBuffer* both, int64_t words) {
    REQUIRE(allocator.MirroredWords(words, both).ok());
  };
  const int64_t rows = MaxRows(shape, *device_);
  const int64_t q = int64_t{shape.heads} * shape.head_dim;
  layers_.resize(static_cast<size_t>(shape.layers));
  for (Layer& layer : layers_) {
    allocate(&layer.qkv, rows * (q + int64_t{2} * shape.kv_heads * shape.head_dim));
    allocate(&layer.predicted, rows * q);
    allocate(&layer.out, rows * q);
  }
  allocate(&slots_, rows);
  allocate(&positions_, rows);
  allocate(&cos_sin_, rows * shape.head_dim);
  for (int64_t i = 0; i < rows * shape.head_dim / 2; ++i) {  // no rotation
    cos_sin_.host.as<float>()[2 * i] = 1;
    cos_sin_.host.as<float>()[2 * i + 1] = 0;
  }
  partial_ = OrFail(device_->Allocate(
      MemoryKind::kDevice, static_cast<size_t>(shape.heads) * (shape.head_dim + 1) * 4, "test"));
  done_ = device_->NewEvent();
  stream_ = device_->NewStream(Device::StreamKind::kCompute);
  stream_->Copy(cos_sin_.device.data(), cos_sin_.host.data(), cos_sin_.host.bytes());
  Finish();
}

PolicyRig::~PolicyRig() = default;

float PolicyRig::scale() const { return 1 / std::sqrt(static_cast<float>(shape_.head_dim)); }

void PolicyRig::Finish() {
  stream_->Record(*done_);
  done_->Wait();
  INFO(std::string(device_->Health().message()));
  REQUIRE(device_->Health().ok());
}

PolicyOptions PolicyRig::Options() const {
  PolicyOptions options;
  options.device = device_.get();
  options.hbm = hbm_.get();
  options.dram = dram_.get();
  options.slots = shape_.slots;
  options.max_context = shape_.max_context;
  options.heads = shape_.heads;
  options.dense_layers = 0;
  options.worker_deadline = absl::Seconds(60);  // so that a busy machine is no fault
  return options;
}

void PolicyRig::Admit(AttentionPolicy& policy, int slot, uint64_t seed, int context, int total,
                      int computed, const SelectionHints& hints) {
  auto home = std::make_unique<SequenceCache>(
      dram_.get(), dram_->TryReserve(policy.FootprintOf(context, total).dram_tokens));
  home->EnsureTokens(context);
  const int handed_over = context - computed;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (int token = 0; token < handed_over; ++token) {
      const Vectors vectors = make_(seed, layer, token);
      for (int head = 0; head < shape_.kv_heads; ++head) {
        auto* block = reinterpret_cast<uint16_t*>(
            home->BlockAddress(layer, 0, head, token / shape_.block_tokens));
        for (int part = 0; part < 2; ++part) {
          const float* from =
              (part == 0 ? vectors.k : vectors.v).data() + int64_t{head} * shape_.head_dim;
          uint16_t* to =
              block +
              (int64_t{part} * shape_.block_tokens + token % shape_.block_tokens) * shape_.head_dim;
          for (int d = 0; d < shape_.head_dim; ++d) to[d] = FloatToBFloat16(from[d]);
        }
      }
    }
  }
  REQUIRE(policy.Admit(slot, handed_over, total, Promise::kFirm, home));
  policy.WarmEvent(slot).Wait();
  REQUIRE(policy.Warm(slot));
  sequences_[slot] = {seed, handed_over};
  for (int i = 0; i < computed; ++i) Step(policy, {slot}, /*generates=*/false);
  if (policy.NeedsEndPrompt()) {
    policy.EndPrompt(slot, context, hints);
    policy.WarmEvent(slot).Wait();
    REQUIRE(policy.Warm(slot));
  }
}

void PolicyRig::NextTurn(AttentionPolicy& policy, int slot, int total) {
  policy.WarmEvent(slot).Wait();
  REQUIRE(policy.Warm(slot));
  std::unique_ptr<SequenceCache> home = policy.DetachHostCache(slot);
  const int length = sequences_.at(slot).length;
  REQUIRE(policy.Admit(slot, length, total, Promise::kFirm, home));
  policy.WarmEvent(slot).Wait();
  REQUIRE(policy.Warm(slot));
  policy.EndPrompt(slot, length, {});
  policy.WarmEvent(slot).Wait();
  REQUIRE(policy.Warm(slot));
}

void PolicyRig::Release(AttentionPolicy& policy, int slot) {
  policy.WarmEvent(slot).Wait();
  REQUIRE(policy.Warm(slot));
  policy.Release(slot);
  sequences_.erase(slot);
}

void PolicyRig::Ahead(Stream& stream, AttentionPolicy& policy, int layer, int rows) {
  if (rows == 0 || layer == shape_.layers || !policy.kv_attention()->LooksAhead(layer)) return;
  KvAttention::Queries queries;
  // There is one buffer for all layers, as in a model: whoever needs it later keeps a copy.
  queries.q = layers_[0].predicted.device.as<float>();
  queries.stride = int64_t{shape_.heads} * shape_.head_dim;
  const Layer& from = layers_[static_cast<size_t>(layer)];
  Stream& ahead = stream.Branch(AttentionPolicy::kAheadBranch);
  ahead.After(stream);
  ahead.Copy(layers_[0].predicted.device.data(), from.predicted.host.data(),
             static_cast<size_t>(rows * queries.stride) * 4);
  queries.slots = slots_.device.as<int32_t>();
  queries.positions = positions_.device.as<int32_t>();
  queries.rows = rows;
  queries.heads = shape_.heads;
  queries.scale = scale();
  policy.kv_attention()->Ahead(ahead, layer, queries);
}

void PolicyRig::Enqueue(Stream& stream, AttentionPolicy& policy, int rows, int decode_rows) {
  const auto bytes = static_cast<size_t>(rows) * 4;
  stream.Copy(slots_.device.data(), slots_.host.data(), bytes);
  stream.Copy(positions_.device.data(), positions_.host.data(), bytes);
  Ahead(stream, policy, 0, decode_rows);
  for (int i = 0; i < shape_.layers; ++i) {
    Ahead(stream, policy, i + 1, decode_rows);
    const Layer& layer = layers_[static_cast<size_t>(i)];
    const int64_t width = (int64_t{shape_.heads} + 2 * shape_.kv_heads) * shape_.head_dim;
    stream.Copy(layer.qkv.device.data(), layer.qkv.host.data(),
                static_cast<size_t>(rows * width) * 4);
    kernels::RopeAppendParams append{};
    append.qkv = layer.qkv.device.as<float>();
    append.cos_sin = cos_sin_.device.as<float>();
    append.slots = slots_.device.as<int32_t>();
    append.positions = positions_.device.as<int32_t>();
    append.rows = rows;
    append.decode_rows = decode_rows;
    append.heads = shape_.heads;
    append.epsilon = 1e-6f;
    policy.kv_attention()->Append(stream, i, append);
    kernels::AttentionParams attention{};
    attention.q = append.qkv;
    attention.q_stride = width;
    attention.slots = append.slots;
    attention.positions = append.positions;
    attention.out = layer.out.device.data();
    attention.partial = partial_.as<float>();
    attention.partial_rows = 1;
    attention.rows = rows;
    attention.decode_rows = decode_rows;
    attention.heads = shape_.heads;
    attention.scale = scale();
    attention.out_type = DType::kFloat32;
    policy.kv_attention()->Attend(stream, i, attention);
    stream.Copy(layer.out.host.data(), layer.out.device.data(),
                static_cast<size_t>(rows) * shape_.heads * shape_.head_dim * 4);
  }
  stream.After(stream.Branch(AttentionPolicy::kAheadBranch));
  policy.EndStep(stream);
}

std::vector<std::vector<std::vector<float>>> PolicyRig::Step(AttentionPolicy& policy,
                                                             const std::vector<int32_t>& slots,
                                                             bool generates) {
  const int bucket = generates ? device_->RowBucket(static_cast<int>(slots.size())) : 0;
  const int rows = std::max(bucket, static_cast<int>(slots.size()));
  for (int row = 0; row < rows; ++row) {  // all padded, except those set below
    slots_.host.as<int32_t>()[row] = -1;
    positions_.host.as<int32_t>()[row] = 0;
  }
  const size_t q = static_cast<size_t>(shape_.heads) * shape_.head_dim;
  const size_t kv = static_cast<size_t>(shape_.kv_heads) * shape_.head_dim;
  std::vector<int32_t> real_slots, real_positions;
  for (size_t r = 0; r < slots.size(); ++r) {
    slots_.host.as<int32_t>()[r] = slots[r];
    Sequence& sequence = sequences_.at(slots[r]);
    const int position = sequence.length++;
    positions_.host.as<int32_t>()[r] = position;
    real_slots.push_back(slots[r]);
    real_positions.push_back(position);
    REQUIRE(policy.Grow(slots[r], sequence.length));
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const Vectors vectors = make_(sequence.seed, layer, position);
      const Layer& to = layers_[static_cast<size_t>(layer)];
      float* row = to.qkv.host.as<float>() + r * (q + 2 * kv);
      std::copy(vectors.q.begin(), vectors.q.end(), row);
      std::copy(vectors.k.begin(), vectors.k.end(), row + q);
      std::copy(vectors.v.begin(), vectors.v.end(), row + q + kv);
      std::copy(vectors.predicted.begin(), vectors.predicted.end(),
                to.predicted.host.as<float>() + r * q);
    }
  }
  policy.BeginStep(*stream_, real_slots, real_positions);
  if (bucket > 0) {
    std::unique_ptr<Program>& program = programs_[rows];
    if (program == nullptr) {
      program = OrFail(device_->Record(*stream_, [this, &policy, rows](Stream& stream) {
        Enqueue(stream, policy, rows, rows);
      }));
    }
    program->Run(*stream_);
  } else {
    Enqueue(*stream_, policy, rows, generates ? rows : 0);
  }
  Finish();
  std::vector<std::vector<std::vector<float>>> out;
  for (const Layer& layer : layers_) {
    std::vector<std::vector<float>>& of_layer = out.emplace_back();
    for (size_t r = 0; r < slots.size(); ++r) {
      const float* row = layer.out.host.as<float>() + r * q;
      of_layer.emplace_back(row, row + q);
    }
  }
  return out;
}

std::vector<float> PolicyRig::Read(const float* at, size_t count) {
  const Buffer host = OrFail(device_->Allocate(MemoryKind::kPinned, count * 4, "test"));
  stream_->Copy(host.data(), at, count * 4);
  Finish();
  return {host.as<float>(), host.as<float>() + count};
}

std::vector<float> PolicyRig::Naive(uint64_t seed, int layer, int position,
                                    const std::function<Who(int kv_head, int token)>& weigh) const {
  const Vectors own = make_(seed, layer, position);
  const size_t dim = static_cast<size_t>(shape_.head_dim);
  const int group = shape_.heads / shape_.kv_heads;
  std::vector<Vectors> tokens;
  for (int t = 0; t <= position; ++t) tokens.push_back(make_(seed, layer, t));
  std::vector<float> out;
  for (int head = 0; head < shape_.heads; ++head) {
    const int kv_head = head / group;
    std::vector<double> sum(dim, 0), scores(tokens.size());
    double largest = -std::numeric_limits<double>::infinity();
    for (int t = 0; t <= position; ++t) {
      const Who who = weigh(kv_head, t);
      const std::vector<float>& q = who == Who::kPredicted ? own.predicted : own.q;
      double dot = 0;
      for (size_t d = 0; d < dim; ++d) {
        dot += double{q[static_cast<size_t>(head) * dim + d]} *
               double{tokens[static_cast<size_t>(t)].k[static_cast<size_t>(kv_head) * dim + d]};
      }
      double& score = scores[static_cast<size_t>(t)];
      score = who == Who::kNobody ? -std::numeric_limits<double>::infinity() : dot * scale();
      largest = std::max(largest, score);
    }
    double total = 0;
    for (size_t t = 0; t < tokens.size(); ++t) {
      const double weight = std::exp(scores[t] - largest);
      total += weight;
      for (size_t d = 0; d < dim; ++d) {
        sum[d] += weight * double{tokens[t].v[static_cast<size_t>(kv_head) * dim + d]};
      }
    }
    for (size_t d = 0; d < dim; ++d) out.push_back(static_cast<float>(sum[d] / total));
  }
  return out;
}

namespace {

// The least and the largest value of element d of a block's keys.
std::pair<float, float> RangeOf(const std::vector<std::vector<float>>& keys, size_t d) {
  float least = keys[0][d], largest = keys[0][d];
  for (const std::vector<float>& key : keys) {
    least = std::min(least, key[d]);
    largest = std::max(largest, key[d]);
  }
  return {least, largest};
}

// Quest's bound of q k over a block's keys.
double Bound(absl::Span<const float> q, const std::vector<std::vector<float>>& keys) {
  double score = 0;
  for (size_t d = 0; d < q.size(); ++d) {
    const auto [least, largest] = RangeOf(keys, d);
    score += std::max(double{q[d]} * least, double{q[d]} * largest);
  }
  return score;
}

// The log-sum-exp of scale * q k' over a block's keys, each element of which stands for the quarter
// of the block's range in which it lies (kernels::RefineScoresParams).
double CodedScore(absl::Span<const float> q, const std::vector<std::vector<float>>& keys,
                  float scale) {
  double sum = 0;
  for (const std::vector<float>& key : keys) {
    double dot = 0;
    for (size_t d = 0; d < q.size(); ++d) {
      const auto [least, largest] = RangeOf(keys, d);
      const float middle = (least + largest) * 0.5f, quarter = (largest - least) * 0.25f;
      const bool upper = key[d] > middle;
      const bool outer = upper ? key[d] > middle + quarter : key[d] <= middle - quarter;
      dot += q[d] * (least + (double{largest} - least) * kernels::KeyCodeLevel(upper, outer));
    }
    sum += std::exp(scale * dot);
  }
  return std::log(sum);
}

}  // namespace

std::vector<std::vector<int32_t>> PolicyRig::NaiveTopBlocks(uint64_t seed, int layer, int position,
                                                            int blocks, int last, bool predicted,
                                                            bool codes) const {
  const Vectors own = make_(seed, layer, position);
  const std::vector<float>& q = predicted ? own.predicted : own.q;
  const size_t dim = static_cast<size_t>(shape_.head_dim);
  const int group = shape_.heads / shape_.kv_heads;
  const int newest = position / shape_.block_tokens;
  std::vector<std::vector<int32_t>> selected;
  for (int kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
    std::vector<std::pair<double, int32_t>> others;
    for (int block = 1; block < newest; ++block) {
      std::vector<std::vector<float>> keys;
      for (int t = block * shape_.block_tokens; t < (block + 1) * shape_.block_tokens; ++t) {
        const Vectors token = make_(seed, layer, t);
        const auto begin = token.k.begin() + static_cast<int64_t>(kv_head * dim);
        keys.emplace_back(begin, begin + static_cast<int64_t>(dim));
      }
      double best = -std::numeric_limits<double>::infinity();
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const absl::Span<const float> of_head(q.data() + static_cast<size_t>(head) * dim, dim);
        best = std::max(best, codes ? CodedScore(of_head, keys, scale()) : Bound(of_head, keys));
      }
      others.emplace_back(-best, block);
    }
    std::sort(others.begin(), others.end());
    std::vector<int32_t>& list = selected.emplace_back();
    list.push_back(0);
    for (int block = newest; block > std::max(newest - last, 0); --block) list.push_back(block);
    for (const auto& [score, block] : others) {
      if (static_cast<int>(list.size()) < blocks && block <= newest - last) list.push_back(block);
    }
    std::sort(list.begin(), list.end());
  }
  return selected;
}

float RoundedToBf16(float x) { return BFloat16ToFloat(FloatToBFloat16(x)); }

PolicyRig::Make RandomVectors(const PolicyRig::Shape& shape, float error) {
  return [shape, error](uint64_t seed, int layer, int position) {
    SplitMix64 random(seed * 1000003 + static_cast<uint64_t>(layer) * 7919 +
                      static_cast<uint64_t>(position) * 104729);
    const auto draw = [&random] {
      double sum = 0;  // near enough to a normal distribution
      for (int i = 0; i < 4; ++i) sum += static_cast<double>(random.Below(1 << 20)) / (1 << 20);
      return static_cast<float>((sum - 2) * 1.7);
    };
    PolicyRig::Vectors vectors;
    for (int i = 0; i < shape.heads * shape.head_dim; ++i) {
      const float q = draw();
      vectors.q.push_back(RoundedToBf16(q));
      vectors.predicted.push_back(RoundedToBf16(q + error * draw()));
    }
    for (int i = 0; i < shape.kv_heads * shape.head_dim; ++i) {
      vectors.k.push_back(RoundedToBf16(draw()));
      vectors.v.push_back(RoundedToBf16(draw()));
    }
    return vectors;
  };
}

void OnRig(const std::string& kernels, void (*test)(const PolicyRig::Shape&)) {
  const absl::Status status = TestDevice(kernels).status();
  if (absl::IsNotFound(status)) return SkipTest(std::string(status.message()));
  PolicyRig::Shape shape;
  shape.kernels = kernels;
  test(shape);
}

double RelativeError(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return std::sqrt(error / norm);
}

}  // namespace sluice::testing
