// Selections with a set number of misses, for measurements of what lies beneath transfers. The
// indexer's logits and top-k run as ever, at their full cost; then a copy puts other lists in place
// of theirs, the same for every row and layer.
//
// Of a range of top_k * stride positions a list has one of each `stride` neighbours: entry i is
//   i * stride + floor((phase + turn(i)) / top_k) mod stride,
// turn a permutation of the entries. A step that moves `phase` on by m takes another neighbour for
// exactly m of the top_k entries, and turn() scatters them over the range, as misses of a model
// are. A position comes back after (stride - 1) * top_k others have come: more than a pool that is
// to miss it can hold.
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
    int rows = 0;   // of a step at most
    int top_k = 0;  // entries of a list, which each row has
    // Positions that lists are made of: [0, tokens), none of them in the pool at first.
    int64_t tokens = 0;
    int64_t places = 0;  // of a pool
    // By step: entries of its list that were not in that of the step before. The first step's count
    // does not matter: it misses all.
    std::vector<int32_t> misses;
  };
  // INVALID_ARGUMENT: a pool so large, or so many misses, that positions would come back while they
  // are there; RESOURCE_EXHAUSTED: no memory for the lists.
  static absl::StatusOr<std::unique_ptr<ForcedMisses>> Create(const Options& options);

  // The list at a phase.
  static std::vector<int32_t> ListAt(int64_t phase, int top_k, int64_t stride);

  // Replaces what was selected; for EssProbe::on_selection. Lists are those of the last
  // BeginStep. *this outlives it.
  SelectionObserver Observer();
  // Enqueues the lists of a step's rows, by their number of steps since the first one; the last
  // step's list is kept after it.
  void BeginStep(Stream& stream, absl::Span<const int64_t> steps);

 private:
  ForcedMisses(const Options& options, Buffer lists, Buffer current)
      : options_(options), lists_(std::move(lists)), current_(std::move(current)) {}

  const Options options_;
  const Buffer lists_;    // int32 [misses.size()][top_k]
  const Buffer current_;  // int32 [rows][top_k]
  // Copies of the steps under way, in turn.
  static constexpr size_t kSteps = 4;
  std::vector<Stream::CopyOp> copies_[kSteps];
  size_t next_ = 0;
};

}  // namespace sluice::bench
