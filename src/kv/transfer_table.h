// Transfers: caches on their way in. Reserve -> chunks land -> Commit -> taken by the engine.
//
// Called from service threads and from the engine's thread; thread-safe. A transfer's pages are
// given back after it has ended AND the last landing that writes to them is gone (ChunkLanding is
// that writer's share of the ownership). Leases are reaped by Reap(), which the engine calls in
// time whether or not new work arrives.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/params.h"
#include "src/base/clock.h"
#include "src/base/log_limiter.h"
#include "src/kv/page_pool.h"
#include "src/kv/selection_hints.h"
#include "src/kv/sequence_cache.h"
#include "src/request/request.h"

namespace sluice {

struct Manifest {
  std::string model_fingerprint;
  std::vector<CacheKind> cache_kinds;  // empty: taken to be the model's
  uint32_t context_length = 0;
  std::vector<uint32_t> prompt_token_ids;
  uint32_t max_new_tokens = 0;
  std::string tenant;
  std::string rendezvous_key;
  absl::Duration lease;  // zero: the table's
};

// Of tenant and rendezvous_key.
inline constexpr size_t kMaxNameBytes = 128;

// Output tokens that a prefill node may hand over: fewer than any stream's buffer holds.
inline constexpr size_t kMaxFirstTokens = 16;
static_assert(kMaxFirstTokens <= kernels::kMaxNewTokens, "they may be decode rows of one step");

struct ChunkHeader {
  std::string transfer_id;
  uint32_t layer = 0;
  std::string kind;
  uint32_t head_begin = 0, head_end = 0;
  uint32_t token_begin = 0, token_end = 0;
  uint32_t crc32c = 0;
};

// A range of blocks that has not landed.
struct MissingRange {
  uint32_t layer = 0;
  std::string kind;
  uint32_t head_begin = 0, head_end = 0;
  uint32_t token_begin = 0, token_end = 0;
};

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
  std::vector<int32_t> prompt;
  uint32_t context_length = 0;  // tokens of `prompt` whose caches are in `home`
  uint32_t max_new_tokens = 0;
  bool kept = false;  // from the turn before, and not handed over
  std::vector<OutputToken> first_tokens;
  SelectionHints hints;
  std::unique_ptr<SequenceCache> home;
};

// A sequence that has ended and is kept for another turn.
struct KeptSequence {
  std::string tenant;
  std::vector<int32_t> tokens;
  uint32_t context_length = 0;  // tokens whose caches will be in its home
  absl::Duration lease;
};

class TenantQuotas;
class Transfer;  // internal
class TransferTable;

// One chunk on its way into its pages. Append() any number of times, then Finish(). Dropping it
// without Finish leaves its blocks missing. One thread at a time.
class ChunkLanding {
 public:
  ~ChunkLanding();
  ChunkLanding(const ChunkLanding&) = delete;
  ChunkLanding& operator=(const ChunkLanding&) = delete;
  // Bytes still to come.
  uint64_t left() const { return left_; }
  // Copies the next bytes to their place. REQUIRES: bytes.size() <= left().
  void Append(absl::Span<const uint8_t> bytes);
  // Checks the checksum and counts the blocks as landed.
  //   INVALID_ARGUMENT     bytes are missing
  //   DATA_LOSS            checksum; the blocks stay missing
  //   FAILED_PRECONDITION  landed before with other bytes: the transfer is poisoned
  // Returns blocks newly landed (0 for a repeat of what is there).
  absl::StatusOr<uint64_t> Finish();

 private:
  friend class TransferTable;
  struct Piece {
    uint8_t* target;
    uint64_t bytes;
    bool landed;  // the block is there already: compare, do not write
  };
  ChunkLanding() = default;
  // Fills pieces_ from header_ and claimed_.
  void FindPieces(size_t kind);
  TransferTable* table_ = nullptr;
  std::shared_ptr<Transfer> transfer_;
  ChunkHeader header_;
  std::vector<size_t> claimed_;  // blocks that this landing writes
  std::vector<Piece> pieces_;
  size_t piece_ = 0;
  uint64_t offset_ = 0;  // inside pieces_[piece_]
  uint64_t left_ = 0;
  uint32_t crc_ = 0;
  bool differs_ = false;
  bool finished_ = false;
};

class TransferTable {
 public:
  struct Options {
    std::string model_fingerprint;
    uint32_t vocab_size = 0;
    uint32_t max_context = 0;
    absl::Duration max_lease = absl::Seconds(60);
    uint64_t max_chunk_bytes = 8 << 20;
    // Tokens of an entry of hints; 0: they are checked, and dropped.
    int64_t hint_tokens = 0;
    // Transfers that are open at once, and bytes of their prompts and hints: what reservations take
    // beside their pages. 16384 transfers of a 4096-token prompt fill the 256 MiB.
    size_t max_open = 16384;
    uint64_t max_prompt_bytes = uint64_t{256} << 20;
    // What the policy needs for a sequence of `context` handed-over tokens and `total` at the end.
    std::function<Footprint(int64_t context, int64_t total)> footprint;
    // Holds tenants to their DRAM; outlives the table. Null: no quotas.
    TenantQuotas* quotas = nullptr;
    // When a Reserve that is refused for want of room may be tried again; null: a second.
    std::function<absl::Duration()> retry_after;
  };
  // `dram`: where caches land. `hbm`: only asked whether a sequence could ever fit.
  TransferTable(Options options, PagePool* dram, const PagePool* hbm, Clock* clock);
  ~TransferTable();

  // Called after any event that the engine may wait for: a transfer became ready, ended, or a lease
  // was set. Set once, before the first Reserve.
  void SetWake(std::function<void()> wake);

  struct Reserved {
    std::string transfer_id;
    absl::Duration lease;
    uint64_t max_chunk_bytes = 0;
    int64_t hint_tokens = 0;
  };
  absl::StatusOr<Reserved> Reserve(const Manifest& manifest);
  // Checks the header and opens the landing of `payload_bytes` bytes.
  absl::StatusOr<std::unique_ptr<ChunkLanding>> BeginChunk(const ChunkHeader& header,
                                                           uint64_t payload_bytes);
  // Returns the context length. On missing blocks: FAILED_PRECONDITION, reason MISSING_BLOCKS, and
  // *missing (if not null) holds up to 64 ranges.
  absl::StatusOr<uint32_t> Commit(const std::string& transfer_id,
                                  std::vector<OutputToken> first_tokens, TransferInfo* missing,
                                  SelectionHints hints = {});
  // OK also if there is no such transfer any more.
  absl::Status Abort(const std::string& transfer_id, const std::string& reason);
  absl::StatusOr<TransferInfo> Get(const std::string& transfer_id, size_t max_ranges);
  uint64_t BlocksMissing(const std::string& transfer_id);
  // Whose the transfer or kept sequence is, also of one that the engine took lately; nothing where
  // there is none.
  std::optional<std::string> TenantOf(const std::string& id) const;
  // OK where the transfer is that tenant's; else NOT_FOUND, in the words of one that was never
  // there.
  absl::Status CheckOwner(const std::string& transfer_id, const std::string& tenant) const;

  // The engine's side. Attach binds a Generate to a transfer, at most one: NOT_FOUND (an id that is
  // not there), ALREADY_EXISTS (has its Generate). A key that is not there yet is kept as expected
  // and given to the Reserve that brings it. The returned handle is what the other calls take.
  using AttachId = uint64_t;
  absl::StatusOr<AttachId> Attach(const HandoffRef& ref);
  // The manifest's tokens, once the transfer is there: for checks before it is ready.
  struct AttachedInfo {
    std::string transfer_id;
    std::vector<int32_t> prompt;
    uint32_t max_new_tokens = 0;
    bool kept = false;
  };
  std::optional<AttachedInfo> Info(AttachId id);
  // nullopt: not ready yet. An error: the transfer ended (aborted, lease, poisoned); detached.
  absl::StatusOr<std::optional<ReadySequence>> TakeReady(AttachId id);
  // The Generate is gone. `abort_transfer`: nobody will come for it any more.
  void Detach(AttachId id, bool abort_transfer);

  absl::Duration max_lease() const { return options_.max_lease; }

  // Kept sequences. They are transfers that the engine itself brings, and end as those do: by their
  // lease, or when a Generate takes them. Nobody may write to them. Keep mints the id, which may be
  // attached to at once; KeepHome brings the caches when they are at rest (they go back if the
  // sequence has ended by then; null: they are lost, and so is the sequence).
  absl::StatusOr<std::string> Keep(KeptSequence sequence);
  void KeepHome(const std::string& sequence_id, std::unique_ptr<SequenceCache> home);
  // Ends a kept sequence that no Generate has; whether there was one.
  bool Forget(const std::string& sequence_id, const std::string& tenant);
  size_t kept_sequences() const;

  // Ends every transfer whose lease is over; returns when to look again: no lease ends before.
  // Sets *expired to how many have ended by their lease since the last call (every other call ends
  // those that are over too, so that an answer does not depend on when the reaper came by).
  // Takes time for those that end, not for those that are open.
  absl::Time Reap(uint64_t* expired);

  // Transfers that are receiving or committed and not taken, kept sequences among them.
  size_t open_transfers() const;

 private:
  friend class ChunkLanding;
  struct Attachment {
    HandoffRef ref;
    std::shared_ptr<Transfer> transfer;  // null: expected
    absl::Status ended;                  // not OK: the transfer ended with this
  };
  using Key = std::pair<std::string, std::string>;  // tenant, rendezvous_key
  // What a call ended. Made before the lock is taken: when it goes, after the lock, pages go back
  // that no landing holds, and the engine is told.
  class Ended {
   public:
    explicit Ended(TransferTable* table) : table_(table) {}
    Ended(const Ended&) = delete;
    Ended& operator=(const Ended&) = delete;
    ~Ended();
    void Add(std::shared_ptr<Transfer> transfer) { transfers_.push_back(std::move(transfer)); }
    // One that was added ended with its lease: a line in the log.
    void AddExpired(std::string id) { expired_.push_back(std::move(id)); }

   private:
    TransferTable* const table_;
    std::vector<std::shared_ptr<Transfer>> transfers_;
    std::vector<std::string> expired_;
  };
  // Takes the transfer out of the table and tells its Generate; its pages go back with the last
  // owner.
  void EndLocked(std::shared_ptr<Transfer> transfer, const absl::Status& why, Ended* ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends what is over at `now`. Every call begins with it.
  void EndOverLocked(absl::Time now, Ended* ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckRoomLocked(const Manifest& manifest) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RenewLocked(Transfer& transfer, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells the transfer's Generate, if it has one, that nothing will come.
  void DetachLocked(Transfer& transfer, const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetLocked(const Transfer& transfer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Transfer>> FindLocked(const std::string& transfer_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Null: no such sequence is kept for the tenant.
  std::shared_ptr<Transfer> FindKeptLocked(const std::string& sequence_id,
                                           const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<uint32_t> CommitLocked(const std::string& transfer_id,
                                        std::vector<OutputToken> first_tokens, SelectionHints hints,
                                        TransferInfo* missing, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckManifest(const Manifest& manifest) const;
  absl::Status CheckFits(const Manifest& manifest) const;
  absl::Status CheckChunk(const Transfer& transfer, const ChunkHeader& header, size_t* kind,
                          uint64_t payload_bytes) const;
  absl::Status CheckHintsLocked(const Transfer& transfer, const SelectionHints& hints) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Claims the blocks of a chunk that have not landed; returns their indices, in the payload's
  // order.
  static absl::StatusOr<std::vector<size_t>> ClaimLocked(Transfer& transfer, const ChunkHeader& h,
                                                         size_t kind);
  absl::StatusOr<uint64_t> FinishChunk(ChunkLanding& landing);
  void AbandonChunk(ChunkLanding& landing);
  void Wake();
  absl::Duration RetryAfter() const;

  const Options options_;
  PagePool* const dram_;
  const PagePool* const hbm_;
  Clock* const clock_;
  LogLimiter expiries_{clock_, 20, absl::Seconds(1)};
  std::function<void()> wake_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::shared_ptr<Transfer>> transfers_ ABSL_GUARDED_BY(mutex_);
  std::multimap<absl::Time, Transfer*> leases_ ABSL_GUARDED_BY(mutex_);  // one of each transfer
  // Of transfers_, their hints too.
  uint64_t prompt_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t kept_ ABSL_GUARDED_BY(mutex_) = 0;       // kept sequences of transfers_
  uint64_t expired_ ABSL_GUARDED_BY(mutex_) = 0;  // since the last Reap
  std::map<Key, std::shared_ptr<Transfer>> keys_ ABSL_GUARDED_BY(mutex_);
  // Keys that a Generate names and no Reserve has brought yet.
  std::map<Key, AttachId> expected_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<AttachId, Attachment> attachments_ ABSL_GUARDED_BY(mutex_);
  AttachId next_attach_ ABSL_GUARDED_BY(mutex_) = 1;
  // Transfers that the engine took lately, so that a repeated Commit is answered as the first was.
  struct Taken {
    uint32_t context_length;
    std::string tenant;
  };
  absl::flat_hash_map<std::string, Taken> taken_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> taken_order_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
