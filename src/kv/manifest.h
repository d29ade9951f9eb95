// A manifest: what a prefill node announces before it sends the caches of a prompt. The checks here
// decide whether this node can take it. They are pure functions of their arguments: they take no
// lock and may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/kv/cache_layout.h"

namespace sluice {

class PagePool;

struct Manifest {
  std::string model_fingerprint;
  std::vector<CacheKind> cache_kinds;  // empty: the model's kinds are assumed
  uint32_t context_length = 0;         // leading prompt tokens whose caches will be sent
  std::vector<uint32_t> prompt_token_ids;
  uint32_t max_new_tokens = 0;
  std::string tenant;
  std::string rendezvous_key;
  absl::Duration lease;  // zero: the table's maximum
};

// The most bytes that a tenant's name or a rendezvous_key may have.
inline constexpr size_t kMaxNameBytes = 128;

// The limits of a node, and the model that it serves.
struct ManifestLimits {
  std::string model_fingerprint;
  uint32_t vocab_size = 0;
  uint32_t max_context = 0;  // prompt and output tokens together
  absl::Duration max_lease = absl::Seconds(60);
};

// Checks everything that does not depend on memory: the model, the layout of its caches, sizes,
// token ids, names and the lease. Returns FAILED_PRECONDITION (reason FINGERPRINT_MISMATCH) for
// another model's caches, and INVALID_ARGUMENT naming the field for anything else.
absl::Status CheckManifest(const Manifest& manifest, const ManifestLimits& limits,
                           const CacheLayout& layout);

// Returns INVALID_ARGUMENT if a sequence that needs this much would not fit even into empty pools.
absl::Status CheckCouldFit(const Footprint& need, const PagePool& dram, const PagePool& hbm);

}  // namespace sluice
