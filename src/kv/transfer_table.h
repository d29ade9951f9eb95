// Transfers: caches on their way in. Reserve -> chunks land -> Commit -> taken by the engine.
//
// Service threads and the engine's thread call this; it is thread-safe. A transfer's pages are
// given back after it has ended AND the last landing that writes to them is gone (ChunkLanding is
// that writer's share of the ownership). Leases are ended by Reap(), which the engine calls in time
// whether or not new work arrives, and by most other calls, which end what is over before they
// answer.
//
// Each call has one answer in each state of a transfer. Abort is always OK.
//
//   state         Write               Commit              Get                 Reserve, same key
//   not there     TRANSFER_NOT_FOUND  TRANSFER_NOT_FOUND  TRANSFER_NOT_FOUND  OK
//   receiving     OK                  OK, MISSING_BLOCKS  RECEIVING           key in use
//   committed     COMMITTED           OK                  COMMITTED           key in use
//   poisoned      POISONED            POISONED            POISONED            key in use
//   taken lately  TRANSFER_NOT_FOUND  OK                  COMMITTED           OK
//
// "Not there" is a transfer that was never reserved, was aborted, or whose lease has ended. "Key in
// use" is RENDEZVOUS_KEY_IN_USE. A Generate waits for a transfer that is receiving, takes one that
// is committed, and ends with POISONED if it is poisoned; it is told GENERATE_EXISTS if another
// Generate has the transfer. For an id that is not there it is told TRANSFER_NOT_FOUND; for a key
// that is not there it waits for the Reserve.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/params.h"
#include "src/base/clock.h"
#include "src/kv/chunk_landing.h"
#include "src/kv/kept_sequences.h"
#include "src/kv/manifest.h"
#include "src/kv/page_pool.h"
#include "src/kv/prefix_cache.h"
#include "src/kv/rank_ledger.h"
#include "src/kv/selection_hints.h"
#include "src/kv/sequence_cache.h"
#include "src/kv/transfer.h"
#include "src/request/request.h"

namespace sluice {

// Output tokens that a prefill node may hand over: fewer than any stream's buffer holds.
inline constexpr size_t kMaxFirstTokens = 16;
static_assert(kMaxFirstTokens <= kernels::kMaxNewTokens, "they may be decode rows of one step");

struct TransferInfo {
  enum class State { kReceiving, kCommitted, kPoisoned };
  State state = State::kReceiving;
  uint64_t blocks_landed = 0;
  uint64_t blocks_total = 0;
  std::vector<MissingRange> missing;  // up to the limit asked for
  absl::Duration lease_left;
};

// A committed transfer, handed to the engine: its tokens and the pages that hold their caches.
struct ReadySequence {
  std::string transfer_id;
  std::string tenant;
  std::vector<int32_t> prompt;
  uint32_t context_length = 0;  // leading tokens of `prompt` whose caches are in `home`
  uint32_t max_new_tokens = 0;
  bool kept = false;  // a kept sequence, not a handed-over one
  std::vector<OutputToken> first_tokens;
  SelectionHints hints;
  std::unique_ptr<SequenceCache> home;
  bool approximate = false;    // as in KeptSequence
  uint32_t reused_tokens = 0;  // leading tokens that Reserve found here
  // Counts the sequence where it is to run, until it runs; null where there is one rank.
  std::shared_ptr<const void> place;
};

class TransferTable {
 public:
  struct Options : ManifestLimits {
    uint64_t max_chunk_bytes = 8 << 20;
    // Tokens of an entry of hints; 0: hints are checked, and dropped.
    int64_t hint_tokens = 0;
    int64_t hint_queries = 0;  // numbers of hints' queries; 0: they are dropped
    // Transfers that are open at once, and bytes of their prompts and hints: what reservations take
    // beside their pages. 16384 transfers of a 4096-token prompt fill the 256 MiB.
    size_t max_open = 16384;
    uint64_t max_prompt_bytes = uint64_t{256} << 20;
    // Returns what the policy needs for a sequence of `context` handed-over tokens that ends with
    // `total` tokens.
    std::function<Footprint(int64_t context, int64_t total)> footprint;
    // Sequences share the blocks of equal prefixes.
    bool prefix_cache = true;
    // Returns how many of a prompt's last rows the policy may compute again, so that their blocks
    // are not shared; null: only the last one.
    std::function<int(int64_t total)> last_rows;
    // Holds tenants to their share of DRAM; outlives the table. Null: no quotas.
    TenantQuotas* quotas = nullptr;
    // Where ranks have sequences of their own: the pools of the ranks from 1 on, in whose pages
    // caches land as in rank 0's, and what says which rank a sequence goes to. All outlive the
    // table.
    std::vector<PagePool*> other_ranks;
    RankLedger* ledger = nullptr;  // null: there is one rank
    // Where the heads of a model are that ranks divide: of all transfers, or, where ranks have
    // sequences of their own, of those of each rank. Empty: all are in the pools' pages.
    std::vector<HeadPlaces> places;
    // Waits until no rank uses pages that were given back before; null: none does. UNAVAILABLE: a
    // rank is lost.
    std::function<absl::Status()> await_free_pages;
    // Returns when a call that is refused for want of room may be tried again; null: a second.
    std::function<absl::Duration()> retry_after;
  };
  // Caches land in `dram`, rank 0's. `hbm` is only asked whether a sequence could ever fit.
  TransferTable(Options options, PagePool* dram, const PagePool* hbm, Clock* clock);
  ~TransferTable();

  // `wake` is called after any event that the engine may wait for: a transfer became ready or
  // ended, or a lease was set. Set it once, before the first Reserve.
  void SetWake(std::function<void()> wake);

  // ---- The sender's side ----

  struct Reserved {
    std::string transfer_id;
    absl::Duration lease;
    uint64_t max_chunk_bytes = 0;
    int64_t hint_tokens = 0, hint_queries = 0;
    int64_t cached_tokens = 0;               // leading tokens whose caches are here already
    std::vector<RankHeads> rank_heads = {};  // heads that ranks on other hosts can take themselves
  };
  // Opens a transfer and reserves its pages, on the first rank of RankLedger::RanksFor whose DRAM
  // has room. Errors:
  //   INVALID_ARGUMENT     the manifest is wrong, or its sequence could never fit
  //   FAILED_PRECONDITION  another model's caches (FINGERPRINT_MISMATCH)
  //   ALREADY_EXISTS       another transfer has the key (RENDEZVOUS_KEY_IN_USE)
  //   RESOURCE_EXHAUSTED   no room now (TOO_MANY_TRANSFERS, DRAM_FULL, or the tenant's quota)
  absl::StatusOr<Reserved> Reserve(const Manifest& manifest);
  // Checks the header and opens the landing of `payload_bytes` bytes; see ChunkLanding::Begin.
  // `most` is the largest payload of what brings it, where that is not a message of gRPC.
  absl::StatusOr<std::unique_ptr<ChunkLanding>> BeginChunk(
      const ChunkHeader& header, uint64_t payload_bytes,
      std::optional<uint64_t> most = std::nullopt);
  // Returns the context length. If blocks are missing: FAILED_PRECONDITION, reason MISSING_BLOCKS,
  // and *missing (if not null) holds up to 64 ranges.
  absl::StatusOr<uint32_t> Commit(const std::string& transfer_id,
                                  std::vector<OutputToken> first_tokens, TransferInfo* missing,
                                  SelectionHints hints = {});
  // Ends the transfer. OK also if there is no such transfer any more.
  absl::Status Abort(const std::string& transfer_id, const std::string& reason);
  // Ends the transfer for a fault of this node's: its Generate ends with `why`. Returns false if
  // there is no such transfer any more, or the engine has it.
  bool Fail(const std::string& transfer_id, const absl::Status& why);
  absl::StatusOr<TransferInfo> Get(const std::string& transfer_id, size_t max_ranges);
  // Returns 0 if there is no such transfer.
  uint64_t BlocksMissing(const std::string& transfer_id);
  // Returns the owner of a transfer or kept sequence, also of one that the engine took lately;
  // nothing if there is none.
  std::optional<std::string> TenantOf(const std::string& id) const;
  // Returns OK if the transfer is that tenant's; else NOT_FOUND, in the words of a transfer that
  // was never there.
  absl::Status CheckOwner(const std::string& transfer_id, const std::string& tenant) const;

  // ---- The engine's side ----

  // Binds a Generate to a transfer or kept sequence, which takes at most one: NOT_FOUND if the id
  // is not there, ALREADY_EXISTS if it has its Generate. A key that is not there yet is kept as
  // expected, for the Reserve that brings it. The other calls take the returned id.
  using AttachId = sluice::AttachId;
  absl::StatusOr<AttachId> Attach(const HandoffRef& ref);
  // The manifest's tokens, for checks before the transfer is ready.
  struct AttachedInfo {
    std::string transfer_id;
    std::vector<int32_t> prompt;
    uint32_t max_new_tokens = 0;
    bool kept = false;
  };
  // Returns nothing if the transfer is not there yet.
  std::optional<AttachedInfo> Info(AttachId id);
  // Returns nullopt if the transfer is not ready yet. An error means that it ended (aborted, lease,
  // poisoned). With an error or a sequence the Generate is detached.
  absl::StatusOr<std::optional<ReadySequence>> TakeReady(AttachId id);
  // The Generate is gone. `abort_transfer`: nobody will come for the transfer any more.
  void Detach(AttachId id, bool abort_transfer);

  // Returns the layout of the caches that are handed over: of all ranks together.
  const CacheLayout& layout() const {
    return options_.places.empty() ? dram_.front()->layout() : options_.places.front().layout;
  }
  absl::Duration max_lease() const { return options_.max_lease; }

  // Sequences that the engine keeps for another turn; a Generate attaches to them as to a transfer.
  KeptSequences& kept() { return kept_; }

  // Blocks that sequences share, in the pool where a rank's caches land; null: they share none.
  PrefixCache* prefixes(int rank = 0) {
    return prefixes_.empty() ? nullptr : prefixes_.at(static_cast<size_t>(rank)).get();
  }
  // The same of every rank; empty: sequences share none.
  absl::Span<const std::shared_ptr<PrefixCache>> all_prefixes() const { return prefixes_; }
  // Returns a cache with the longest known beginning of a prompt on the rank that its sequence,
  // which ends with `total` tokens, should go to; null if nothing is known there.
  std::unique_ptr<SequenceCache> KnownBeginning(const std::string& tenant,
                                                absl::Span<const int32_t> prompt, int64_t total);
  // Returns the most leading tokens of a prompt that may be shared: its last rows are computed, or
  // computed again, by every sequence that has it.
  int64_t ShareableTokens(int64_t prompt, int64_t total) const {
    const int rows = options_.last_rows == nullptr ? 1 : std::max(options_.last_rows(total), 1);
    return std::max<int64_t>(prompt - rows, 0);
  }

  // Ends every transfer whose lease is over; returns when to look again: no lease ends before then.
  // Sets *expired to the number that have ended by their lease since the last call. Takes time for
  // those that end, not for those that are open.
  absl::Time Reap(uint64_t* expired);

  // Returns the number of transfers that are receiving, or committed and not taken, including kept
  // sequences.
  size_t open_transfers() const;

 private:
  // Says what each rank has of a sequence's beginning, and in which order ranks should be tried.
  struct Choice {
    std::vector<SharedPrefix> prefixes;  // by rank
    std::vector<int> order;
  };
  Choice ChooseRanks(const std::string& tenant, absl::Span<const int32_t> context,
                     const TokensByKind& hbm_tokens);
  // Returns the reserved home of a transfer with its context's pages; null: no rank has room now.
  std::unique_ptr<SequenceCache> ReserveHome(const Manifest& manifest, int64_t total,
                                             const Footprint& need);

  const Options options_;
  const std::vector<PagePool*> dram_;  // by rank
  const PagePool* const hbm_;
  const std::unique_ptr<TransferStore> store_;  // has the lock
  KeptSequences kept_;
  std::vector<std::shared_ptr<PrefixCache>> prefixes_;  // by rank; none: sequences share none
};

}  // namespace sluice
