// Tokens that a layer selects one layer ahead of time, and their way to HBM: the shared part of the
// policies that fetch single tokens (recall, clo). A policy scores tokens and calls Bring, which
// selects; when the layer's turn has come, Attend attends to what has a place in HBM by then.
// Persistent heads (OffloadTier) need no fetch: Add selects for them once the layer's queries are
// known.
//
// It is called while a step is enqueued, on the engine's thread.
#pragma once

#include <algorithm>
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

  struct Shape {
    int64_t most_selected = 0;  // tokens that a row selects of a KV head at most
    int rows = 0;               // decode rows of a step at most
    PolicyOptions::Mover mover = PolicyOptions::Mover::kUva;
    int mover_workers = 0;  // CPU workers of mover kCpu
  };
  // `tier` has units of one token and must outlive the result. RESOURCE_EXHAUSTED: there is no
  // memory for the lists; errors of RowMover::Create come through.
  static absl::StatusOr<std::unique_ptr<TokenFetch>> Create(const PolicyOptions& options,
                                                            OffloadTier* tier, const Shape& shape);

  // Two selections may be under way at once: that of Bring, and that of Add one layer before it.
  // The second is there if a head is persistent.
  enum class Use { kBring, kAdd };
  // Returns where the policy's operators put the scores of a row's tokens: [lists][max_context].
  float* scores(Use use = Use::kBring) const { return Of(use).scores.as<float>(); }
  // Returns how to select by scores(use): `most_selected` tokens, the ring's among them, and no
  // margin, in every list. The policy may change it.
  kernels::TopKParams Selection(const Queries& queries, Use use = Use::kBring) const;
  // Returns the maximum number of tokens of a sequence that have a place in HBM, for each KV head.
  int32_t most_resident() const { return most_resident_; }
  PolicyStatistics Statistics() const;
  // Returns the counters of a layer, for the operators of the policy.
  kernels::SparseCounters* counters(int layer) const { return bring_.counters->of(layer); }
  // Returns the CPU workers of the mover; null: there are none.
  SlotWorkers* workers() const { return mover_->workers(); }

  struct Rule {
    // [lists] 0: the list is left to Add. Null: none is.
    const int32_t* listed = nullptr;
    // True: rows attend to everything that has a place, else to what was selected alone.
    bool whole = true;
    // With `whole`: rows attend in the order of places, which takes less time to list than that of
    // tokens. A row's bits then depend on where its tokens lie.
    bool by_place = false;
    // True: lists that select give all places behind the ring back first, so that everything is
    // fetched anew.
    bool forget = false;
  };
  // Selects, gives every selected token a place in HBM (kernels::BringParams), and fetches those
  // that had none on the stream `fetches`, which comes after `stream`. Lists that do not select
  // keep the places that they have.
  void Bring(Stream& stream, Stream& fetches, int layer, const Queries& predicted,
             const kernels::TopKParams& select, const Rule& rule);
  // Selects for the lists of persistent heads, which are those that `select` wants. It comes
  // between the layer's Bring and Attend. A layer whose heads are all persistent has no Bring.
  void Add(Stream& stream, int layer, const kernels::TopKParams& select);
  // Attends to what Bring and Add found, in the lists that `wanted` names ([lists] not 0; null: in
  // all). REQUIRES: the stream comes after their work, and for Bring's after `fetches`.
  void Attend(Stream& stream, int layer, const Queries& queries, const int32_t* wanted = nullptr);
  // Converts what Attend computed, once it has of every list, to [rows][heads * head_dim] of
  // out_type.
  void Finish(Stream& stream, const Queries& queries, void* out, kernels::DType out_type);

 private:
  struct Scored {
    Buffer scores;  // float [lists][max_context]
    std::unique_ptr<SelectionCounters> counters;
  };
  // The lists of a layer from Bring to Attend. The Bring of the next layer comes between the two.
  struct Chosen {
    Buffer units, places, counts;              // int32 [lists][capacity()] twice, [lists]
    Buffer source_units, target_units, moves;  // int32 [lists][selected] twice, [lists]
  };

  TokenFetch(const PolicyOptions& options, OffloadTier* tier, const Shape& shape);
  absl::Status Allocate();
  absl::Status AllocateScored(Scored* scored) const;
  const Scored& Of(Use use) const { return use == Use::kBring ? bring_ : add_; }
  RowMover::Options MoverOptions(const Shape& shape) const;
  Chosen& ChosenOf(int layer) { return chosen_[static_cast<size_t>(layer) % 2]; }
  kernels::UnitLists Attended(const Chosen& chosen) const {
    return {chosen.units.as<int32_t>(), chosen.counts.as<int32_t>(), capacity()};
  }
  // Returns how many tokens a row attends to at most, of a KV head.
  int32_t capacity() const { return std::max(most_resident_, most_selected_); }
  // Returns a call that selects by `select` and moves nothing.
  kernels::BringParams BringOf(int layer, const kernels::TopKParams& select, const Scored& scored);

  const PolicyOptions options_;
  OffloadTier* const tier_;
  KernelSet& kernels_;
  const int64_t kv_heads_, head_dim_;
  const int64_t rows_;
  const int32_t most_selected_, most_resident_;
  Scored bring_, add_;
  std::array<Chosen, 2> chosen_;  // by a layer's parity
  Buffer o_, lse_;                // float [rows][heads][head_dim], [rows][heads]
  std::unique_ptr<RowMover> mover_;
};

}  // namespace sluice
