// Forces selections with a given number of misses, to measure the work that can hide transfers. The
// indexer's logits and top-k run as usual, at their full cost; then a copy replaces their lists by
// others, the same for every row and layer.
//
// A list has one position of every `stride` neighbours in a range of top_k * stride positions:
// entry i is
//   i * stride + floor((phase + turn(i)) / top_k) mod stride,
// where turn is a permutation of the entries. If `phase` moves on by m in a step, exactly m of the
// top_k entries take another neighbour, and turn() scatters them over the range, as a model's
// misses are. A position comes back after (stride - 1) * top_k others have come: more than fit in a
// pool that is to miss it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/latent/index_selection.h"
#include "src/device/device.h"

namespace sluice::bench {

class ForcedMisses {
 public:
  struct Options {
    Device* device = nullptr;
    int rows = 0;   // Maximum rows in a step.
    int top_k = 0;  // Entries in the list of each row.
    // Lists use positions [0, tokens); none of them is in the pool at first.
    int64_t tokens = 0;
    int64_t places = 0;  // Slots in a pool.
    // For each step, the entries of its list that are not in the list of the step before. The first
    // step misses all its entries, so its count does not matter.
    std::vector<int32_t> misses;
  };
  // INVALID_ARGUMENT: the pool is so large, or the misses so many, that positions would come back
  // while they are still in the pool. RESOURCE_EXHAUSTED: no memory for the lists.
  static absl::StatusOr<std::unique_ptr<ForcedMisses>> Create(const Options& options);

  // Returns the list at a phase.
  static std::vector<int32_t> ListAt(int64_t phase, int top_k, int64_t stride);

  // Returns the observer for EssProbe::on_selection, which replaces the selection by the lists of
  // the last BeginStep. *this outlives it.
  SelectionObserver Observer();
  // Enqueues the lists of a step's rows. `steps` holds, for each row, its number of steps since the
  // first one; after the last step its list is kept.
  void BeginStep(Stream& stream, absl::Span<const int64_t> steps);

 private:
  ForcedMisses(const Options& options, Buffer lists, Buffer current)
      : options_(options), lists_(std::move(lists)), current_(std::move(current)) {}

  const Options options_;
  const Buffer lists_;    // int32 [misses.size()][top_k]
  const Buffer current_;  // int32 [rows][top_k]
  // Copies of the steps in flight, used in turn.
  static constexpr size_t kSteps = 4;
  std::vector<Stream::CopyOp> copies_[kSteps];
  size_t next_ = 0;
};

}  // namespace sluice::bench
