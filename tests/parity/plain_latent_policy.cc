#include "tests/parity/plain_latent_policy.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice::testing {

PlainLatentPolicy::PlainLatentPolicy(Device* device, const ModelConfig& config,
                                     const CacheLayout& layout, int max_rows, int max_context)
    : device_(device),
      config_(config),
      layout_(layout),
      max_context_(max_context),
      event_(device->NewEvent()) {
  const auto allocate = [&](MemoryKind kind, int64_t bytes) {
    return *device->Allocate(kind, static_cast<size_t>(bytes), "test");
  };
  const LatentConfig& latent = *config.latent;
  const int64_t capacity = latent.indexer.has_value() ? latent.indexer->top_k : max_context;
  for (int layer = 0; layer < layout.layers; ++layer) {
    for (const CacheKind& kind : layout.kinds) {
      caches_.push_back(
          allocate(MemoryKind::kDevice, kind.BlocksFor(max_context) * kind.page_bytes()));
    }
    selected_.push_back(allocate(MemoryKind::kDevice, max_rows * capacity * 4));
    scores_.push_back(allocate(MemoryKind::kDevice, int64_t{max_rows} * max_context * 4));
  }
  counts_ = allocate(MemoryKind::kDevice, int64_t{max_rows} * 4);
  host_counts_ = allocate(MemoryKind::kPinned, int64_t{max_rows} * 4);
  scratch_ = allocate(MemoryKind::kDevice, device->kernels().SparseMlaScratchBytes(
                                               max_rows, config.heads, latent.rank, capacity));
  const int64_t blocks = layout.kinds[0].BlocksFor(max_context);
  table_ = allocate(MemoryKind::kDevice, blocks * 4);
  const Buffer host = allocate(MemoryKind::kPinned, blocks * 4);
  std::iota(host.as<int32_t>(), host.as<int32_t>() + blocks, 0);
  const std::unique_ptr<Stream> stream = device->NewStream(Device::StreamKind::kCopy);
  stream->Copy(table_.data(), host.data(), static_cast<size_t>(blocks) * 4);
  stream->Record(*event_);
  event_->Wait();
}

void PlainLatentPolicy::BeginStep(Stream& stream, absl::Span<const int32_t> /*slots*/,
                                  absl::Span<const int32_t> positions) {
  if (config_.latent->indexer.has_value()) return;
  std::transform(positions.begin(), positions.end(), host_counts_.as<int32_t>(),
                 [](int32_t position) { return position + 1; });
  stream.Copy(counts_.data(), host_counts_.data(), positions.size() * 4);
}

void PlainLatentPolicy::ForceSelection(const std::vector<std::vector<int32_t>>& lists) {
  forced_.clear();
  for (const std::vector<int32_t>& list : lists) {
    forced_.push_back(*device_->Allocate(MemoryKind::kPinned, (list.size() + 1) * 4, "test"));
    auto* words = forced_.back().as<int32_t>();
    words[0] = static_cast<int32_t>(list.size());
    std::copy(list.begin(), list.end(), words + 1);
  }
}

kernels::PagedLatents PlainLatentPolicy::Latents(int layer) const {
  const CacheKind& kind = layout_.kinds[0];
  return {Cache(layer, 0).data(),   table_.as<int32_t>(), 0,
          kind.page_bytes(),        kind.block_tokens,    config_.latent->rank,
          config_.latent->rope_dim, kind.element_type};
}

kernels::PagedIndexKeys PlainLatentPolicy::Keys(int layer) const {
  const CacheKind& kind = layout_.kinds[1];
  return {Cache(layer, 1).data(), table_.as<int32_t>(), 0,
          kind.page_bytes(),      kind.block_tokens,    kind.element_type};
}

void PlainLatentPolicy::AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                                     int32_t /*first_row*/) {
  params.cache = Latents(layer);
  device_->kernels().LatentAppend(stream, params);
}

void PlainLatentPolicy::AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) {
  params.cache = Keys(layer);
  device_->kernels().IndexAppend(stream, params);
}

void PlainLatentPolicy::AttendLatent(Stream& stream, int layer, const Params& a) {
  a.make_queries(stream);
  KernelSet& kernels = device_->kernels();
  kernels::SparseMlaParams mla{};
  mla.capacity = max_context_;
  if (a.index_q != nullptr) {
    kernels::IndexLogitsParams logits{};
    logits.q = a.index_q;
    logits.weights = a.index_weights;
    logits.slots = a.slots;
    logits.positions = a.positions;
    logits.cache = Keys(layer);
    logits.scores = scores_[static_cast<size_t>(layer)].as<float>();
    logits.score_stride = max_context_;
    logits.rows = a.rows;
    logits.heads = a.index_heads;
    kernels.IndexLogits(stream, logits);
    kernels::TopKParams top{};
    top.scores = logits.scores;
    top.score_stride = logits.score_stride;
    top.slots = a.slots;
    top.positions = a.positions;
    top.selected = {Selected(layer).as<int32_t>(), counts_.as<int32_t>(), a.top_k};
    top.rows = a.rows;
    top.kv_heads = top.unit_tokens = 1;
    top.k = a.top_k;
    top.margin = std::numeric_limits<float>::infinity();
    kernels.TopK(stream, top);
    if (!forced_.empty()) {
      const Buffer& list = forced_[static_cast<size_t>(layer)];
      stream.Copy(top.selected.counts, list.data(), 4);
      stream.Copy(top.selected.units, list.as<int32_t>() + 1, list.bytes() - 4);
    }
    mla.entries = top.selected.units;
    mla.capacity = a.top_k;
  }
  mla.q = a.q;
  mla.slots = a.slots;
  mla.cache = Latents(layer);
  mla.counts = counts_.as<int32_t>();
  mla.out = a.out;
  mla.scratch = scratch_.data();
  mla.scratch_bytes = static_cast<int64_t>(scratch_.bytes());
  mla.rows = a.rows;
  mla.decode_rows = a.decode_rows;
  mla.heads = a.heads;
  mla.scale = a.scale;
  mla.q_type = mla.out_type = a.out_type;
  kernels.SparseMla(stream, mla);
}

}  // namespace sluice::testing
