// One transfer, as TransferTable keeps it. Guarded by the table's mutex, but for the bytes of pages
// whose blocks a ChunkLanding has claimed: those are that landing's alone.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/kv/sequence_cache.h"
#include "src/kv/transfer_table.h"

namespace sluice {

class Transfer {
 public:
  enum class Block : uint8_t { kMissing, kClaimed, kLanded };
  enum class State { kReceiving, kCommitted, kPoisoned };

  Transfer(std::string transfer_id, const Manifest& manifest, std::unique_ptr<SequenceCache> pages);
  // A kept sequence: its caches have no chunks, and come when they are at rest.
  Transfer(std::string sequence_id, KeptSequence sequence, const CacheLayout& layout);

  // Index of a block in `blocks`.
  size_t BlockIndex(uint32_t layer, size_t kind, uint32_t head, int64_t block) const {
    const CacheKind& k = layout().kinds[kind];
    return kind_begin[kind] +
           (static_cast<size_t>(layer) * static_cast<size_t>(k.heads) + head) *
               static_cast<size_t>(k.BlocksFor(context_length)) +
           static_cast<size_t>(block);
  }
  const CacheLayout& layout() const { return *layout_; }
  // Up to `most` ranges of blocks that have not landed, neighbours in token order joined.
  std::vector<MissingRange> Missing(size_t most) const;

  const std::string id;
  const bool kept = false;
  const std::string tenant;
  const std::string rendezvous_key;
  std::vector<int32_t> prompt;
  const size_t prompt_length;
  const uint32_t context_length;
  const uint32_t max_new_tokens;
  std::unique_ptr<SequenceCache> home;

  State state = State::kReceiving;
  absl::Duration lease;
  absl::Time lease_end;
  // This transfer's entry in the table's order of leases. A Write only moves lease_end: the entry's
  // time is never later than it, and catches up when it is reached.
  std::multimap<absl::Time, Transfer*>::iterator lease_entry;
  std::vector<size_t> kind_begin;  // first index of each kind in `blocks`
  std::vector<Block> blocks;
  uint64_t landed = 0;
  int landings = 0;  // ChunkLandings alive: the pages are not handed on before they are gone
  std::vector<OutputToken> first_tokens;
  SelectionHints hints;
  uint64_t prompt_bytes = 0;             // of prompt and hints, as the table counts them
  TransferTable::AttachId attached = 0;  // 0: no Generate yet

 private:
  const CacheLayout* layout_;
};

// What every call on a poisoned transfer is answered with.
absl::Status Poisoned(const std::string& transfer_id);

}  // namespace sluice
