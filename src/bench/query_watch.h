// Policy full with an eye on its queries: the real ones of every layer, and those that the layer
// before predicted. What selection has to work with, whatever the policy.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/attention_policy.h"
#include "src/device/device.h"

namespace sluice {

class QueryWatch : public AttentionPolicy {
 public:
  // `policy` outlives this. The queries of a step's first row are kept.
  static absl::StatusOr<std::unique_ptr<QueryWatch>> Create(AttentionPolicy* policy, int layers,
                                                            int heads, int head_dim,
                                                            Device* device);
  // [heads * head_dim], after RoPE. REQUIRES: the step is done.
  absl::Span<const float> real(int layer) const { return Row(real_, layer); }
  absl::Span<const float> predicted(int layer) const { return Row(predicted_, layer); }

  const std::string& name() const override { return policy_->name(); }
  Footprint FootprintOf(int64_t context, int64_t total) const override {
    return policy_->FootprintOf(context, total);
  }
  int64_t max_tokens() const override { return policy_->max_tokens(); }
  Room RoomNow() const override { return policy_->RoomNow(); }
  bool Admit(int slot, int64_t context, int64_t total, Promise promise,
             std::unique_ptr<SequenceCache>& home) override {
    return policy_->Admit(slot, context, total, promise, home);
  }
  bool Warm(int slot) override { return policy_->Warm(slot); }
  Event& WarmEvent(int slot) override { return policy_->WarmEvent(slot); }
  bool Grow(int slot, int64_t tokens) override { return policy_->Grow(slot, tokens); }
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    policy_->BeginStep(stream, slots, positions);
  }
  void Release(int slot) override { policy_->Release(slot); }
  bool MakeFirm(int slot) override { return policy_->MakeFirm(slot); }
  void Evict(int slot, int64_t tokens) override { policy_->Evict(slot, tokens); }
  std::unique_ptr<SequenceCache> TakeHome(int slot) override { return policy_->TakeHome(slot); }
  bool LooksAhead(int /*layer*/) const override { return true; }
  void Ahead(Stream& stream, int layer, const Queries& predicted) override;
  void Append(Stream& stream, int layer, kernels::RopeAppendParams params) override {
    policy_->Append(stream, layer, params);
  }
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override;

 private:
  QueryWatch(AttentionPolicy* policy, int size, Buffer real, Buffer predicted)
      : policy_(policy), size_(size), real_(std::move(real)), predicted_(std::move(predicted)) {}
  float* At(const Buffer& buffer, int layer) const { return buffer.as<float>() + layer * size_; }
  absl::Span<const float> Row(const Buffer& buffer, int layer) const {
    return {At(buffer, layer), static_cast<size_t>(size_)};
  }

  AttentionPolicy* const policy_;
  const int size_;                 // heads * head_dim
  const Buffer real_, predicted_;  // pinned, [layers][size_]
};

}  // namespace sluice
