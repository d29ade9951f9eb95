// Attention of a layer's rows to latent caches that lie wholly in HBM: the indexer selects, and
// attention covers what it selects. A model without an indexer attends to everything. A step may
// have any number of rows of a sequence, of any kind.
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
    int heads = 0;        // Query heads.
    int rank = 0;         // Latent values of an entry.
    int top_k = 0;        // Entries that the indexer selects; 0: there is no indexer.
    int max_rows = 0;     // Maximum rows of a step.
    int decode_rows = 0;  // Decode rows of a step, which are attended to in one piece of work.
    int64_t max_context = 0;
    int sequence_rows = 1;  // Most decode rows of one sequence in a step.
  };
  // RESOURCE_EXHAUSTED: there is no memory for scores, lists and scratch.
  static absl::StatusOr<std::unique_ptr<ResidentLatentAttention>> Create(const Options& options);
  ~ResidentLatentAttention();

  // `positions` are those of the rows of the step that is about to be enqueued.
  void BeginStep(Stream& stream, absl::Span<const int32_t> positions);
  // `keys` is null if there is no indexer. Where the device has branches, the queries are made
  // beside the selection's top-k: neither needs the other, and scores need the whole bandwidth.
  void Attend(Stream& stream, int layer, const kernels::PagedLatents& latents,
              const kernels::PagedIndexKeys* keys, const LatentAttention::Params& attention);
  void Observe(SelectionObserver observer);

 private:
  explicit ResidentLatentAttention(const Options& options) : options_(options) {}
  // Branch 0 belongs to operators that look ahead.
  static constexpr int kQueryBranch = 1;

  const Options options_;
  std::unique_ptr<IndexSelection> selection_;  // Null: no indexer.
  Buffer scratch_;                             // Scratch memory of SparseMla.
  // Used without an indexer: a row attends to position + 1 entries.
  Buffer counts_;  // int32 [max_rows]
  struct HostCounts {
    Buffer memory;
    std::unique_ptr<Event> done;
  };
  std::array<HostCounts, 2> host_counts_;  // Used in turn, like the engine's steps.
  size_t next_counts_ = 0;
};

}  // namespace sluice
