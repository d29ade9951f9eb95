// A policy that forwards every call to another: the base of policies that only watch. An override
// does its own part and calls the function of the same name here. It offers the forms of attention
// that the other policy offers.
#pragma once

#include <memory>
#include <string>

#include "src/attention/attention_policy.h"

namespace sluice {

class ForwardingPolicy : public AttentionPolicy, public KvAttention, public LatentAttention {
 public:
  // `policy` outlives this.
  explicit ForwardingPolicy(AttentionPolicy* policy) : policy_(policy) {}

  const std::string& name() const override { return policy_->name(); }
  KvAttention* kv_attention() override {
    return policy_->kv_attention() == nullptr ? nullptr : this;
  }
  LatentAttention* latent_attention() override {
    return policy_->latent_attention() == nullptr ? nullptr : this;
  }
  int64_t exact_tokens() const override { return policy_->exact_tokens(); }
  Footprint FootprintOf(int64_t context, int64_t total) const override {
    return policy_->FootprintOf(context, total);
  }
  int64_t max_tokens() const override { return policy_->max_tokens(); }
  Headroom HeadroomNow() const override { return policy_->HeadroomNow(); }
  int ranks() const override { return policy_->ranks(); }
  Headroom HeadroomOf(int rank) const override { return policy_->HeadroomOf(rank); }
  void UseRank(int rank) override { policy_->UseRank(rank); }
  int RankOf(int slot) const override { return policy_->RankOf(slot); }
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
  bool ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) override {
    return policy_->ReserveHostCopy(slot, tokens, std::move(prefix));
  }
  const SequenceCache* HostCache(int slot) const override { return policy_->HostCache(slot); }
  SequenceCache* HostCacheOfPrompt(int slot) override { return policy_->HostCacheOfPrompt(slot); }
  bool shares_host_caches() const override { return policy_->shares_host_caches(); }
  void Evict(int slot, int64_t tokens) override { policy_->Evict(slot, tokens); }
  std::unique_ptr<SequenceCache> DetachHostCache(int slot) override {
    return policy_->DetachHostCache(slot);
  }
  int decode_rows_per_sequence() const override { return policy_->decode_rows_per_sequence(); }
  int rehearsals() const override { return policy_->rehearsals(); }
  bool NeedsEndPrompt() const override { return policy_->NeedsEndPrompt(); }
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override {
    policy_->EndPrompt(slot, tokens, std::move(hints));
  }
  void BeginPrompt(int slot, int64_t tokens, int64_t cached) override {
    policy_->BeginPrompt(slot, tokens, cached);
  }
  int last_rows_wanted(int64_t total) const override { return policy_->last_rows_wanted(total); }
  int64_t hint_queries() const override { return policy_->hint_queries(); }
  int64_t hint_tokens() const override { return policy_->hint_tokens(); }
  absl::Status SlotHealth(int slot) const override { return policy_->SlotHealth(slot); }
  PolicyStatistics Statistics() const override { return policy_->Statistics(); }
  PolicyStatistics Recent() const override { return policy_->Recent(); }
  WorkerStatistics Workers() const override { return policy_->Workers(); }
  bool WantsRecording(int32_t decode_rows) override { return policy_->WantsRecording(decode_rows); }
  ScheduleStatistics Schedules() const override { return policy_->Schedules(); }
  LinkStatistics Link() const override { return policy_->Link(); }
  std::string DescribeSteps(int32_t decode_rows) override {
    return policy_->DescribeSteps(decode_rows);
  }
  int64_t MetadataBytes(int64_t tokens) const override { return policy_->MetadataBytes(tokens); }
  int64_t HostMetadataBytes(int64_t tokens) const override {
    return policy_->HostMetadataBytes(tokens);
  }
  bool LooksAhead(int layer) const override { return policy_->kv_attention()->LooksAhead(layer); }
  bool FollowsDrift() const override { return policy_->kv_attention()->FollowsDrift(); }
  bool LooksEarly() const override { return policy_->kv_attention()->LooksEarly(); }
  void Ahead(Stream& stream, int layer, const Queries& predicted) override {
    policy_->kv_attention()->Ahead(stream, layer, predicted);
  }
  void EndStep(Stream& stream) override { policy_->EndStep(stream); }
  void Append(Stream& stream, int layer, kernels::RopeAppendParams params) override {
    policy_->kv_attention()->Append(stream, layer, params);
  }
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override {
    policy_->kv_attention()->Attend(stream, layer, params);
  }
  void AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                    int32_t first_row) override {
    policy_->latent_attention()->AppendLatent(stream, layer, params, first_row);
  }
  void AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) override {
    policy_->latent_attention()->AppendIndex(stream, layer, params);
  }
  void AttendLatent(Stream& stream, int layer, const Params& params) override {
    policy_->latent_attention()->AttendLatent(stream, layer, params);
  }

 private:
  AttentionPolicy* const policy_;
};

}  // namespace sluice
