// Policy `full`: exact attention over the whole context, all of it in HBM. It is the baseline of
// all other policies.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/latent/index_selection.h"
#include "src/attention/policy_options.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"

namespace sluice {

// A full policy also admits a sequence whose host cache lies in HBM already, which then is its
// cache: it begins with blocks that others share. A full policy exposes where a sequence's caches
// are; a prefill node reads them there.
class FullPolicy : public AttentionPolicy {
 public:
  virtual const SequenceCache& resident(int slot) const = 0;
  // Returns the same, for whoever shares its blocks. REQUIRES: every step that has the slot is
  // done.
  virtual SequenceCache& MutableResident(int slot) = 0;
  // Returns a layer's caches by slot, for operators. REQUIRES: kv_attention() != nullptr.
  virtual kernels::PagedCache LayerCache(int layer) const = 0;
  // Makes `observer` see what every row selects from now on; null ends that. REQUIRES: an indexer.
  virtual void ObserveSelections(SelectionObserver observer) = 0;
};

// Returns the options of a policy that is made without a factory.
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

// Makes the policy. REQUIRES: one cache kind of two parts (K, V), or latent caches
// (latent/latent_views.h) and the options that describe them. `options.dram`, where preempted
// sequences go, may be null if `hbm` is not overcommitted.
absl::StatusOr<std::unique_ptr<FullPolicy>> NewFullPolicy(const PolicyOptions& options);

}  // namespace sluice
