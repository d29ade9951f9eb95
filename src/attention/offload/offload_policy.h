// The base of every policy over the offload tiers. It implements what they have in common: a
// sequence's life in the tiers, new tokens written to HBM and to the host cache ("home"), rows of
// prompts (which attend to the whole host cache) and dense layers. A policy adds how a decode row
// attends in a sparse layer.
//
// Threads are those of the interfaces that it implements: SequencePlacement and the frame of a step
// on the engine's thread, KvAttention while a step is enqueued.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/offload/offload_tier.h"
#include "src/attention/offload/slot_workers.h"
#include "src/attention/policy_options.h"

namespace sluice {

class OffloadPolicy : public AttentionPolicy, public KvAttention {
 public:
  // Returns the maximum number of decode rows in a step, including padded rows.
  static int MaxDecodeRows(const PolicyOptions& options);
  // Allocates the constructor's `written`.
  static absl::StatusOr<Buffer> AllocateWritten(const PolicyOptions& options);

  const std::string& name() const override { return name_; }
  KvAttention* kv_attention() override { return this; }
  LatentAttention* latent_attention() override { return nullptr; }
  int64_t exact_tokens() const override;
  Footprint FootprintOf(int64_t context, int64_t total) const override;
  int64_t max_tokens() const override;
  Headroom HeadroomNow() const override;
  // REQUIRES: a firm promise. EndPrompt makes the working set; until then the slot may have only
  // prompt rows.
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

  // No sequence is preempted, so promises are always firm. A sequence that is moved out for good is
  // in its host cache already.
  bool MakeFirm(int slot) override;
  bool ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) override;
  const SequenceCache* HostCache(int slot) const override;
  SequenceCache* HostCacheOfPrompt(int slot) override;
  void Evict(int slot, int64_t tokens) override;
  std::unique_ptr<SequenceCache> DetachHostCache(int slot) override;

  void Append(Stream& stream, int layer, kernels::RopeAppendParams params) override;
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override;
  // Makes the stream come After() every branch. The next step reads what this one leaves behind:
  // residency tables and the places that a recall fills, arrays, host caches.
  void EndStep(Stream& stream) override;

 protected:
  // `written` comes from AllocateWritten(options).
  OffloadPolicy(const PolicyOptions& options, std::unique_ptr<OffloadTier> tier, Buffer written);
  int max_decode_rows() const { return MaxDecodeRows(options_); }

  // Branches of a step's stream, beside that of Ahead. There is one for each parity of layers, for
  // what a layer waits for while its neighbours have the same under way (answers of workers,
  // fetched tokens), one for work that nothing waits for before the step's end (Settle), and one
  // for a part of a layer's attention that goes beside another.
  static Stream& LayerBranch(Stream& stream, int layer) { return stream.Branch(1 + layer % 2); }
  static Stream& SettlingBranch(Stream& stream) { return stream.Branch(3); }
  static Stream& AsideBranch(Stream& stream) { return stream.Branch(4); }

  // Enqueues attention of decode rows in a sparse layer to `out`, [rows][heads * head_dim] of
  // out_type. The rows' own keys and values are in the ring and on their way to the host cache. At
  // its end `stream` comes after everything that Ahead(layer) put on branches.
  virtual void AttendSparse(Stream& stream, int layer, const Queries& queries, void* out,
                            kernels::DType out_type) = 0;
  // Returns exact_tokens() of sparse layers. Nothing above max_context counts.
  virtual int64_t SparseExactTokens() const = 0;
  // Enqueues what the rows of a sparse layer mean for later steps, on a branch that comes after the
  // layer's attention: nothing in this step waits for it or reads what it writes. The queries
  // themselves are gone (q is null), because the next layer's take their place.
  virtual void Settle(Stream& /*stream*/, int /*layer*/, const Queries& /*rows*/) {}
  // Returns whether attention of decode rows reads their own keys and values from the host cache.
  // They are then written there before it, on the stream itself.
  virtual bool attends_at_home() const { return false; }
  // Gives the unit that leaves the ring at the next step a place behind it, so that what was in HBM
  // stays there while there is room: instead of the unit that was selected longest ago, or, with
  // `only_free`, where a place is free. Called from Settle.
  void Retain(Stream& stream, int layer, const Queries& rows, bool only_free = false) const;
  // Returns how many units of a sequence of `tokens` tokens are older than the ring of its first
  // decode row.
  int64_t UnitsBeforeRing(int64_t tokens) const;
  // Returns how many of these units the slot's sequence has places for.
  int64_t PlacesBehindRing(int slot, int64_t tokens) const;
  // Returns the units with which a sequence of `tokens` tokens begins in HBM, for each sparse layer
  // and KV head, in the order of OffloadTier::WarmUp. The default is the first block, the units
  // that the hints name, and the newest units before the ring: all units where the places suffice.
  virtual std::vector<std::vector<int32_t>> FirstUnits(int slot, int64_t tokens,
                                                       const SelectionHints& hints);
  // Enqueues what the policy's arrays need for a sequence that is being warmed.
  virtual void BuildArrays(Stream& stream, int slot, int64_t tokens,
                           const OffloadTier::BulkRow& row);
  // Waits for all warm-ups. Destructors call it, because a warm-up under way uses what BuildArrays
  // was given.
  void AwaitWarmUps();

  // Returns the workers that read host caches beside the device; null: there are none. Every
  // sequence joins them.
  virtual SlotWorkers* slot_workers() const { return nullptr; }
  // Called when a sequence has come into the slot, and when one is about to leave it.
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
  // [layers][MaxDecodeRows][kv_heads][2][head_dim]: K and V of a step. Each layer has its own part,
  // so that the next layer need not wait until this one's are in the host cache.
  const Buffer written_;
  std::vector<int64_t> totals_;  // length of each slot's sequence at its end, in tokens
};

}  // namespace sluice
