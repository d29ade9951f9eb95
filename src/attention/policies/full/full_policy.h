// Policy `full`: exact attention over everything, everything in HBM. The baseline of all others.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/latent/index_selection.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"

namespace sluice {

struct FullPolicyOptions {
  Device* device = nullptr;
  PagePool* hbm = nullptr;
  int slots = 0;
  int64_t max_context = 0;
  PagePool* dram = nullptr;  // where preempted sequences go; needed where `hbm` is overcommitted
  // Of a model with latent caches.
  int heads = 0;
  int latent_rank = 0;  // latent values of an entry
  int index_top_k = 0;  // 0: no indexer
  int max_rows = 0;     // of a step
};

// A full policy shows where a sequence's caches are: a prefill node reads them there.
class FullPolicy : public AttentionPolicy {
 public:
  virtual const SequenceCache& resident(int slot) const = 0;
  // A layer's caches by slot, for operators. REQUIRES: !attends_to_latents().
  virtual kernels::PagedCache LayerCache(int layer) const = 0;
  // `observer` sees what every row selects from now on; null: nobody does. REQUIRES: an indexer.
  virtual void ObserveSelections(SelectionObserver observer) = 0;
};

// REQUIRES: one cache kind, of two parts (K, V); or latent caches (latent/latent_views.h).
absl::StatusOr<std::unique_ptr<FullPolicy>> NewFullPolicy(const FullPolicyOptions& options);

}  // namespace sluice
