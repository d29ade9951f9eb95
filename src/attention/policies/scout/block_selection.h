// Block selection of policy scout: the operators of one layer that choose which blocks rows attend
// to, find where those lie and fetch the missing ones, with scratch memory of their own.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/sparse_params.h"
#include "src/attention/attention_policy.h"
#include "src/attention/offload/block_recall.h"
#include "src/attention/offload/offload_tier.h"
#include "src/attention/policy_options.h"
#include "src/device/device.h"

namespace sluice {

// The numbers that decide every size. There is one list for each (row, KV head).
struct ScoutShape {
  int32_t layers = 0;
  int32_t dense_layers = 0;
  int32_t slots = 0;
  int32_t rows = 0;  // maximum decode rows of a step, including padded rows
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_tokens = 0;
  int32_t budget_blocks = 0;  // blocks selected per list
  // Blocks per list whose key codes are scored, of a short row and of the longest ones; 0: none.
  int32_t shortlist_blocks = 0, least_shortlist = 0;
  int32_t recall_blocks = 0;    // KV slots beside the ring, in blocks
  int32_t resident_blocks = 0;  // most blocks per list that the device attends to
  int32_t most_blocks = 0;      // blocks of the longest sequence
};

// The first block and the newest are always attended to.
inline constexpr int32_t kScoutFirstBlocks = 1;
inline constexpr int32_t kScoutLastBlocks = 1;

// Blocks of the ring: the newest, and the one before it, so that a recall may take a step. All of
// the ring is selected if the budget has room for it: just after a block has begun, the newest one
// is only a few tokens, and digests are a poor judge of the one before (README.md).
inline constexpr int32_t kScoutRingBlocks = 2;

// Indices of the tier's arrays. There are key codes only where shortlist_blocks is above 0.
inline constexpr size_t kScoutDigests = 0;
inline constexpr size_t kScoutKeyCodes = 1;

// The shortlist of any row holds so many budgets.
inline constexpr int32_t kScoutShortlistBudgets = 2;

class BlockSelection {
 public:
  // Makes a selection for up to `rows` rows. Choose must be called on one stream at a time, and so
  // must Fetch. `tier` outlives the result. RESOURCE_EXHAUSTED: there is no memory.
  static absl::StatusOr<BlockSelection> Create(const PolicyOptions& options,
                                               const ScoutShape& shape, int rows,
                                               const OffloadTier& tier);

  struct Split {
    kernels::UnitLists resident;
    int32_t* places;  // places of the resident blocks, as kernels::SplitParams has them
    kernels::UnitLists missing;
  };
  // Section 3.2: selects the blocks with the highest scores and splits them by where they lie. The
  // blocks with the highest digest scores make a shortlist, whose scores are computed again from
  // key codes. The newest block's digest may not include the rows' own tokens yet; that block is
  // selected without a score. Returns the selected lists, which stay valid until the next call.
  kernels::UnitLists Choose(Stream& stream, int layer, const KvAttention::Queries& queries,
                            const Split& split) const;

  // Section 3.4: fetches the missing blocks of the due rows, as BlockRecall says.
  void Fetch(Stream& stream, int layer, const KvAttention::Queries& queries,
             const kernels::UnitLists& missing, const int32_t* due,
             kernels::SparseCounters* counters) const {
    recall_.Fetch(stream, layer, queries, missing, due, counters);
  }

 private:
  BlockSelection(const PolicyOptions& options, const ScoutShape& shape, const OffloadTier& tier,
                 BlockRecall recall)
      : reduction_(options.reduction),
        narrowed_(options.scout.narrowed),
        whole_(options.scout.attend_whole),
        shape_(shape),
        device_(options.device),
        tier_(&tier),
        recall_(std::move(recall)) {}

  // Selects the `k` blocks with the highest of `scores_`, more of short rows
  // (kernels::TopKParams::short_k).
  void SelectBest(Stream& stream, const KvAttention::Queries& queries, int32_t k, int32_t short_k,
                  const kernels::UnitLists& selected) const;
  // Computes the scores of the blocks with the highest digest scores again, from key codes.
  void Refine(Stream& stream, int layer, const KvAttention::Queries& queries) const;

  kernels::GroupReduction reduction_;
  float narrowed_;
  bool whole_;
  ScoutShape shape_;
  Device* device_;
  const OffloadTier* tier_;
  BlockRecall recall_;
  Buffer scores_;                        // float [lists][most_blocks]
  Buffer shortlist_, shortlist_counts_;  // int32 [lists][shortlist_blocks], [lists]
  Buffer selected_, selected_counts_;    // int32 [lists][budget_blocks], [lists]
};

}  // namespace sluice
