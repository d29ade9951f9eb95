// PrefixObserver hears of the blocks that a PrefixCache gets and loses; this file also names them.
//
// A name is a hash of a unit's tokens and of all before them, of the model and of the tenant. It is
// the same in all processes of one build, so that a router may compare nodes. The cache itself
// never looks anything up by it: two prompts with one hash are two prompts here.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace sluice {

// It is called with the cache's lock held: it must return soon, and call nothing of the cache.
class PrefixObserver {
 public:
  virtual ~PrefixObserver() = default;
  // Later sequences find these units from now on. `tokens` are those of all units, `hashes` has one
  // entry for each. The parent is the unit before the first one, nothing if the prompt begins here.
  virtual void OnStored(std::optional<uint64_t> parent, absl::Span<const int32_t> tokens,
                        absl::Span<const uint64_t> hashes) = 0;
  // Nobody finds these units any more.
  virtual void OnRemoved(absl::Span<const uint64_t> hashes) = 0;
};

// Returns what the hash of a prompt's first unit goes on from.
uint64_t PrefixSeed(std::string_view model, std::string_view tenant);

// Returns the hashes of units of `unit` tokens each, behind one with the hash `parent`. REQUIRES:
// `tokens` are whole units.
std::vector<uint64_t> PrefixHashes(uint64_t parent, absl::Span<const int32_t> tokens, int64_t unit);

}  // namespace sluice
