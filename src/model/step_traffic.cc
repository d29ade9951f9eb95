#include "src/model/step_traffic.h"

#include <algorithm>

namespace sluice {
namespace {

// Returns the bytes of a step of a model with latent caches. A row reads its index keys and the
// entries that it attends to.
MemoryTraffic BytesOfLatentStep(const StepModel& model, const PolicyStatistics& statistics,
                                int batch, double tokens) {
  const ModelConfig& c = model.config;
  const CacheLayout& layout = model.layout;
  const auto entry = static_cast<double>(layout.kinds[0].bytes_per_token);
  const double key =
      layout.kinds.size() > 1 ? static_cast<double>(layout.kinds[1].bytes_per_token) : 0;
  const double selected =
      c.latent->indexer.has_value() ? std::min<double>(c.latent->indexer->top_k, tokens) : tokens;
  MemoryTraffic sum;  // Of one row, until the return.
  for (int layer = 0; layer < c.layers; ++layer) {
    sum.hbm += entry + key + tokens * key + selected * entry;
    const auto at = static_cast<size_t>(layer);
    if (at >= statistics.layers.size()) continue;  // Nothing leaves HBM.
    sum.to_host += entry;
    const PolicyStatistics::Layer& of = statistics.layers[at];
    if (of.steps == 0) continue;
    const double missed = static_cast<double>(of.missing) / static_cast<double>(of.steps) * entry;
    sum.hbm += missed;
    sum.to_device += missed;
  }
  const auto weights =
      static_cast<double>(model.weight_bytes - int64_t{c.vocab_size} * c.hidden_size * 2);
  return {weights + batch * sum.hbm, batch * sum.to_device, batch * sum.to_host, 0};
}

}  // namespace

MemoryTraffic BytesOfStep(const StepModel& model, AttentionPolicy& policy,
                          const PolicyStatistics& statistics, int batch, double tokens) {
  const ModelConfig& c = model.config;
  if (c.latent.has_value()) return BytesOfLatentStep(model, statistics, batch, tokens);
  const CacheKind& kv = model.layout.kinds[0];
  const auto unit = static_cast<double>(kv.bytes_per_token);  // K and V of one token and head.
  const double own = kv.heads * unit;                         // The row's own token.
  const double values = sizeof(float) * static_cast<double>(c.heads);
  const WorkerStatistics served = policy.Workers();
  const bool workers = served.workers > 0 && served.duty == WorkerDuty::kAttend;
  // Workers that gather read the host KV cache and write staging, which the device reads.
  const double of_dram = served.workers > 0 && !workers ? 3 : 1;
  const auto q_weights = 2.0 * c.hidden_size * c.heads * c.head_dim;
  const int64_t embedding = c.tie_word_embeddings ? 0 : int64_t{c.vocab_size} * c.hidden_size * 2;

  MemoryTraffic sum;  // Of one row, until the return.
  double shared = static_cast<double>(model.weight_bytes - embedding);
  for (int layer = 0; layer < c.layers; ++layer) {
    sum.hbm += own;
    if (!statistics.layers.empty()) sum.to_host += own;
    const auto at = static_cast<size_t>(layer);
    const PolicyStatistics::Layer none;
    const PolicyStatistics::Layer& of =
        at < statistics.layers.size() ? statistics.layers[at] : none;
    const bool looks_up = of.lookups > 0;
    if (of.steps == 0 ||
        (of.selected == 0 && of.resident_selected == 0 && !looks_up)) {  // The layer is dense.
      sum.hbm += tokens * own;
      continue;
    }
    const auto rows = static_cast<double>(of.steps);
    const double missing = static_cast<double>(of.missing) / rows * unit;
    const double recalled = static_cast<double>(of.recalled) / rows * unit;
    const double brought = workers ? recalled : std::max(recalled, missing);
    sum.hbm += static_cast<double>(of.resident_selected) / rows * unit;
    const auto metadata = static_cast<double>(policy.MetadataBytes(static_cast<int64_t>(tokens)));
    if (looks_up) {
      // A head attends to what it selected at its last miss. Heads that miss read metadata, and
      // those that have no lookups, because their whole cache lies in HBM.
      const double each = of.misses > 0
                              ? static_cast<double>(of.selected) / static_cast<double>(of.misses)
                              : std::min(static_cast<double>(policy.exact_tokens()), tokens);
      const double missed = static_cast<double>(of.misses) / static_cast<double>(of.lookups);
      const double offloaded = static_cast<double>(of.lookups) / rows;
      const double select = 1 - offloaded / kv.heads * (1 - missed);
      sum.hbm += offloaded * each * unit + brought + select * metadata;
    } else {
      sum.hbm += static_cast<double>(of.selected) / rows * unit - (workers ? missing : 0) +
                 brought + metadata;
    }
    sum.to_device += brought;
    sum.dram += of_dram * brought + (workers ? missing : 0) +
                static_cast<double>(policy.HostMetadataBytes(static_cast<int64_t>(tokens)));
    // The queries of layer 0 are the real ones.
    if (policy.kv_attention()->LooksAhead(layer) && layer > 0) shared += q_weights;
    if (!workers) continue;
    sum.to_host += values * c.head_dim;
    sum.to_device += values * (c.head_dim + 1);
  }
  return {shared + batch * sum.hbm, batch * sum.to_device, batch * sum.to_host, batch * sum.dram};
}

StepFloor FloorOf(const MemoryTraffic& bytes, const MemoryTraffic& rates) {
  const double link = std::max(bytes.to_device / rates.to_device, bytes.to_host / rates.to_host);
  StepFloor floor{bytes.hbm / rates.hbm, "HBM"};
  if (link > floor.seconds) floor = {link, "link"};
  if (bytes.dram / rates.dram > floor.seconds) floor = {bytes.dram / rates.dram, "DRAM"};
  return floor;
}

}  // namespace sluice
