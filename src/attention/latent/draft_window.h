// The caches and the attention of a draft layer (multi-token prediction): the newest entries of
// each sequence in a ring of pages of its own, apart from the policy's caches. So it is the same
// under every policy, and a sequence's other caches do not know of it.
//
// A row attends to the newest kDraftWindow entries up to its own. Up to that context this is what
// an indexer of 2,048 tokens would select; beyond it, older tokens no longer count in drafts, which
// costs acceptance and never changes an answer, since every draft is verified.
//
// The entries of tokens whose rows this node did not compute are missing: of a prompt that was
// handed over, and of all that came before a preemption. Begin says where a sequence's entries
// start. (A hand-off of a "draft" kind of cache could bring them.)
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/latent_attention.h"
#include "src/device/device.h"
#include "src/kv/cache_layout.h"

namespace sluice {

// Entries that a row attends to.
inline constexpr int64_t kDraftWindow = 2048;

class DraftWindow : public LatentAttention {
 public:
  struct Options {
    Device* device = nullptr;
    const CacheLayout* layout = nullptr;  // of the model's caches: the form and blocks of entries
    int heads = 0;                        // query heads
    int rank = 0;                         // latent values of an entry
    int rope = 0;                         // RoPE values of an entry
    int slots = 0;
    int max_rows = 0;     // of a step
    int decode_rows = 0;  // of a step, which are attended to in one piece of work
    int64_t max_context = 0;
    int64_t window = kDraftWindow;  // entries that a row attends to, at most
  };
  // Returns the bytes of the caches that Create allocates for such options, without the rest.
  static int64_t CacheBytes(const Options& options);
  // RESOURCE_EXHAUSTED: there is no memory for the caches, lists and scratch.
  static absl::StatusOr<std::unique_ptr<DraftWindow>> Create(const Options& options);

  // Enqueues that the slot's sequence has entries from position `first` on, as its next rows write
  // them. REQUIRES: what was enqueued for the slot before is done.
  void Begin(Stream& stream, int slot, int32_t first);

  // Only layer 0 may be asked for, and rows that are decode rows may follow others of their slot
  // that lie at most kMaxNewTokens before them.
  void AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                    int32_t first_row) override;
  void AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) override;
  void AttendLatent(Stream& stream, int layer, const Params& params) override;

 private:
  explicit DraftWindow(const Options& options);
  absl::Status Allocate();
  // Writes the table of pages: block b of a slot is block b % ring_blocks_ of the slot's ring.
  void FillTable();
  kernels::PagedLatents Entries() const;

  const Options options_;
  const int32_t window_;       // entries that a row attends to, at most
  const int64_t blocks_;       // of max_context
  const int64_t ring_blocks_;  // of a slot's ring
  Buffer entries_;             // [slots][ring_blocks_] pages
  Buffer table_;               // int32 [slots][blocks_] page numbers
  Buffer begins_;              // int32 [slots]
  Buffer host_begins_;         // the same, on the host
  Buffer lists_;               // UnitLists [max_rows] of window_ positions
  Buffer scratch_;             // of SparseMla
};

}  // namespace sluice
