// The placement of sequences: where their caches are. It is the part of a policy that the engine
// calls to admit a sequence to a slot, to grow it, to evict it from HBM and to release it.
//
// Only the engine's thread may call it. Copies that a call starts run on streams of the policy, and
// the call does not wait for them.
//
// A slot's life is: Admit, Warm until it is true, then Grow and steps in turn, then Release. Evict,
// Warm until it is true and DetachHostCache may come in place of Release. If NeedsEndPrompt() is
// true, EndPrompt and Warm until it is true come between the last step with prompt rows and the
// first decode row.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/kv/selection_hints.h"
#include "src/kv/sequence_cache.h"
#include "src/kv/shared_prefix.h"

namespace sluice {

class SequencePlacement {
 public:
  virtual ~SequencePlacement() = default;

  // Returns the capacity that a sequence takes which has `context` handed-over tokens at first and
  // `total` tokens at its end.
  virtual Footprint FootprintOf(int64_t context, int64_t total) const = 0;

  // Returns the length in tokens of the longest sequence that fits into empty pools.
  virtual int64_t max_tokens() const = 0;

  // Free capacity, in tokens of one more sequence.
  struct Headroom {
    PagePool::Headroom hbm;
    TokensByKind home_tokens;  // tokens that DRAM could take
    int sequences = 0;         // with several ranks: sequences that run there, or are to run there
  };
  virtual Headroom HeadroomNow() const = 0;

  // Returns how many ranks have sequences of their own, each with pools of its own. A host cache is
  // of the rank that its pool says (PagePool::rank), and its sequence runs there.
  virtual int ranks() const { return 1; }
  // Returns the free capacity of a rank.
  virtual Headroom HeadroomOf(int /*rank*/) const { return HeadroomNow(); }
  // Says on which rank Admit places a sequence that has no host cache, from now on.
  virtual void UseRank(int /*rank*/) {}
  // Returns the rank that has, or last had, the slot's sequence.
  virtual int RankOf(int /*slot*/) const { return 0; }

  // Places a sequence in `slot`: takes its HBM and starts to copy the first `context` tokens from
  // `home`, the sequence's host cache (null if `context` is 0). With a soft promise it also
  // reserves DRAM for the whole sequence, so that the sequence can always be evicted. A host cache
  // that is too small for `total` tokens (because the sequence was kept after an earlier request)
  // is enlarged. Returns false if there is no capacity now; then nothing has changed and `home`
  // still belongs to the caller.
  virtual bool Admit(int slot, int64_t context, int64_t total, Promise promise,
                     std::unique_ptr<SequenceCache>& home) = 0;

  // Returns whether no copy of the slot is under way, and frees what only the copies needed. After
  // Admit, no step may read the slot before Warm has returned true.
  virtual bool Warm(int slot) = 0;
  // Returns an event to wait for when Warm returned false. Ask again afterwards: a slot may have
  // more than one thing to wait for.
  virtual Event& WarmEvent(int slot) = 0;

  // Makes positions below `tokens` writable. The device learns of them in the slot's next
  // AttentionPolicy::BeginStep. Returns false if no page is free now (this never happens where HBM
  // is not overcommitted); then nothing has changed.
  virtual bool Grow(int slot, int64_t tokens) = 0;

  // Releases everything that the slot holds. REQUIRES: Warm(slot), and every step that has the slot
  // is done.
  virtual void Release(int slot) = 0;

  // Turns the soft promise of a slot into a firm one and gives its reserved DRAM back. Returns
  // false if there is no capacity for that now.
  virtual bool MakeFirm(int slot) = 0;

  // Reserves DRAM for positions below `tokens` where the sequence has none, so that it can be
  // evicted from then on. `prefix` is a share of its first blocks, if they lie in DRAM already. A
  // sequence that has a host cache or a soft promise does not need it. Returns false if there is no
  // capacity now.
  virtual bool ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) = 0;

  // Starts to copy positions below `tokens` to the sequence's reserved DRAM. REQUIRES: a soft
  // promise or ReserveHostCopy, Warm(slot), and every step that has the slot is done.
  virtual void Evict(int slot, int64_t tokens) = 0;

  // Releases the slot and returns its host cache, which Admit takes again (null if no token was
  // cached). REQUIRES: Evict(slot) was called, and Warm(slot) since.
  virtual std::unique_ptr<SequenceCache> DetachHostCache(int slot) = 0;

  // Returns the host cache that the slot has now, or null.
  virtual const SequenceCache* HostCache(int /*slot*/) const { return nullptr; }

  // Returns the slot's host cache if the prompt's rows write to it, so that it has the caches of a
  // computed prompt; else null.
  virtual SequenceCache* HostCacheOfPrompt(int /*slot*/) { return nullptr; }

  // Returns whether the host cache that Admit takes may have blocks that other sequences may share
  // from then on. It may not where a part of the blocks is given back while the sequence runs.
  virtual bool shares_host_caches() const { return true; }

  // Returns whether a sequence needs EndPrompt before its first decode row. EndPrompt is then due
  // directly after Admit where the whole prompt was handed over, and otherwise after the last step
  // with rows of the prompt.
  virtual bool NeedsEndPrompt() const { return false; }

  // Announces, after Admit, that the slot's first `tokens` tokens are its prompt; EndPrompt will
  // name the same number. The caches of the first `cached` tokens are complete and stay as they
  // are: rows of those tokens are computed again only for what they select (last_rows_wanted).
  virtual void BeginPrompt(int /*slot*/, int64_t /*tokens*/, int64_t /*cached*/) {}

  // Starts to make the working set of the slot, whose first `tokens` tokens are its prompt and are
  // computed; Warm(slot) says when the working set is complete. `hints` come from the prefill node
  // and are used where the policy knows nothing better. REQUIRES: called once per sequence, and
  // every step of the slot is done.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  virtual void EndPrompt(int /*slot*/, int64_t /*tokens*/, SelectionHints /*hints*/) {}

  // Returns how many of the last rows of a prompt are to be computed again, when the prompt was
  // handed over whole and without hints, so that EndPrompt knows what those rows attend to. `total`
  // is as in Admit.
  virtual int last_rows_wanted(int64_t /*total*/) const { return 0; }

  // Returns the tokens for each layer and KV head that hints may name and EndPrompt can place; 0 if
  // the policy does not use hints.
  virtual int64_t hint_tokens() const { return 0; }

  // Returns the numbers of hints' queries that EndPrompt has a use for, layers x query heads x
  // head_dim; 0 if the policy has none.
  virtual int64_t hint_queries() const { return 0; }

  // Returns an error if what the slot's sequence was given since Admit may be wrong; the sequence
  // must then end.
  virtual absl::Status SlotHealth(int /*slot*/) const { return absl::OkStatus(); }
};

}  // namespace sluice
