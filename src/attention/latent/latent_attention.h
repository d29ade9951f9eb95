// Attention of a layer's rows to latent caches that lie wholly in HBM: the indexer's selection, and
// attention over what it selects; without an indexer, over everything. Any number of rows of a
// sequence, of any kind.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/latent/index_selection.h"
#include "src/attention/latent_attention.h"
#include "src/device/device.h"

namespace sluice {

class ResidentLatentAttention {
 public:
  struct Options {
    Device* device = nullptr;
    int heads = 0;        // query heads
    int rank = 0;         // latent values of an entry
    int top_k = 0;        // of the indexer; 0: there is none
    int max_rows = 0;     // of a step
    int decode_rows = 0;  // of a step, that are attended to in one piece of work
    int64_t max_context = 0;
  };
  // RESOURCE_EXHAUSTED: no memory for scores, lists and scratch.
  static absl::StatusOr<std::unique_ptr<ResidentLatentAttention>> Create(const Options& options);
  ~ResidentLatentAttention();

  // `positions`: of the rows of the step that is about to be enqueued.
  void BeginStep(Stream& stream, absl::Span<const int32_t> positions);
  // `keys`: null where there is no indexer. The queries are made beside the selection's top-k,
  // where the device has branches: neither needs the other, and scores need the whole bandwidth.
  void Attend(Stream& stream, int layer, const kernels::PagedLatents& latents,
              const kernels::PagedIndexKeys* keys, const LatentAttention::Params& attention);
  void Observe(SelectionObserver observer);

 private:
  explicit ResidentLatentAttention(const Options& options) : options_(options) {}
  // Branch 0 is of those that look ahead.
  static constexpr int kQueryBranch = 1;

  const Options options_;
  std::unique_ptr<IndexSelection> selection_;  // null: no indexer
  Buffer scratch_;                             // of SparseMla
  // Without an indexer: a row attends to position + 1 entries.
  Buffer counts_;  // int32 [max_rows]
  struct HostCounts {
    Buffer memory;
    std::unique_ptr<Event> done;
  };
  std::array<HostCounts, 2> host_counts_;  // in turn, as the engine's steps
  size_t next_counts_ = 0;
};

}  // namespace sluice
