// A policy decides where the caches of sequences are and how a layer attends to them. It is a
// selector (which blocks or tokens of the cache a row attends to), a placement (which of them lie
// in HBM) and a schedule (what attends to which of them, and when).
//
// A policy is several small interfaces:
// - SequencePlacement: where a sequence's caches are. The engine calls it, on its thread.
// - KvAttention or LatentAttention: how a layer attends. A model calls the form that its caches
//   need, on the engine's thread, while it enqueues a step. A policy offers one form or both, and
//   returns null for a form that it does not implement.
// - PolicyStatisticsSource: what the policy did. Each function says which threads may call it.
// - The frame of a step, declared here.
//
// A step is BeginStep, then the model's calls layer by layer, then EndStep. Everything from the
// first Ahead to EndStep may be recorded once and run in many steps (Device::Record), so it must
// not depend on what the host knows of the batch; BeginStep is never recorded.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/params.h"
#include "src/attention/kv_attention.h"
#include "src/attention/latent_attention.h"
#include "src/attention/policy_statistics.h"
#include "src/attention/sequence_placement.h"
#include "src/device/device.h"
#include "src/kv/cache_layout.h"

namespace sluice {

class AttentionPolicy : public SequencePlacement, public PolicyStatisticsSource {
 public:
  // Returns the name by which policy_factory.h knows the policy. Any thread.
  virtual const std::string& name() const = 0;

  // Returns the policy's attention over keys and values, or null if it is not for such caches.
  virtual KvAttention* kv_attention() = 0;
  // Returns the policy's attention over latents, or null if it is not for such caches.
  virtual LatentAttention* latent_attention() = 0;

  // Returns up to how many tokens, its own included, a sequence's decode row attends to all of them
  // (or to all that the model's own indexer selects), with its real queries: what it computes is
  // then what policy full computes, within what two kernel paths differ by. At most max_context.
  // Rows of prompts always do. Any thread.
  virtual int64_t exact_tokens() const = 0;

  // The functions below belong to the engine's thread.

  // Returns the maximum number of decode rows that one sequence may have in a step. If there may be
  // several, the last of them may be of drafts (src/engine/drafter.h): positions that the sequence
  // takes back after the step, and computes again in a later one. Nothing that the policy keeps may
  // depend on such a row, except what lies at its position.
  virtual int decode_rows_per_sequence() const { return kernels::kMaxNewTokens; }

  // Returns how often a sequence's first decode row is to be computed in vain before it counts: its
  // caches are written, no token is chosen, and its position stays pending. After such a rehearsal
  // the look-ahead knows a drift, and what the row fetched is in HBM. No row is rehearsed that is
  // exact (exact_tokens).
  virtual int rehearsals() const { return 0; }

  // Returns true if the policy now enqueues something else, with the same bits as result, for steps
  // of `decode_rows` decode rows (including padded rows) than when a step of that size was last
  // recorded. The engine asks before each step and then records that size again. The answer is true
  // once for each such change.
  virtual bool WantsRecording(int32_t /*decode_rows*/) { return false; }

  // Enqueues what the device has to know of the sequences that grew, before a step's first
  // operator. `slots` and `positions` are those of the step's rows, in order; the rows of one
  // sequence are adjacent.
  virtual void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                         absl::Span<const int32_t> positions) = 0;

  // Makes `stream` wait for what the policy enqueued on branches of it (Stream::Branch). The model
  // calls it after the step's last operator.
  virtual void EndStep(Stream& /*stream*/) {}

  // The branches of a step's stream that belong to the model; the others are the policy's. Only
  // models with latent caches have the second.
  static constexpr int kAheadBranch = 0;
  static constexpr int kExchangeBranch = 4;
};

// Returns OK if `policy` offers the form of attention that caches of this layout need, and
// INVALID_ARGUMENT, naming both, if it does not.
absl::Status CheckAttends(AttentionPolicy& policy, const CacheLayout& layout);

// Returns OK if a step may verify `drafts` drafts of a sequence, which are decode rows beside its
// own, and INVALID_ARGUMENT, naming the policy and the setting, if it may not.
absl::Status CheckVerifies(const AttentionPolicy& policy, int drafts);

}  // namespace sluice
