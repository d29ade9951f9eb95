#include "src/bench/policies/workload_statistics.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include "src/base/dtype.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/query_watch.h"
#include "src/bench/workload/dictation.h"
#include "src/device/cpu/cpu_device.h"
#include "src/model/model.h"

namespace sluice::bench {
namespace {

using Blocks = std::vector<int32_t>;

// Returns a context's keys of one layer: bf16 [heads][tokens][head_dim].
std::vector<uint16_t> KeysOf(const Context& context, const CacheLayout& layout, int layer,
                             ContextReader& reader) {
  const CacheKind& kind = layout.kinds[0];
  SLUICE_CHECK(kind.element_type == DType::kBFloat16 && kind.part_bytes.size() == 2);
  const auto dim = static_cast<size_t>(kind.bytes_per_token / 4);
  const size_t tokens = context.tokens.size();
  std::vector<uint8_t> payload;
  payload.reserve(context.payload(layer, 0).bytes);
  reader.Read(context, layer, 0, [&](absl::Span<const uint8_t> piece) {
    payload.insert(payload.end(), piece.begin(), piece.end());
  });
  std::vector<uint16_t> keys(static_cast<size_t>(kind.heads) * tokens * dim);
  const auto* at = reinterpret_cast<const uint16_t*>(payload.data());
  const auto block = static_cast<size_t>(kind.block_tokens);
  for (size_t first = 0; first < tokens; first += block) {
    const size_t count = std::min(block, tokens - first) * dim;
    for (int head = 0; head < kind.heads; ++head) {
      std::copy_n(at, count, keys.data() + (static_cast<size_t>(head) * tokens + first) * dim);
      at += 2 * count;  // Skips the values.
    }
  }
  return keys;
}

// Returns the dot product of n floats. n is a multiple of 16, so that a compiler can keep the sums
// in vectors.
float Dot(const float* a, const float* b, int n) {
  constexpr int kLanes = 16;
  float sums[kLanes] = {};
  for (int i = 0; i < n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) sums[j] += a[i + j] * b[i + j];
  }
  return std::accumulate(sums, sums + kLanes, 0.0f);
}

class Watcher {
 public:
  static absl::StatusOr<std::unique_ptr<Watcher>> Create(const PolicyWorld& world,
                                                         const Context& context) {
    std::unique_ptr<Watcher> watcher(new Watcher(world, context));
    SLUICE_ASSIGN_OR_RETURN(const auto reader, ContextReader::Create(world.device));
    for (int layer = 0; layer < watcher->config_.layers; ++layer) {
      watcher->keys_.emplace_back();
      if (layer % watcher->stride_ != 0) continue;
      watcher->keys_.back() = KeysOf(context, world.model->cache_layout(), layer, *reader);
    }
    return watcher;
  }

  void Step(const QueryWatch& watch) {
    // Layers are distributed over one thread per core: at 64K tokens a step's logits are 13 G
    // products.
    std::atomic<int> next{0};
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < std::min(AvailableCores(), config_.layers); ++i) {
        threads.emplace_back([&] {
          for (int layer = next++; layer < config_.layers; layer = next++) StepLayer(layer, watch);
        });
      }
    }
    ++steps_;
  }

  WorkloadStatistics Finish(double greedy) {
    for (WorkloadStatistics::Layer& layer : out_.layers) {
      layer.cosine /= steps_;
      layer.change /= std::max(steps_ - 1, 1);
    }
    out_.greedy = greedy;
    return std::move(out_);
  }

 private:
  Watcher(const PolicyWorld& world, const Context& context)
      : config_(world.model->config()),
        block_(world.model->cache_layout().kinds[0].block_tokens),
        blocks_(static_cast<int>(context.tokens.size()) / block_),
        count_(std::min(world.options.budget_tokens / block_, blocks_)),
        tokens_(context.tokens.size()),
        stride_(StrideOf(config_, tokens_)),
        first_(static_cast<size_t>(config_.layers * config_.kv_heads)),
        last_(first_.size()) {
    SLUICE_CHECK(config_.head_dim % 16 == 0);
    out_.layers.resize(static_cast<size_t>(config_.layers));
  }

  // Returns a stride of layers with which the host keeps at most 2 GiB of keys: host KV caches have
  // the rest of its memory.
  static int StrideOf(const ModelConfig& config, size_t tokens) {
    constexpr int64_t kMostBytes = int64_t{2} << 30;
    const int64_t bytes = int64_t{config.layers} * config.kv_heads * config.head_dim *
                          static_cast<int64_t>(tokens * sizeof(uint16_t));
    return static_cast<int>((bytes + kMostBytes - 1) / kMostBytes);
  }

  void StepLayer(int layer, const QueryWatch& watch) {
    WorkloadStatistics::Layer& sums = out_.layers[static_cast<size_t>(layer)];
    sums.cosine += watch.MeanCosine(layer);
    if (layer % stride_ != 0) return;
    double change = 0, away = 0;
    for (int head = 0; head < config_.kv_heads; ++head) {
      const auto at = static_cast<size_t>(layer * config_.kv_heads + head);
      Blocks now = Important(layer, head, watch.real(layer).data());
      if (steps_ == 0) {
        first_[at] = now;
      } else {
        change += ShareAway(last_[at], now) / config_.kv_heads;
        away += ShareAway(first_[at], now) / config_.kv_heads;
      }
      last_[at] = std::move(now);
    }
    sums.change += change;
    sums.away.push_back(away);
  }

  Blocks Important(int layer, int kv_head, const float* q) const {
    const int group = config_.heads / config_.kv_heads, dim = config_.head_dim;
    const double scale = 1 / std::sqrt(static_cast<double>(dim));
    const uint16_t* const keys = keys_[static_cast<size_t>(layer)].data() +
                                 static_cast<size_t>(kv_head) * tokens_ * static_cast<size_t>(dim);
    std::vector<double> best(static_cast<size_t>(blocks_), -HUGE_VAL);
    std::vector<float> block_keys(static_cast<size_t>(block_ * dim));
    std::vector<double> logits(static_cast<size_t>(block_));
    for (int block = 0; block < blocks_; ++block) {
      const uint16_t* const from = keys + int64_t{block} * block_ * dim;
      for (size_t i = 0; i < block_keys.size(); ++i) block_keys[i] = BFloat16ToFloat(from[i]);
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (int t = 0; t < block_; ++t) {
          logits[static_cast<size_t>(t)] =
              scale * double{Dot(block_keys.data() + t * dim, q + head * dim, dim)};
        }
        const double top = *std::max_element(logits.begin(), logits.end());
        double sum = 0;
        for (const double logit : logits) sum += std::exp(logit - top);
        double& score = best[static_cast<size_t>(block)];
        score = std::max(score, top + std::log(sum));
      }
    }
    return HighestBlocks(best, count_);
  }

  const ModelConfig config_;
  const int block_, blocks_, count_;
  const size_t tokens_;
  const int stride_;                         // Only every so many layers' blocks are examined.
  std::vector<std::vector<uint16_t>> keys_;  // By layer.
  std::vector<Blocks> first_, last_;         // [layer][kv head]
  int steps_ = 0;
  WorkloadStatistics out_;
};

}  // namespace

double WorkloadStatistics::MeanCosine() const {
  // Layer 0's predicted queries are the real ones.
  double sum = 0;
  for (size_t i = 1; i < layers.size(); ++i) sum += layers[i].cosine;
  return layers.size() < 2 ? 1 : sum / static_cast<double>(layers.size() - 1);
}

double WorkloadStatistics::MeanChange() const {
  double sum = 0;
  int looked_at = 0;
  for (const Layer& layer : layers) {
    if (layer.away.empty()) continue;
    sum += layer.change;
    ++looked_at;
  }
  return looked_at == 0 ? 0 : sum / looked_at;
}

std::vector<double> WorkloadStatistics::MeanAway() const {
  std::vector<double> mean;
  int looked_at = 0;
  for (const Layer& layer : layers) {
    if (layer.away.empty()) continue;
    mean.resize(layer.away.size());
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += layer.away[i];
    ++looked_at;
  }
  for (double& share : mean) share /= looked_at;
  return mean;
}

std::vector<int32_t> HighestBlocks(const std::vector<double>& scores, int count) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  order.resize(std::min(order.size(), static_cast<size_t>(count)));
  std::sort(order.begin(), order.end());
  return order;
}

double ShareAway(const std::vector<int32_t>& before, const std::vector<int32_t>& now) {
  if (now.empty()) return 0;
  std::vector<int32_t> away;
  std::set_difference(now.begin(), now.end(), before.begin(), before.end(),
                      std::back_inserter(away));
  return static_cast<double>(away.size()) / static_cast<double>(now.size());
}

absl::StatusOr<WorkloadStatistics> MeasureWorkload(const PolicyWorld& world, const Context& context,
                                                   absl::Span<const int32_t> next) {
  PolicyWorld one = world;
  one.slots = 1;
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionPolicy> policy, SetUpPolicy(one, "full"));
  const ModelConfig& config = world.model->config();
  SLUICE_ASSIGN_OR_RETURN(
      const std::unique_ptr<QueryWatch> watch,
      QueryWatch::Create(policy.get(), config.layers, config.heads, config.head_dim, world.device));
  SLUICE_ASSIGN_OR_RETURN(
      const std::unique_ptr<Dictation> dictation,
      Dictation::Create({world.device, world.model, watch.get(), world.dram, world.max_context}));
  SLUICE_RETURN_IF_ERROR(
      dictation->Begin(context, static_cast<int>(context.tokens.size() + next.size()) + 1));
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Watcher> watcher, Watcher::Create(world, context));
  int64_t greedy = 0;
  for (const int32_t token : next) {
    SLUICE_ASSIGN_OR_RETURN(const auto logits, dictation->Step());
    greedy += std::max_element(logits.begin(), logits.end()) - logits.begin() == token ? 1 : 0;
    watcher->Step(*watch);
    dictation->Append(token);
  }
  return watcher->Finish(static_cast<double>(greedy) / static_cast<double>(next.size()));
}

}  // namespace sluice::bench
