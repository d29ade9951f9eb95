// Policy `full`: exact attention over everything, everything in HBM. The baseline of all others.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/latent/index_selection.h"
#include "src/attention/policy_options.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"

namespace sluice {

// A full policy shows where a sequence's caches are: a prefill node reads them there.
class FullPolicy : public AttentionPolicy {
 public:
  virtual const SequenceCache& resident(int slot) const = 0;
  // A layer's caches by slot, for operators. REQUIRES: kv_attention() != nullptr.
  virtual kernels::PagedCache LayerCache(int layer) const = 0;
  // `observer` sees what every row selects from now on; null: nobody does. REQUIRES: an indexer.
  virtual void ObserveSelections(SelectionObserver observer) = 0;
};

// Options of a policy alone with its pools, for those who make one without a factory.
inline PolicyOptions PolicyOver(Device* device, PagePool* hbm, int slots, int max_context,
                                PagePool* dram = nullptr) {
  PolicyOptions options;
  options.device = device;
  options.hbm = hbm;
  options.dram = dram;
  options.slots = slots;
  options.max_context = max_context;
  return options;
}

// REQUIRES: one cache kind, of two parts (K, V); or latent caches (latent/latent_views.h), and what
// the options say of them. `options.dram`, where preempted sequences go, may be null where `hbm` is
// not overcommitted.
absl::StatusOr<std::unique_ptr<FullPolicy>> NewFullPolicy(const PolicyOptions& options);

}  // namespace sluice
