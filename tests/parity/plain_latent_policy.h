// The smallest policy that attends to latent caches, for tests of models. It has one sequence,
// whose caches are plain arrays that a test may read and write, and it shows what was selected.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/attention/attention_policy.h"
#include "src/model/model_config.h"

namespace sluice::testing {

class PlainLatentPolicy : public AttentionPolicy, public LatentAttention {
 public:
  // REQUIRES: every allocation succeeds.
  PlainLatentPolicy(Device* device, const ModelConfig& config, const CacheLayout& layout,
                    int max_rows, int max_context);

  // Returns a layer's blocks of a kind, on the device.
  const Buffer& Cache(int layer, size_t kind) const {
    return caches_[static_cast<size_t>(layer) * layout_.kinds.size() + kind];
  }
  // Selections of the last step, on the device: [rows][top_k] and [rows].
  const Buffer& Selected(int layer) const { return selected_[static_cast<size_t>(layer)]; }
  const Buffer& Counts() const { return counts_; }
  // Index scores, float [rows][max_context].
  const Buffer& Scores(int layer) const { return scores_[static_cast<size_t>(layer)]; }

  // Forces what row 0 of every step attends to from now on, by layer. Empty: the indexer selects.
  void ForceSelection(const std::vector<std::vector<int32_t>>& lists);

  const std::string& name() const override { return name_; }
  KvAttention* kv_attention() override { return nullptr; }
  LatentAttention* latent_attention() override { return this; }
  void AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                    int32_t first_row) override;
  void AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) override;
  void AttendLatent(Stream& stream, int layer, const Params& params) override;

  // Placement does nothing: the caches are always there.
  Footprint FootprintOf(int64_t context, int64_t total) const override { return {context, total}; }
  int64_t exact_tokens() const override { return max_context_; }
  int64_t max_tokens() const override { return max_context_; }
  Headroom HeadroomNow() const override { return {}; }
  bool Admit(int, int64_t, int64_t, Promise, std::unique_ptr<SequenceCache>&) override {
    return true;
  }
  bool Warm(int) override { return true; }
  Event& WarmEvent(int) override { return *event_; }
  bool Grow(int, int64_t) override { return true; }
  // `positions` are the next step's.
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override;
  void Release(int) override {}
  bool MakeFirm(int) override { return true; }
  bool ReserveHostCopy(int, int64_t, SharedPrefix) override { return true; }
  void Evict(int, int64_t) override {}
  std::unique_ptr<SequenceCache> DetachHostCache(int) override { return nullptr; }

 private:
  kernels::PagedLatents Latents(int layer) const;
  kernels::PagedIndexKeys Keys(int layer) const;

  const std::string name_ = "plain";
  Device* const device_;
  const ModelConfig config_;
  const CacheLayout layout_;
  const int max_context_;
  std::unique_ptr<Event> event_;
  std::vector<Buffer> caches_;    // [layers][kinds]
  std::vector<Buffer> selected_;  // int32 [layers][max_rows * top_k]
  std::vector<Buffer> scores_;    // float [layers][max_rows * max_context]
  Buffer counts_;                 // int32 [max_rows]
  Buffer host_counts_;            // Used without an indexer: positions + 1.
  Buffer table_;                  // int32; block b is page b.
  Buffer scratch_;
  // Pinned: a count and a list for each layer, used where the selection is forced.
  std::vector<Buffer> forced_;
};

}  // namespace sluice::testing
