// Sequences that have ended and are kept, caches and all, for another turn.
//
// To the rest of src/kv a kept sequence is a transfer that the engine itself brings: it has a
// lease, one Generate may attach to it, and it ends by its lease or when that Generate takes it.
// Nobody may write chunks to it. Thread-safe: every call takes the store's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/kv/cache_layout.h"

namespace sluice {

class SequenceCache;
class TenantQuotas;
class TransferStore;

struct KeptSequence {
  std::string tenant;
  std::vector<int32_t> tokens;
  uint32_t context_length = 0;  // leading tokens whose caches KeepHome will bring
  absl::Duration lease;         // zero: the default
  bool approximate = false;     // some of its caches come from rows that did not attend to all
};

class KeptSequences {
 public:
  // `layout` is that of the tier where the caches are kept. `quotas` may be null: then tenants have
  // no limits. All of them outlive this.
  KeptSequences(TransferStore* store, const CacheLayout* layout, TenantQuotas* quotas,
                absl::Duration default_lease)
      : store_(store), layout_(layout), quotas_(quotas), default_lease_(default_lease) {}

  // Registers the sequence and returns its new id, which a Generate may attach to at once. The
  // caches follow by KeepHome. RESOURCE_EXHAUSTED if too many transfers are open.
  absl::StatusOr<std::string> Keep(KeptSequence sequence);
  // Brings the caches once they are at rest. They are given back if the sequence has ended by then.
  // Null means that they are lost, and ends the sequence.
  void KeepHome(const std::string& sequence_id, std::unique_ptr<SequenceCache> home);
  // Ends a sequence of this tenant that no Generate has. Returns whether there was one.
  bool Forget(const std::string& sequence_id, const std::string& tenant);
  // Returns the number of sequences that are kept.
  size_t count() const;

 private:
  TransferStore* const store_;
  const CacheLayout* const layout_;
  TenantQuotas* const quotas_;
  const absl::Duration default_lease_;
};

}  // namespace sluice
