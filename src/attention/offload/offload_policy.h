// What every policy over the offload tiers does alike: a sequence's life in the tiers, new tokens
// written to HBM and home, rows of prompts (which attend to all of the home) and dense layers. A
// policy adds how a decode row attends in a sparse layer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/offload/co_attention.h"
#include "src/attention/offload/offload_tier.h"
#include "src/attention/policy_options.h"

namespace sluice {

class OffloadPolicy : public AttentionPolicy, public KvAttention {
 public:
  // Decode rows of a step at most, padded ones counted.
  static int MaxDecodeRows(const PolicyOptions& options);
  // Of the constructor.
  static absl::StatusOr<Buffer> AllocateWritten(const PolicyOptions& options);

  const std::string& name() const override { return name_; }
  KvAttention* kv_attention() override { return this; }
  LatentAttention* latent_attention() override { return nullptr; }
  Footprint FootprintOf(int64_t context, int64_t total) const override;
  int64_t max_tokens() const override;
  Headroom HeadroomNow() const override;
  // REQUIRES: a firm promise. The working set is EndPrompt's; until then there are prompt rows
  // only.
  bool Admit(int slot, int64_t context, int64_t total, Promise promise,
             std::unique_ptr<SequenceCache>& home) override;
  bool Warm(int slot) override;
  Event& WarmEvent(int slot) override;
  bool Grow(int slot, int64_t tokens) override;
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override;
  void Release(int slot) override;
  bool NeedsEndPrompt() const override { return true; }
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override;
  int64_t hint_tokens() const override;
  int decode_rows_per_sequence() const override { return 1; }
  absl::Status SlotHealth(int slot) const override;
  WorkerStatistics Workers() const override;

  // Nothing is preempted: promises are firm. What is moved out for good is at home already.
  bool MakeFirm(int slot) override;
  bool ReserveHostCopy(int slot, int64_t tokens) override;
  void Evict(int slot, int64_t tokens) override;
  std::unique_ptr<SequenceCache> DetachHostCache(int slot) override;

  void Append(Stream& stream, int layer, kernels::RopeAppendParams params) override;
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override;
  // The stream comes After() every branch. What a step leaves behind is the next step's to read:
  // residency tables and the places that a recall fills, arrays, homes.
  void EndStep(Stream& stream) override;

 protected:
  // `written`: AllocateWritten(options).
  OffloadPolicy(const PolicyOptions& options, std::unique_ptr<OffloadTier> tier, Buffer written);
  int max_decode_rows() const { return MaxDecodeRows(options_); }

  // Branches of a step's stream, beside that of Ahead: one for each parity of layers, for what a
  // layer waits for while its neighbours have the same under way (answers of workers, fetched
  // tokens); and one for what nobody waits for before the step's end (Settle).
  static Stream& LayerBranch(Stream& stream, int layer) { return stream.Branch(1 + layer % 2); }
  static Stream& SettlingBranch(Stream& stream) { return stream.Branch(3); }

  // Attention of decode rows in a sparse layer, their keys and values being in the ring and on
  // their way home: to `out`, [rows][heads * head_dim] of out_type. At its end `stream` comes after
  // all that Ahead(layer) put on branches.
  virtual void AttendSparse(Stream& stream, int layer, const Queries& queries, void* out,
                            kernels::DType out_type) = 0;
  // What follows from the rows of a sparse layer for later steps, on a branch that comes after its
  // attention: nothing of this step waits for it, nor reads what it writes. The queries themselves
  // are gone (q is null): the next layer's take their place.
  virtual void Settle(Stream& /*stream*/, int /*layer*/, const Queries& /*rows*/) {}
  // Whether attention of decode rows reads their own keys and values at home: then they are written
  // there before it, on the stream itself.
  virtual bool attends_at_home() const { return false; }
  // The units that a sequence of `tokens` tokens begins with in HBM, of each sparse layer and KV
  // head, as OffloadTier::WarmUp takes them. Default: the first block, those of the hints, and the
  // newest before the ring.
  virtual std::vector<std::vector<int32_t>> FirstUnits(int slot, int64_t tokens,
                                                       const SelectionHints& hints);
  // Enqueues what the policy's arrays need of a sequence that is being warmed.
  virtual void BuildArrays(Stream& stream, int slot, int64_t tokens,
                           const OffloadTier::BulkRow& row);
  // For destructors: a warm-up under way uses what BuildArrays was given of the policy's own.
  void AwaitWarmUps();

  // Who reads sequences' homes beside the device; null: nobody.
  virtual CoAttention* co_attention() const { return nullptr; }
  // A sequence has come into the slot; one is about to leave it.
  virtual void Joined(int /*slot*/) {}
  virtual void Left(int /*slot*/) {}

  OffloadTier& tier() const { return *tier_; }
  KernelSet& kernels() const;
  const PolicyOptions& options() const { return options_; }
  const CacheKind& kv() const { return options_.hbm->layout().kinds[0]; }

 private:
  void* written(int layer) const;
  void WriteHome(Stream& stream, int layer, const int32_t* slots, const int32_t* positions,
                 int32_t rows) const;

  const std::string name_;
  const PolicyOptions options_;
  const std::unique_ptr<OffloadTier> tier_;
  // [layers][MaxDecodeRows][kv_heads][2][head_dim]: K and V of a step. Each layer has its own, so
  // that the next one need not wait until this one's are at home.
  const Buffer written_;
  std::vector<int64_t> totals_;  // tokens of each slot's sequence at its end
};

}  // namespace sluice
