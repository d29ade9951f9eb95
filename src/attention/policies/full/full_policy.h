// Policy `full`: exact attention over everything, everything in HBM. The baseline of all others.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"

namespace sluice {

struct FullPolicyOptions {
  Device* device = nullptr;
  PagePool* hbm = nullptr;
  int slots = 0;
  int64_t max_context = 0;
  PagePool* dram = nullptr;  // where preempted sequences go; needed where `hbm` is overcommitted
};

// A full policy shows where a sequence's caches are: a prefill node reads them there.
class FullPolicy : public AttentionPolicy {
 public:
  virtual const SequenceCache& resident(int slot) const = 0;
  // A layer's caches by slot, for operators.
  virtual kernels::PagedCache LayerCache(int layer) const = 0;
};

// REQUIRES: one cache kind, of two parts (K, V).
absl::StatusOr<std::unique_ptr<FullPolicy>> NewFullPolicy(const FullPolicyOptions& options);

}  // namespace sluice
