// The policy seam: where a sequence's caches are, and how a layer attends to them. A policy is a
// selector (which units of the cache a row attends to), a placement (which of them lie in HBM) and
// a schedule (who attends to what, and when); the parts they are made of are shared.
//
// A policy has two faces. On the engine's thread it places sequences (Admit, Grow, Release); inside
// a step it is called by the model, layer by layer, and only enqueues work: what it needs of a
// sequence there it reads from device tables, by slot. Ahead to EndStep may be recorded once and
// run in many steps (Device::Record), so they decide nothing by what the host knows of the batch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/latent_params.h"
#include "kernels/params.h"
#include "src/attention/policy_statistics.h"
#include "src/device/device.h"
#include "src/kv/cache_layout.h"
#include "src/kv/page_pool.h"
#include "src/kv/selection_hints.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

class AttentionPolicy {
 public:
  virtual ~AttentionPolicy() = default;
  virtual const std::string& name() const = 0;

  // Room that a sequence of `context` handed-over tokens and `total` tokens at its end takes.
  virtual Footprint FootprintOf(int64_t context, int64_t total) const = 0;

  // Tokens of the longest sequence that fits where nothing else is.
  virtual int64_t max_tokens() const = 0;

  // Room now, in tokens of one more sequence; home_tokens is what DRAM could take in.
  struct Headroom {
    PagePool::Headroom hbm;
    TokensByKind home_tokens;
  };
  virtual Headroom HeadroomNow() const = 0;

  // Places a sequence: takes its HBM and starts to copy the first `context` tokens from `home`
  // (null if context is 0). With a soft promise it also takes room in DRAM for the whole sequence,
  // so that it can always be moved out. A home that is too small for `total` (of a sequence that
  // was kept) is made larger. False: no room now, nothing has changed and `home` is still the
  // caller's.
  virtual bool Admit(int slot, int64_t context, int64_t total, Promise promise,
                     std::unique_ptr<SequenceCache>& home) = 0;
  // Whether no copy of the slot is under way: after Admit no step may read it before. Gives up what
  // was only needed for warming.
  virtual bool Warm(int slot) = 0;
  // To wait for Warm.
  virtual Event& WarmEvent(int slot) = 0;
  // Makes places for positions below `tokens`; the device knows them from the slot's next BeginStep
  // on. False: no page is free now (never where HBM is not overcommitted), and nothing has changed.
  virtual bool Grow(int slot, int64_t tokens) = 0;
  // Enqueues what the device has to know of those that grew, before a step's first operator.
  // `slots` and `positions`: of the step's rows, in their order; a sequence's rows are neighbours.
  virtual void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                         absl::Span<const int32_t> positions) = 0;
  // Gives everything back. REQUIRES: Warm(slot), and every step that has the slot is done.
  virtual void Release(int slot) = 0;

  // Of a slot with a soft promise: makes it firm and gives its room in DRAM back; false if there is
  // no room for that now.
  virtual bool MakeFirm(int slot) = 0;
  // Makes room in DRAM for positions below `tokens`, where the sequence has none: it can be moved
  // out from then on. False: no room now.
  virtual bool ReserveHostCopy(int slot, int64_t tokens) = 0;
  // Starts to copy positions below `tokens` to the sequence's room in DRAM. REQUIRES: a soft
  // promise or ReserveHostCopy, Warm(slot), and every step that has the slot is done.
  virtual void Evict(int slot, int64_t tokens) = 0;
  // After Evict, once Warm(slot): releases the slot and returns the home that Admit takes (null if
  // no token was cached).
  virtual std::unique_ptr<SequenceCache> DetachHostCache(int slot) = 0;

  // Decode rows of one sequence that a step may have.
  virtual int decode_rows_per_sequence() const { return kernels::kMaxNewTokens; }
  // Whether a sequence needs EndPrompt before its first decode row: at once after Admit where the
  // whole prompt was handed over, else after the prompt's last step.
  virtual bool NeedsEndPrompt() const { return false; }
  // After Admit: the slot's first `tokens` tokens are its prompt, as EndPrompt will say again. The
  // caches of the first `cached` are there and stay: rows of those are computed again for what they
  // select alone (last_rows_wanted).
  virtual void BeginPrompt(int /*slot*/, int64_t /*tokens*/, int64_t /*cached*/) {}
  // The slot's first `tokens` tokens are its prompt, and computed: starts to make its working set;
  // Warm(slot) says when it is there. Once. REQUIRES: every step of the slot is done. `hints`:
  // the prefill node's, where nothing better is known; kept by some. NOLINTNEXTLINE(performance-*)
  virtual void EndPrompt(int /*slot*/, int64_t /*tokens*/, SelectionHints /*hints*/) {}
  // Of a prompt that was handed over whole, without hints, how many of the last rows are to be
  // computed again, so that EndPrompt knows what they attend to. `total`: as in Admit.
  virtual int last_rows_wanted(int64_t /*total*/) const { return 0; }
  // Tokens of a layer and KV head that hints may name and EndPrompt finds places for; 0: it has no
  // use for hints.
  virtual int64_t hint_tokens() const { return 0; }
  // Not OK: what the slot's sequence was given since Admit may be wrong, and it must end.
  virtual absl::Status SlotHealth(int /*slot*/) const { return absl::OkStatus(); }

  // What was selected and where it lay. REQUIRES: no step is under way, its counters are the
  // device's until it is done.
  virtual PolicyStatistics Statistics() const { return {}; }
  // The same sums as they were some steps ago. Any thread, at any time. Empty: none are kept.
  virtual PolicyStatistics Recent() const { return {}; }
  // Any thread, at any time.
  virtual WorkerStatistics Workers() const { return {}; }
  // Before each step, whose decode rows are so many (padded ones too): whether what Ahead to
  // EndStep enqueue for steps of that size is from now on something else than when one was recorded
  // last, with the same bits. True once for each such change: the engine then records the size
  // again.
  virtual bool WantsRecording(int32_t /*decode_rows*/) { return false; }
  // What it lays beside what, where it chooses. Any thread, at any time.
  virtual ScheduleStatistics Schedules() const { return {}; }
  // The same for people, of steps of so many decode rows; empty: it does not choose.
  virtual std::string DescribeSteps(int32_t /*decode_rows*/) { return ""; }

  // Of its own in HBM (digests, partial keys, averages), what a decode row of a sequence of
  // `tokens` tokens reads and writes in a layer that selects.
  virtual int64_t MetadataBytes(int64_t /*tokens*/) const { return 0; }

  // Queries of decode rows, after q_norm and RoPE.
  struct Queries {
    const float* q = nullptr;  // [rows][stride], heads * head_dim used; padded rows: anything
    int64_t stride = 0;
    const int32_t* slots = nullptr;      // [rows]
    const int32_t* positions = nullptr;  // [rows]
    int32_t rows = 0;
    int32_t heads = 0;
    float scale = 0;
  };
  // Whether Ahead is wanted for a layer.
  virtual bool LooksAhead(int /*layer*/) const { return false; }
  // Before the products of layer `layer` - 1 (of layer 0 itself) are enqueued: what the queries of
  // `layer` will be about, its own norm and projection on the input of the layer before. Layer 0's
  // are the real ones. They are overwritten by the next Ahead.
  //
  // `stream` is branch kAheadBranch of the step's stream, which the model has forked there: what is
  // enqueued on it runs beside layer `layer` - 1, in order with what other calls of Ahead enqueued.
  // At its end Attend(layer) has made the step's stream come After() all that Ahead(layer) enqueued
  // on it (by way of another branch that came After() it here: by then the stream has the next
  // layer's Ahead too, which must not be waited for). What the model reads or writes on behalf of
  // layer + 2 and later relies on that; layer + 1's Ahead may run beside all of Attend(layer).
  virtual void Ahead(Stream& /*stream*/, int /*layer*/, const Queries& /*predicted*/) {}
  static constexpr int kAheadBranch = 0;  // the other branches are the policy's

  // After a step's last operator: what the policy has on branches of the stream (Stream::Branch)
  // comes to its end here.
  virtual void EndStep(Stream& /*stream*/) {}

  // Stage of layer `layer`: RoPE, and keys and values into the cache. `params` but its cache.
  virtual void Append(Stream& stream, int layer, kernels::RopeAppendParams params) = 0;
  // Stage of layer `layer`: attention of the rows over their caches. `params` but its cache.
  virtual void Attend(Stream& stream, int layer, kernels::AttentionParams params) = 0;

  // The same stages of a model with latent caches (kernels/latent_params.h), in place of the two
  // above. REQUIRES: attends_to_latents().
  virtual bool attends_to_latents() const { return false; }
  // Entries and index keys into the caches. `params` but their caches and `written`; where the
  // model has no indexer AppendIndex is not called.
  virtual void AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params);
  virtual void AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params);
  struct LatentAttention {
    // Of the indexer; index_q null: the model has none, and rows attend to everything.
    const void* index_q = nullptr;         // IndexQueryParams::out
    const float* index_weights = nullptr;  // IndexQueryParams::out_weights
    int32_t index_heads = 0;
    int32_t top_k = 0;
    // Makes `q` of all rows (PreAttn: q_b, absorption, RoPE). Called once, in AttendLatent, with
    // the step's stream or a branch of it: it needs nothing that the indexer's results decide.
    absl::FunctionRef<void(Stream&)> make_queries;
    const void* q = nullptr;  // [rows][heads][rank + rope] of the activation type
    const int32_t* slots = nullptr;
    const int32_t* positions = nullptr;
    int32_t rows = 0;
    int32_t decode_rows = 0;
    int32_t heads = 0;
    float scale = 0;
    void* out = nullptr;  // [rows][heads][rank] of out_type
    kernels::DType out_type = kernels::DType::kFloat32;
  };
  virtual void AttendLatent(Stream& stream, int layer, const LatentAttention& attention);
};

}  // namespace sluice
