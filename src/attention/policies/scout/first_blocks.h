// The blocks that a sequence begins with in HBM (section 3.4: "the important blocks identified
// after the prefill phase"): those that its prompt's last position finds important, where that
// position's row was computed here. Its queries are kept, and the selection is made at admission.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "src/attention/offload/prompt_queries.h"
#include "src/attention/policies/scout/block_selection.h"

namespace sluice {

// Engine's thread.
class FirstBlocks {
 public:
  // `tier` outlives the result. RESOURCE_EXHAUSTED: no memory.
  static absl::StatusOr<std::unique_ptr<FirstBlocks>> Create(const PolicyOptions& options,
                                                             const ScoutShape& shape,
                                                             const OffloadTier& tier);

  PromptQueries& queries() { return *queries_; }
  // Brings the blocks that matter to that position into the layer's places. After the digests, on
  // the stream that warms. REQUIRES: queries().Knows, and the row's position is that one.
  void Fetch(Stream& stream, int layer, int slot, const OffloadTier::BulkRow& row) const;

 private:
  FirstBlocks(const ScoutShape& shape, BlockSelection selection,
              std::unique_ptr<PromptQueries> queries)
      : shape_(shape), selection_(std::move(selection)), queries_(std::move(queries)) {}

  const ScoutShape shape_;
  const BlockSelection selection_;  // of one row
  const std::unique_ptr<PromptQueries> queries_;
  // int32 lists of that row, which nobody reads but the operators here.
  Buffer resident_, places_, missing_, counts_;
};

}  // namespace sluice
