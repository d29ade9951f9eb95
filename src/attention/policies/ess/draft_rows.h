// The rows of drafts under policy ess: what each decode row changes in its sequence's pools is
// written down, and is undone before the next step if the row's draft was refuted. The pools are
// then those of a sequence that never drafted, to the last place, stamp and entry, so that its
// later rows have the same lists and the same bits. Only the engine's thread calls it.
//
// A sequence has taken rows back if its next step begins at a position that it has had before.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/latent_params.h"
#include "src/attention/policies/ess/ess_tier.h"
#include "src/device/device.h"

namespace sluice {

class DraftRows {
 public:
  struct Options {
    Device* device = nullptr;
    const EssTier* tier = nullptr;
    int slots = 0;
    int rows = 0;   // Most decode rows of a sequence in a step.
    int top_k = 0;  // Entries that a row selects.
  };
  // RESOURCE_EXHAUSTED: there is no memory for the journals. REQUIRES: the tier outlives the
  // result.
  static absl::StatusOr<std::unique_ptr<DraftRows>> Create(const Options& options);
  ~DraftRows();

  // Must be called when a sequence moves into the slot. Without `undoes`, its rows change nothing
  // that matters (it holds every token's entry in the place of its number) and are not undone.
  void Join(int slot, bool undoes);
  // Undoes what was refuted since the last step, and remembers this step's decode rows. It is
  // called before the step's first operator; nothing of it may be recorded. `slots` and `positions`
  // are the step's rows, of which those of slots that `generates` are decode rows.
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions, const std::vector<bool>& generates);
  // Where a layer's UpdateResidency writes down what its rows change.
  kernels::ResidencyJournal Journal(int layer) const;

 private:
  struct Slot {
    bool undoes = false;
    int32_t end = 0;  // Behind the positions of the last step's rows; 0: there was none.
  };
  // Holds what is to be undone, on its way to the device: int32 [slots] last positions, then
  // [slots] rows.
  struct Staging {
    Buffer words;
    std::unique_ptr<Event> done;
  };

  explicit DraftRows(const Options& options);
  int64_t layer_lists() const { return int64_t{options_.slots} * options_.rows; }
  int64_t capacity() const { return options_.top_k + 1; }
  // Enqueues the undoing of what `staging` says.
  void TakeBack(Stream& stream, const Staging& staging);

  const Options options_;
  std::vector<Slot> slots_;
  // Used in turn: at most one step is under way when the next begins.
  std::array<Staging, 2> stagings_;
  size_t next_ = 0;
  Buffer undone_;                   // As Staging::words.
  Buffer places_, units_, stamps_;  // int32 [layers][slots][rows][capacity]
  Buffer counts_, moves_;           // int32 [layers][slots][rows]
};

}  // namespace sluice
