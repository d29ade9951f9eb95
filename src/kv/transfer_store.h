// The transfers that are open, and the one lock that guards them. Internal to src/kv:
// TransferTable, KeptSequences and ChunkLanding are its users.
//
// Locking: a call takes the lock with TransferStore::Lock. Methods that end in "Locked" require it;
// the others take it themselves for a moment. Pages are never given back under the lock: the Lock
// collects what its call ends and drops it after the lock is released. A transfer's pages go back
// with its last owner, which may be a ChunkLanding that still writes to them.
#pragma once

#include <cstddef>
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
#include "src/base/clock.h"
#include "src/base/log_limiter.h"
#include "src/kv/attachments.h"
#include "src/kv/transfer.h"

namespace sluice {

class TransferStore {
 public:
  struct Limits {
    size_t max_open = 0;                          // transfers at once
    uint64_t max_prompt_bytes = 0;                // prompts and hints of all
    std::function<absl::Duration()> retry_after;  // null: a second
  };
  TransferStore(Limits limits, Clock* clock);

  // Sets whom Wake calls. Call it before the first transfer is added, and with null after the last.
  void SetWake(std::function<void()> wake) { wake_ = std::move(wake); }
  // Tells the engine that something it may wait for has happened. REQUIRES: the lock is not held.
  void Wake();
  // Returns when a call that was refused for want of room may be tried again.
  absl::Duration RetryAfter() const;

  // Holds the lock for one call. Begins by ending every transfer whose lease is over, so that no
  // answer depends on when Reap came by. Its end releases the lock, then gives back the pages of
  // what the call has ended, wakes the engine if anything ended, and logs leases that expired.
  class ABSL_SCOPED_LOCKABLE Lock {
   public:
    explicit Lock(TransferStore* store) ABSL_EXCLUSIVE_LOCK_FUNCTION(store->mutex_);
    ~Lock() ABSL_UNLOCK_FUNCTION();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    // Returns the time at which the call began.
    absl::Time now() const { return now_; }

   private:
    TransferStore* const store_;
    absl::Time now_;
  };

  // ---- Adding ----

  // Returns whether there is room for one more transfer with a prompt of `prompt_bytes`.
  bool HasRoomLocked(uint64_t prompt_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return transfers_.size() < limits_.max_open && HasBytesLocked(prompt_bytes);
  }
  // Returns whether the open transfers may take `bytes` more for prompts and hints.
  bool HasBytesLocked(uint64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return prompt_bytes_ + bytes <= limits_.max_prompt_bytes;
  }
  // Returns RESOURCE_EXHAUSTED (reason TOO_MANY_TRANSFERS) with a message that ends in `remedy`.
  absl::Status TooManyLocked(const std::string& remedy) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether an open transfer has the key. REQUIRES: the key is not empty.
  bool HasKeyLocked(const TransferKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return keys_.contains(key);
  }
  // Adds a transfer, whose lease runs from `now` on, and binds the Generate that expects its key.
  void AddLocked(const std::shared_ptr<Transfer>& transfer, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives a transfer its hints, which count towards the bytes of prompts.
  void SetHintsLocked(Transfer& transfer, SelectionHints hints)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- Finding ----

  // Returns NOT_FOUND (reason TRANSFER_NOT_FOUND) if there is none; kept sequences do not count.
  absl::StatusOr<std::shared_ptr<Transfer>> FindLocked(const std::string& transfer_id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns null if no such sequence is kept, whoever's it is.
  std::shared_ptr<Transfer> FindKeptLocked(const std::string& sequence_id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns null if no open transfer has the key.
  std::shared_ptr<Transfer> FindKeyLocked(const TransferKey& key) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether the transfer is still open.
  bool IsOpenLocked(const Transfer& transfer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return transfers_.contains(transfer.id);
  }
  Attachments& attachments() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return attachments_; }

  // Transfers that the engine took lately, so that a repeated Commit is answered as the first was.
  struct Taken {
    uint32_t context_length;
    std::string tenant;
  };
  // Returns null if the engine did not take it lately.
  const Taken* FindTakenLocked(const std::string& transfer_id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- Ending ----

  // Takes the transfer out of the store and tells its Generate why. The Lock gives it back.
  void EndLocked(std::shared_ptr<Transfer> transfer, const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives up the claims of a landing, and with them its share of the transfer.
  void EndLanding(std::shared_ptr<Transfer> transfer, absl::Span<const size_t> claimed);
  // Implements TransferTable::TakeReady.
  absl::StatusOr<std::shared_ptr<Transfer>> TakeReady(AttachId id);
  // Implements TransferTable::Reap.
  absl::Time Reap(uint64_t* expired);

  // ---- Looking ----

  // Returns the owner of a transfer or kept sequence that is open or was taken lately.
  std::optional<std::string> TenantOf(const std::string& id) const;
  size_t open_transfers() const;
  size_t kept_sequences() const;

 private:
  // Ends every transfer whose lease is over at `now`.
  void EndOverLocked(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetLocked(const Transfer& transfer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Limits limits_;
  Clock* const clock_;
  LogLimiter expiries_;
  std::function<void()> wake_;

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::shared_ptr<Transfer>> transfers_ ABSL_GUARDED_BY(mutex_);
  std::multimap<absl::Time, Transfer*> leases_ ABSL_GUARDED_BY(mutex_);  // one of each transfer
  std::map<TransferKey, std::shared_ptr<Transfer>> keys_ ABSL_GUARDED_BY(mutex_);
  uint64_t prompt_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // prompts and hints of transfers_
  size_t kept_ ABSL_GUARDED_BY(mutex_) = 0;            // kept sequences in transfers_
  uint64_t expired_ ABSL_GUARDED_BY(mutex_) = 0;       // leases that ended since the last Reap
  Attachments attachments_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, Taken> taken_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> taken_order_ ABSL_GUARDED_BY(mutex_);
  // The transfers that the held Lock has ended, and the ids among them whose lease expired.
  std::vector<std::shared_ptr<Transfer>> ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> ended_by_lease_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
