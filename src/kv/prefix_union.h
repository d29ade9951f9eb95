// PrefixUnion observes the prefix caches of several ranks, and tells one observer what the node
// has: a unit is stored once the first of them has it, and removed when the last one has lost it.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "src/kv/prefix_cache.h"
#include "src/kv/prefix_events.h"

namespace sluice {

class PrefixUnion final : private PrefixObserver {
 public:
  // The observer is told from now on, with a lock held: it must return soon, and call nothing of
  // the caches. It and the caches outlive the union. `model` is in the hashes that name units.
  // REQUIRES: the caches have units of one size, and nothing was published in them yet.
  PrefixUnion(std::vector<PrefixCache*> caches, PrefixObserver* observer, const std::string& model);
  ~PrefixUnion() override;
  PrefixUnion(const PrefixUnion&) = delete;
  PrefixUnion& operator=(const PrefixUnion&) = delete;

  // Returns the tokens of a unit.
  int64_t unit_tokens() const { return caches_.front()->unit_tokens(); }

  // Calls `first`, and `stored` for every unit that the caches have, once, before anybody publishes
  // or drops more in any of them.
  void AnnounceAll(absl::FunctionRef<void()> first, PrefixCache::Stored stored);

 private:
  void OnStored(std::optional<uint64_t> parent, absl::Span<const int32_t> tokens,
                absl::Span<const uint64_t> hashes) override;
  void OnRemoved(absl::Span<const uint64_t> hashes) override;
  // Counts one more cache that has the units, and calls `stored` for those that no cache had.
  void Count(std::optional<uint64_t> parent, absl::Span<const int32_t> tokens,
             absl::Span<const uint64_t> hashes, PrefixCache::Stored stored)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::vector<PrefixCache*> caches_;
  PrefixObserver* const observer_;
  absl::Mutex mutex_;  // is taken with a cache's lock held
  absl::flat_hash_map<uint64_t, int> counts_ ABSL_GUARDED_BY(mutex_);  // caches that have it
};

}  // namespace sluice
