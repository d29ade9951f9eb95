// Drafting on the device: behind the sampling of a step, the model's draft layer runs over all of
// the step's rows, and so writes its caches for every token whose row this node computes. The last
// accepted row of each sequence drafts, and its drafts come back with the step's results: there is
// no further word between host and device.
//
// Draft number 0 of a row at position p follows from the token that the row chose, at p + 1, and
// its hidden state; it is the token at p + 2. Each further draft takes another pass of the one
// layer, with its own output and its last draft, at the next position. The entries that this
// writes, and those of rows that were refuted, lie behind the sequence's end, where its next rows
// write theirs.
//
// Only the engine's thread may call it.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/latent/draft_window.h"
#include "src/device/device.h"
#include "src/model/model.h"

namespace sluice {

class DeviceDrafts {
 public:
  struct Options {
    int slots = 0;
    int max_context = 0;
    int drafts = 0;       // of a sequence in a step, at most kernels::kMaxDeviceDrafts
    int max_samples = 0;  // rows of a step that choose a token
  };
  // REQUIRES: model.drafts(). RESOURCE_EXHAUSTED: there is no memory for the layer's caches.
  static absl::StatusOr<std::unique_ptr<DeviceDrafts>> Create(const Options& options,
                                                              Device* device, const Model& model);

  // Enqueues that the slot has a new sequence, the first row of which will be at `first`. REQUIRES:
  // no step that has the slot is under way.
  void Begin(Stream& stream, int slot, int32_t first) { window_->Begin(stream, slot, first); }

  // A step, as the device sees it.
  struct Step {
    DraftInputs rows;           // all of the step's; tokens are the histories
    int32_t* tokens = nullptr;  // the histories
    // The rows that chose a token, [samples] each (SettleDraftsParams).
    const int32_t* sample_slots = nullptr;
    const int32_t* sample_positions = nullptr;
    const int32_t* sample_rows = nullptr;
    const int32_t* chosen = nullptr;
    int32_t samples = 0;
    float* logits = nullptr;  // [samples][vocab], to be overwritten
    void* scratch = nullptr;  // of Sample
    int32_t* out = nullptr;   // [drafts][samples] drafts, kNoDraft, or -1: not finite
  };
  // Enqueues the drafts of a step, behind its forward pass and its sampling.
  void Enqueue(Stream& stream, const Step& step, Model& model) const;

 private:
  DeviceDrafts(const Options& options, Device* device, int vocab)
      : options_(options), device_(device), vocab_(vocab) {}
  absl::Status Allocate();
  int32_t* SlotsOfDrafts() const { return memory_.as<int32_t>(); }
  int32_t* RowsOfDrafts() const { return SlotsOfDrafts() + options_.max_samples; }
  int32_t* Positions() const { return RowsOfDrafts() + options_.max_samples; }
  void Settle(Stream& stream, const Step& step) const;
  // Enqueues the choice of draft number `draft` from the logits.
  void Choose(Stream& stream, const Step& step, int draft) const;

  const Options options_;
  Device* const device_;
  const int vocab_;
  std::unique_ptr<DraftWindow> window_;
  Buffer memory_;   // int32: slots and rows [max_samples], positions [drafts + 1][max_samples]
  Buffer numbers_;  // int32 [max_samples]: 0, 1, ...
  Buffer greedy_;   // SamplingSlot [slots], all greedy
};

}  // namespace sluice
