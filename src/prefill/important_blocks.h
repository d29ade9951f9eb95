// Finds the blocks of a prompt that its last row attends to most, for each layer and KV head. They
// are hints that say with which blocks a decode node begins. The choice is exact: a block counts
// the sum, over the heads of the group, of the row's attention weights in it. It reads the keys
// once more, for one row of a prompt. It also keeps the row's queries.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/sparse_params.h"
#include "src/device/device.h"
#include "src/kv/cache_layout.h"
#include "src/kv/selection_hints.h"

namespace sluice {

// Serves one prompt at a time.
class ImportantBlocks {
 public:
  // Serves prompts of up to `max_context` tokens. RESOURCE_EXHAUSTED if there is no memory for the
  // lists.
  static absl::StatusOr<std::unique_ptr<ImportantBlocks>> Create(Device* device,
                                                                 const CacheLayout& layout,
                                                                 int heads, int64_t max_context);

  // Enqueues on the stream the choice of up to `count` blocks of the layer, by the last row of
  // `params`, whose keys are in `cache`.
  void Find(Stream& stream, int layer, const kernels::AttentionParams& params,
            const kernels::PagedCache& cache, int32_t count);
  // Returns the blocks of all layers and, if wanted, the row's queries. Blocking. REQUIRES: every
  // Find has run.
  SelectionHints Read(Stream& stream, int32_t count, bool want_queries) const;

 private:
  ImportantBlocks(Device* device, const CacheLayout& layout, int heads, int64_t max_context);

  Device* const device_;
  const int layers_;
  const int kv_heads_;
  const int block_tokens_;
  const int64_t most_blocks_;
  const int64_t row_values_;  // heads * head_dim
  Buffer scores_;             // float [kv_heads][most_blocks]
  Buffer units_;              // int32 [layers][kv_heads][most_blocks], `count` of each list in use
  Buffer counts_;             // int32 [layers][kv_heads]
  Buffer queries_;            // float [layers][heads][head_dim], of the last row
  Buffer read_;               // pinned: units, then counts
  Buffer read_queries_;       // pinned: queries
};

}  // namespace sluice
