// The blocks with which a sequence begins in HBM (section 3.4: "the important blocks identified
// after the prefill phase"). They are those that the prompt's last position finds important, if
// that position's row was computed on this node: its queries are kept, and the selection is made
// when the prompt has ended.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "src/attention/offload/prompt_queries.h"
#include "src/attention/policies/scout/block_selection.h"

namespace sluice {

// Only the engine's thread may call it.
class FirstBlocks {
 public:
  // `tier` outlives the result. RESOURCE_EXHAUSTED: there is no memory.
  static absl::StatusOr<std::unique_ptr<FirstBlocks>> Create(const PolicyOptions& options,
                                                             const ScoutShape& shape,
                                                             const OffloadTier& tier);

  PromptQueries& queries() { return *queries_; }
  // Fetches the blocks that matter to the last position into the layer's places. It comes after the
  // digests, on the stream that warms. REQUIRES: queries().Knows, and `row` is that position's.
  void Fetch(Stream& stream, int layer, int slot, const OffloadTier::BulkRow& row) const;

 private:
  FirstBlocks(const ScoutShape& shape, BlockSelection selection,
              std::unique_ptr<PromptQueries> queries)
      : shape_(shape), selection_(std::move(selection)), queries_(std::move(queries)) {}

  const ScoutShape shape_;
  const BlockSelection selection_;  // made for one row
  const std::unique_ptr<PromptQueries> queries_;
  // int32, the lists of that row. Only the operators here read them.
  Buffer resident_, places_, missing_, counts_;
};

}  // namespace sluice
