#include "src/kv/transfer_store.h"

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr size_t kTakenRemembered = 4096;
constexpr absl::Duration kReapAgain = absl::Milliseconds(50);  // after a pass that was left out

}  // namespace

TransferStore::TransferStore(Limits limits, Clock* clock)
    : limits_(std::move(limits)), clock_(clock), expiries_(clock, 20, absl::Seconds(1)) {}

void TransferStore::Wake() {
  if (SLUICE_FAILPOINT(kKvWake)) return;
  if (wake_ != nullptr) wake_();
}

absl::Duration TransferStore::RetryAfter() const {
  return limits_.retry_after != nullptr ? limits_.retry_after() : absl::Seconds(1);
}

TransferStore::Lock::Lock(TransferStore* store) : store_(store) {
  store_->mutex_.Lock();
  now_ = store_->clock_->Now();
  store_->EndOverLocked(now_);
}

TransferStore::Lock::~Lock() {
  std::vector<std::shared_ptr<Transfer>> ended = std::exchange(store_->ended_, {});
  const std::vector<std::string> expired = std::exchange(store_->ended_by_lease_, {});
  store_->mutex_.Unlock();
  if (ended.empty()) return;
  ended.clear();
  store_->Wake();
  for (const std::string& id : expired) {
    if (!LogEnabled(LogLevel::kWarn)) return;
    if (const std::optional<uint64_t> suppressed = store_->expiries_.Admit()) {
      Log(LogLevel::kWarn, "transfer lease expired",
          {{"transfer_id", id}, {"suppressed", *suppressed}});
    }
  }
}

absl::Status TransferStore::TooManyLocked(const std::string& remedy) const {
  return ResourceExhausted(reasons::kTooManyTransfers,
                           absl::StrCat(transfers_.size(), " transfers with ", prompt_bytes_,
                                        " bytes of prompts and hints are open; ", remedy),
                           RetryAfter());
}

void TransferStore::AddLocked(const std::shared_ptr<Transfer>& transfer, absl::Time now) {
  transfer->lease_end = now + transfer->lease;
  transfer->lease_entry = leases_.emplace(transfer->lease_end, transfer.get());
  transfer->prompt_bytes = PromptBytes(transfer->prompt_length);
  prompt_bytes_ += transfer->prompt_bytes;
  kept_ += transfer->kept ? 1 : 0;
  transfers_.emplace(transfer->id, transfer);
  if (transfer->rendezvous_key.empty()) return;
  const TransferKey key{transfer->tenant, transfer->rendezvous_key};
  keys_.emplace(key, transfer);
  attachments_.BindExpected(key, transfer);
}

void TransferStore::SetHintsLocked(Transfer& transfer, SelectionHints hints) {
  transfer.prompt_bytes += hints.bytes();
  prompt_bytes_ += hints.bytes();
  transfer.hints = std::move(hints);
}

absl::StatusOr<std::shared_ptr<Transfer>> TransferStore::FindLocked(const std::string& id) const {
  const auto it = transfers_.find(id);
  if (it == transfers_.end() || it->second->kept) return NoSuchTransfer(id);
  return it->second;
}

std::shared_ptr<Transfer> TransferStore::FindKeptLocked(const std::string& sequence_id) const {
  const auto it = transfers_.find(sequence_id);
  return it == transfers_.end() || !it->second->kept ? nullptr : it->second;
}

std::shared_ptr<Transfer> TransferStore::FindKeyLocked(const TransferKey& key) const {
  const auto it = keys_.find(key);
  return it == keys_.end() ? nullptr : it->second;
}

const TransferStore::Taken* TransferStore::FindTakenLocked(const std::string& transfer_id) const {
  const auto it = taken_.find(transfer_id);
  return it == taken_.end() ? nullptr : &it->second;
}

void TransferStore::ForgetLocked(const Transfer& transfer) {
  leases_.erase(transfer.lease_entry);
  kept_ -= transfer.kept ? 1 : 0;
  prompt_bytes_ -= transfer.prompt_bytes;
  if (!transfer.rendezvous_key.empty()) {
    keys_.erase(TransferKey{transfer.tenant, transfer.rendezvous_key});
  }
  transfers_.erase(transfer.id);
}

void TransferStore::EndLocked(std::shared_ptr<Transfer> transfer, const absl::Status& why) {
  ForgetLocked(*transfer);
  attachments_.End(*transfer, why);
  ended_.push_back(std::move(transfer));
}

void TransferStore::EndOverLocked(absl::Time now) {
  while (!leases_.empty() && leases_.begin()->first <= now) {
    Transfer& transfer = *leases_.begin()->second;
    if (transfer.lease_end > now) {  // renewed since
      auto entry = leases_.extract(leases_.begin());
      entry.key() = transfer.lease_end;
      transfer.lease_entry = leases_.insert(std::move(entry));
      continue;
    }
    // A kept sequence that nobody came back for is no fault of a prefill node's.
    if (!transfer.kept) {
      ++expired_;
      ended_by_lease_.push_back(transfer.id);
    }
    EndLocked(transfers_.at(transfer.id),
              WithReason(absl::DeadlineExceededError(absl::StrCat(
                             transfer.kept ? "sequence " : "transfer ", transfer.id,
                             ": its lease of ", absl::FormatDuration(transfer.lease), " ended")),
                         reasons::kLeaseExpired));
  }
}

void TransferStore::EndLanding(std::shared_ptr<Transfer> transfer,
                               absl::Span<const size_t> claimed) {
  bool wake = false;
  {
    absl::MutexLock lock(&mutex_);
    for (const size_t index : claimed) transfer->blocks[index] = Transfer::Block::kMissing;
    // The last writer of a transfer that is ready, or that has ended and gives its pages back.
    wake = --transfer->landings == 0 &&
           (transfer->state != Transfer::State::kReceiving || !IsOpenLocked(*transfer));
  }
  transfer.reset();  // the last owner gives the pages back, outside the lock
  if (wake) Wake();
}

absl::StatusOr<std::shared_ptr<Transfer>> TransferStore::TakeReady(AttachId id) {
  absl::MutexLock lock(&mutex_);
  Attachment* const attachment = attachments_.Find(id);
  SLUICE_CHECK(attachment != nullptr, "taken once, while attached");
  if (!attachment->ended.ok()) return attachments_.Remove(id).ended;
  std::shared_ptr<Transfer> transfer = attachment->transfer;
  if (transfer == nullptr || transfer->state != Transfer::State::kCommitted ||
      transfer->landings > 0) {
    return std::shared_ptr<Transfer>();
  }
  attachments_.Remove(id);
  ForgetLocked(*transfer);
  if (transfer->kept) return transfer;
  taken_.emplace(transfer->id, Taken{transfer->context_length, transfer->tenant});
  taken_order_.push_back(transfer->id);
  if (taken_order_.size() > kTakenRemembered) {
    taken_.erase(taken_order_.front());
    taken_order_.pop_front();
  }
  return transfer;
}

absl::Time TransferStore::Reap(uint64_t* expired) {
  *expired = 0;
  if (SLUICE_FAILPOINT(kKvReap)) return clock_->Now() + kReapAgain;
  Lock lock(this);
  *expired = std::exchange(expired_, 0);
  return leases_.empty() ? absl::InfiniteFuture() : leases_.begin()->first;
}

std::optional<std::string> TransferStore::TenantOf(const std::string& id) const {
  absl::MutexLock lock(&mutex_);
  if (const auto it = transfers_.find(id); it != transfers_.end()) return it->second->tenant;
  if (const Taken* const taken = FindTakenLocked(id); taken != nullptr) return taken->tenant;
  return std::nullopt;
}

size_t TransferStore::open_transfers() const {
  absl::MutexLock lock(&mutex_);
  return transfers_.size();
}

size_t TransferStore::kept_sequences() const {
  absl::MutexLock lock(&mutex_);
  return kept_;
}

}  // namespace sluice
