// Tokens that a layer selects one layer ahead of time, and their way to HBM: the shared part of the
// policies that fetch single tokens (recall, clo). A policy scores tokens, selects by TopK and
// calls Bring; when the layer's turn has come, Attend attends to what has a place in HBM by then.
//
// It is called while a step is enqueued, on the engine's thread.
#pragma once

#include <array>
#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/kv_attention.h"
#include "src/attention/offload/offload_tier.h"
#include "src/attention/offload/row_mover.h"
#include "src/attention/offload/selection_counters.h"
#include "src/attention/policy_options.h"
#include "src/device/kernel_set.h"

namespace sluice {

class TokenFetch {
 public:
  using Queries = KvAttention::Queries;

  // Makes lists for up to `most_selected` tokens that a row selects of a KV head. `tier` has units
  // of one token and must outlive the result. `options` gives the shape of steps. `mover` fetches
  // the tokens, with `mover_workers` CPU workers if it is kCpu. RESOURCE_EXHAUSTED: there is no
  // memory for the lists; errors of RowMover::Create come through.
  static absl::StatusOr<std::unique_ptr<TokenFetch>> Create(
      const PolicyOptions& options, OffloadTier* tier, int64_t most_selected,
      PolicyOptions::Mover mover = PolicyOptions::Mover::kUva, int mover_workers = 0);

  // Returns where the policy's operators put the scores of a row's tokens: [lists][max_context].
  float* scores() const { return scores_.as<float>(); }
  // Returns the call of TopK that selects by scores() before Bring: `most_selected` tokens, the
  // ring's among them, and no margin. The policy may change it.
  kernels::TopKParams Selection(const Queries& predicted) const;
  // Returns the maximum number of tokens of a sequence that have a place in HBM, for each KV head.
  int32_t most_resident() const { return most_resident_; }
  SelectionCounters& counters() const { return *counters_; }
  // Returns the CPU workers of the mover; null: there are none.
  SlotWorkers* workers() const { return mover_->workers(); }

  // Gives every selected token a place in HBM, by the rule of Recall, and fetches those that had
  // none on the stream `fetches`, which comes after `stream`. With `keeps`, everything that has a
  // place will be attended to, and else what was selected alone, after every place behind the ring
  // was taken back.
  void Bring(Stream& stream, Stream& fetches, int layer, const Queries& predicted, bool keeps);
  // Attends to what Bring found. REQUIRES: the stream comes after `fetches`.
  void Attend(Stream& stream, int layer, const Queries& queries, void* out,
              kernels::DType out_type);

 private:
  // The lists of a layer from Bring to Attend. The Bring of the next layer comes between the two.
  struct Chosen {
    Buffer units, places, counts;              // int32 [lists][resident] twice, [lists]
    Buffer source_units, target_units, moves;  // int32 [lists][selected] twice, [lists]
  };

  TokenFetch(const PolicyOptions& options, OffloadTier* tier, int32_t most_selected);
  absl::Status Allocate();
  RowMover::Options MoverOptions() const;
  Chosen& ChosenOf(int layer) { return chosen_[static_cast<size_t>(layer) % 2]; }
  kernels::UnitLists Lists(const Buffer& units, const Buffer& counts) const {
    return {units.as<int32_t>(), counts.as<int32_t>(), most_selected_};
  }
  kernels::UnitLists Attended(const Chosen& chosen) const {
    return {chosen.units.as<int32_t>(), chosen.counts.as<int32_t>(), most_resident_};
  }
  kernels::UnitLists selected() const { return Lists(selected_, selected_counts_); }
  kernels::UnitLists missing() const { return Lists(missing_, missing_counts_); }
  void Split(Stream& stream, int layer, const Queries& predicted, bool forget, bool whole);
  void GivePlaces(Stream& stream, int layer, const Queries& predicted);

  const PolicyOptions options_;
  OffloadTier* const tier_;
  KernelSet& kernels_;
  const int64_t kv_heads_, head_dim_;
  const int32_t most_selected_, most_resident_;
  Buffer scores_;                      // float [lists][max_context]
  Buffer selected_, selected_counts_;  // int32 [lists][most_selected], [lists]
  Buffer missing_, missing_counts_;    // the same
  Buffer since_, due_;                 // int32 [layers][slots], [rows]
  std::array<Chosen, 2> chosen_;       // by a layer's parity
  Buffer o_, lse_;                     // float [rows][heads][head_dim], [rows][heads]
  std::unique_ptr<SelectionCounters> counters_;
  std::unique_ptr<RowMover> mover_;
};

}  // namespace sluice
