// One transfer, as TransferStore keeps it. The store's lock guards all of it but the bytes of pages
// whose blocks a ChunkLanding has claimed: those belong to that landing alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/kv/manifest.h"
#include "src/kv/selection_hints.h"
#include "src/kv/sequence_cache.h"
#include "src/request/request.h"

namespace sluice {

// A range of blocks that has not landed.
struct MissingRange {
  uint32_t layer = 0;
  std::string kind;
  uint32_t head_begin = 0, head_end = 0;
  uint32_t token_begin = 0, token_end = 0;
};

// Names the binding of a Generate to its transfer; never 0.
using AttachId = uint64_t;

class Transfer {
 public:
  enum class Block : uint8_t { kMissing, kClaimed, kLanded };
  enum class State { kReceiving, kCommitted, kPoisoned };

  // A transfer that chunks will fill, behind the blocks that `pages` shares. `places`, of a divided
  // model, outlives it; else null.
  Transfer(const Manifest& manifest, std::unique_ptr<SequenceCache> pages, absl::Duration lease,
           const HeadPlaces* places = nullptr);
  // A kept sequence: it has no chunks, and its caches come when they are at rest.
  Transfer(std::string tenant, std::vector<int32_t> tokens, uint32_t context_length,
           const CacheLayout& layout, absl::Duration lease);

  // Returns the index of a block in `blocks`.
  size_t BlockIndex(uint32_t layer, size_t kind, uint32_t head, int64_t block) const {
    const CacheKind& k = layout().kinds[kind];
    return kind_begin[kind] +
           (static_cast<size_t>(layer) * static_cast<size_t>(k.heads) + head) *
               static_cast<size_t>(k.BlocksFor(context_length)) +
           static_cast<size_t>(block);
  }
  // Returns the layout of all ranks' caches together.
  const CacheLayout& layout() const { return *layout_; }
  const HeadPlaces* places() const { return places_; }
  // Returns up to `most` ranges of blocks that have not landed. Neighbours in token order are
  // joined, and so are neighbouring heads that miss the same tokens.
  std::vector<MissingRange> Missing(size_t most) const;
  // Lets the lease run for its whole length from `now`.
  void Renew(absl::Time now) { lease_end = std::max(lease_end, now + lease); }

  const std::string id;
  const bool kept = false;  // a kept sequence
  const std::string tenant;
  const std::string rendezvous_key;
  std::vector<int32_t> prompt;
  const size_t prompt_length;
  const uint32_t context_length;
  const uint32_t max_new_tokens;
  std::unique_ptr<SequenceCache> home;
  std::shared_ptr<const void> place;  // RankLedger counts it for as long as this is there; or null

  bool approximate = false;          // as in KeptSequence
  const uint32_t reused_tokens = 0;  // leading tokens whose shared blocks count as landed
  State state = State::kReceiving;
  const absl::Duration lease;
  absl::Time lease_end;
  // This transfer's entry in the store's order of leases. Renew only moves lease_end: the entry's
  // time is never later than lease_end, and catches up when it is reached.
  std::multimap<absl::Time, Transfer*>::iterator lease_entry;
  std::vector<size_t> kind_begin;  // first index of each kind in `blocks`
  std::vector<Block> blocks;
  uint64_t landed = 0;
  int landings = 0;  // ChunkLandings alive: the pages are not handed on before they are gone
  std::vector<OutputToken> first_tokens;
  SelectionHints hints;
  uint64_t prompt_bytes = 0;  // prompt and hints, as the store counts them
  AttachId attached = 0;      // 0: no Generate yet

 private:
  const HeadPlaces* const places_ = nullptr;
  const CacheLayout* layout_;
};

// The bytes that the store counts for a prompt of so many tokens.
inline uint64_t PromptBytes(size_t tokens) { return tokens * sizeof(int32_t); }

// The status that answers every call on a poisoned transfer.
absl::Status Poisoned(const std::string& transfer_id);
// The status that answers calls on a transfer that is not there.
absl::Status NoSuchTransfer(const std::string& transfer_id);
// The status that answers calls on a kept sequence that is not there, or is another tenant's.
absl::Status NoSuchSequence(const std::string& sequence_id);

}  // namespace sluice
