#include "src/kv/transfer_table.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/kv/transfer.h"
#include "src/request/tenant_quotas.h"

namespace sluice {
namespace {

constexpr size_t kMaxExpected = 65536;  // Generates that wait for a Reserve; each has a deadline
constexpr size_t kTakenRemembered = 4096;
constexpr size_t kCommitRanges = 64;
constexpr absl::Duration kReapAgain = absl::Milliseconds(50);  // after a pass that was left out

uint64_t PromptBytes(size_t tokens) { return tokens * sizeof(int32_t); }

std::string NewTransferId() { return absl::StrFormat("%016x%016x", RandomU64(), RandomU64()); }

absl::Status NoSuchTransfer(const std::string& id) {
  return WithReason(absl::NotFoundError(absl::StrCat(
                        "transfer_id '", id.substr(0, 64),
                        "': no such transfer: it was never reserved here, or has ended")),
                    reasons::kTransferNotFound);
}

absl::Status NoSuchSequence(const std::string& id) {
  return WithReason(absl::NotFoundError(absl::StrCat(
                        "sequence_id '", id.substr(0, 64),
                        "': no such sequence is kept for this tenant: it never was, its lease has "
                        "ended, or a Generate has it; send the whole prompt again")),
                    reasons::kSequenceNotFound);
}

}  // namespace

TransferTable::TransferTable(Options options, PagePool* dram, const PagePool* hbm, Clock* clock)
    : options_(std::move(options)), dram_(dram), hbm_(hbm), clock_(clock) {}

TransferTable::~TransferTable() = default;

void TransferTable::SetWake(std::function<void()> wake) { wake_ = std::move(wake); }

absl::Duration TransferTable::RetryAfter() const {
  return options_.retry_after != nullptr ? options_.retry_after() : absl::Seconds(1);
}

void TransferTable::Wake() {
  if (SLUICE_FAILPOINT(kKvWake)) return;
  if (wake_ != nullptr) wake_();
}

TransferTable::Ended::~Ended() {
  if (transfers_.empty()) return;
  transfers_.clear();
  table_->Wake();
  for (const std::string& id : expired_) {
    if (!LogEnabled(LogLevel::kWarn)) return;
    if (const std::optional<uint64_t> suppressed = table_->expiries_.Admit()) {
      Log(LogLevel::kWarn, "transfer lease expired",
          {{"transfer_id", id}, {"suppressed", *suppressed}});
    }
  }
}

absl::Status TransferTable::CheckRoomLocked(const Manifest& m) const {
  if (!m.rendezvous_key.empty() && keys_.contains(Key{m.tenant, m.rendezvous_key})) {
    return WithReason(absl::AlreadyExistsError(absl::StrCat("rendezvous_key '", m.rendezvous_key,
                                                            "' is in use by another transfer")),
                      reasons::kRendezvousKeyInUse);
  }
  if (transfers_.size() >= options_.max_open ||
      prompt_bytes_ + PromptBytes(m.prompt_token_ids.size()) > options_.max_prompt_bytes) {
    return ResourceExhausted(reasons::kTooManyTransfers,
                             absl::StrCat(transfers_.size(), " transfers with ", prompt_bytes_,
                                          " bytes of prompts are open; try again later"),
                             RetryAfter());
  }
  return absl::OkStatus();
}

absl::StatusOr<TransferTable::Reserved> TransferTable::Reserve(const Manifest& m) {
  SLUICE_RETURN_IF_ERROR(CheckManifest(m));
  SLUICE_RETURN_IF_ERROR(CheckFits(m));
  {
    // What is over makes room first. Refused here, nothing is reserved for it.
    Ended ended(this);
    absl::MutexLock lock(&mutex_);
    EndOverLocked(clock_->Now(), &ended);
    SLUICE_RETURN_IF_ERROR(CheckRoomLocked(m));
  }
  const int64_t total = static_cast<int64_t>(m.prompt_token_ids.size()) + m.max_new_tokens;
  const Footprint need = options_.footprint(m.context_length, total);
  std::shared_ptr<const void> charge;
  if (options_.quotas != nullptr) {
    SLUICE_ASSIGN_OR_RETURN(
        charge, options_.quotas->TakeDram(
                    m.tenant, static_cast<uint64_t>(dram_->layout().BytesFor(need.dram_tokens))));
  }
  Reservation reservation = dram_->TryReserve(need.dram_tokens);
  if (SLUICE_FAILPOINT(kKvReserve) || reservation.empty()) {
    return ResourceExhausted(
        reasons::kDramFull,
        absl::StrCat("no room now for the caches of ", dram_->layout().Describe(need.dram_tokens),
                     " tokens in DRAM; try again later"),
        RetryAfter());
  }
  auto home = std::make_unique<SequenceCache>(dram_, std::move(reservation));
  home->EnsureTokens(m.context_length);
  home->Hold(std::move(charge));
  auto transfer = std::make_shared<Transfer>(NewTransferId(), m, std::move(home));
  transfer->lease = m.lease > absl::ZeroDuration() ? m.lease : options_.max_lease;
  transfer->lease_end = clock_->Now() + transfer->lease;
  transfer->prompt_bytes = PromptBytes(transfer->prompt_length);
  Reserved reserved{transfer->id, transfer->lease, options_.max_chunk_bytes, options_.hint_tokens};
  {
    absl::MutexLock lock(&mutex_);
    SLUICE_RETURN_IF_ERROR(CheckRoomLocked(m));  // others came meanwhile
    if (!m.rendezvous_key.empty()) {
      const Key key{m.tenant, m.rendezvous_key};
      keys_.emplace(key, transfer);
      if (const auto expected = expected_.find(key); expected != expected_.end()) {
        attachments_.at(expected->second).transfer = transfer;
        transfer->attached = expected->second;
        expected_.erase(expected);
      }
    }
    transfer->lease_entry = leases_.emplace(transfer->lease_end, transfer.get());
    prompt_bytes_ += transfer->prompt_bytes;
    transfers_.emplace(transfer->id, transfer);
  }
  Wake();
  return reserved;
}

absl::StatusOr<std::shared_ptr<Transfer>> TransferTable::FindLocked(const std::string& id) {
  const auto it = transfers_.find(id);
  if (it == transfers_.end() || it->second->kept) return NoSuchTransfer(id);
  return it->second;
}

std::shared_ptr<Transfer> TransferTable::FindKeptLocked(const std::string& sequence_id,
                                                        const std::string& tenant) {
  const auto it = transfers_.find(sequence_id);
  if (it == transfers_.end() || !it->second->kept || it->second->tenant != tenant) return nullptr;
  return it->second;
}

absl::StatusOr<std::string> TransferTable::Keep(KeptSequence sequence) {
  const absl::Duration lease =
      sequence.lease > absl::ZeroDuration() ? sequence.lease : options_.max_lease;
  const auto transfer =
      std::make_shared<Transfer>(NewTransferId(), std::move(sequence), dram_->layout());
  transfer->prompt_bytes = PromptBytes(transfer->prompt_length);
  transfer->lease = lease;
  {
    Ended ended(this);
    absl::MutexLock lock(&mutex_);
    const absl::Time now = clock_->Now();
    EndOverLocked(now, &ended);
    if (transfers_.size() >= options_.max_open ||
        prompt_bytes_ + transfer->prompt_bytes > options_.max_prompt_bytes) {
      return absl::ResourceExhaustedError("too many transfers are open");
    }
    transfer->lease_end = now + lease;
    transfer->lease_entry = leases_.emplace(transfer->lease_end, transfer.get());
    prompt_bytes_ += transfer->prompt_bytes;
    transfers_.emplace(transfer->id, transfer);
    ++kept_;
  }
  Wake();  // a lease was set
  return transfer->id;
}

void TransferTable::KeepHome(const std::string& sequence_id, std::unique_ptr<SequenceCache> home) {
  {
    Ended ended(this);
    absl::MutexLock lock(&mutex_);
    EndOverLocked(clock_->Now(), &ended);
    const auto it = transfers_.find(sequence_id);
    if (it == transfers_.end()) return;  // after the lock `home` goes
    if (home == nullptr) {
      EndLocked(it->second, NoSuchSequence(sequence_id), &ended);
      return;
    }
    if (options_.quotas != nullptr && !home->charged()) {
      home->Hold(options_.quotas->ChargeDram(
          it->second->tenant,
          static_cast<uint64_t>(dram_->layout().BytesFor(it->second->context_length))));
    }
    it->second->home = std::move(home);
    it->second->state = Transfer::State::kCommitted;
  }
  Wake();
}

bool TransferTable::Forget(const std::string& sequence_id, const std::string& tenant) {
  Ended ended(this);
  absl::MutexLock lock(&mutex_);
  EndOverLocked(clock_->Now(), &ended);
  const std::shared_ptr<Transfer> transfer = FindKeptLocked(sequence_id, tenant);
  if (transfer == nullptr || transfer->attached != 0) return false;
  EndLocked(transfer, NoSuchSequence(sequence_id), &ended);
  return true;
}

size_t TransferTable::kept_sequences() const {
  absl::MutexLock lock(&mutex_);
  return kept_;
}

absl::StatusOr<uint32_t> TransferTable::Commit(const std::string& transfer_id,
                                               std::vector<OutputToken> first_tokens,
                                               TransferInfo* missing, SelectionHints hints) {
  absl::StatusOr<uint32_t> committed;
  {
    Ended ended(this);
    absl::MutexLock lock(&mutex_);
    const absl::Time now = clock_->Now();
    EndOverLocked(now, &ended);
    committed = CommitLocked(transfer_id, std::move(first_tokens), std::move(hints), missing, now);
  }
  if (committed.ok()) Wake();
  return committed;
}

absl::StatusOr<uint32_t> TransferTable::CommitLocked(const std::string& transfer_id,
                                                     std::vector<OutputToken> first_tokens,
                                                     SelectionHints hints, TransferInfo* missing,
                                                     absl::Time now) {
  if (const auto it = taken_.find(transfer_id); it != taken_.end()) {
    return it->second.context_length;
  }
  SLUICE_ASSIGN_OR_RETURN(const std::shared_ptr<Transfer> transfer, FindLocked(transfer_id));
  if (transfer->state == Transfer::State::kPoisoned) return Poisoned(transfer_id);
  if (transfer->state == Transfer::State::kCommitted) return transfer->context_length;
  const size_t most_first = std::min<size_t>(transfer->max_new_tokens, kMaxFirstTokens);
  if (first_tokens.size() > most_first) {
    return InvalidField(
        "first_tokens",
        absl::StrCat("at most ", most_first, " on this transfer, found ", first_tokens.size()));
  }
  for (const OutputToken& token : first_tokens) {
    if (token.id < 0 || static_cast<uint32_t>(token.id) >= options_.vocab_size) {
      return InvalidField("first_tokens",
                          absl::StrCat("token id ", static_cast<uint32_t>(token.id),
                                       " is outside the vocabulary of ", options_.vocab_size));
    }
  }
  SLUICE_RETURN_IF_ERROR(CheckHintsLocked(*transfer, hints));
  RenewLocked(*transfer, now);
  if (const uint64_t lacking = transfer->blocks.size() - transfer->landed; lacking > 0) {
    std::vector<MissingRange> ranges = transfer->Missing(kCommitRanges);
    const MissingRange& first = ranges.front();
    absl::Status status =
        WithReason(absl::FailedPreconditionError(absl::StrCat(
                       lacking, " of ", transfer->blocks.size(),
                       " blocks are missing, the first: layer ", first.layer, ", kind ", first.kind,
                       ", heads [", first.head_begin, ", ", first.head_end, "), tokens [",
                       first.token_begin, ", ", first.token_end, "); write them and commit again")),
                   reasons::kMissingBlocks);
    if (missing != nullptr) {
      missing->blocks_landed = transfer->landed;
      missing->blocks_total = transfer->blocks.size();
      missing->missing = std::move(ranges);
    }
    return status;
  }
  transfer->first_tokens = std::move(first_tokens);
  if (options_.hint_tokens > 0) {
    transfer->prompt_bytes += hints.bytes();
    prompt_bytes_ += hints.bytes();
    transfer->hints = std::move(hints);
  }
  transfer->state = Transfer::State::kCommitted;
  return transfer->context_length;
}

absl::Status TransferTable::CheckHintsLocked(const Transfer& transfer,
                                             const SelectionHints& hints) const {
  const CacheLayout& layout = dram_->layout();
  HintBounds bounds;
  bounds.layers = static_cast<uint32_t>(layout.layers);
  bounds.kv_heads = static_cast<uint32_t>(layout.kinds[0].heads);
  bounds.block_tokens = static_cast<uint32_t>(layout.kinds[0].block_tokens);
  bounds.context_length = transfer.context_length;
  bounds.most_tokens = options_.hint_tokens;
  SLUICE_RETURN_IF_ERROR(CheckHints(hints, bounds));
  if (options_.hint_tokens > 0 && prompt_bytes_ + hints.bytes() > options_.max_prompt_bytes) {
    return ResourceExhausted(reasons::kTooManyTransfers,
                             absl::StrCat(transfers_.size(), " transfers with ", prompt_bytes_,
                                          " bytes of prompts and hints are open; try again later, "
                                          "or commit without hints"),
                             RetryAfter());
  }
  return absl::OkStatus();
}

absl::Status TransferTable::Abort(const std::string& transfer_id, const std::string& reason) {
  Ended ended(this);
  absl::MutexLock lock(&mutex_);
  EndOverLocked(clock_->Now(), &ended);
  const auto it = transfers_.find(transfer_id);
  if (it == transfers_.end() || it->second->kept) return absl::OkStatus();
  EndLocked(it->second,
            WithReason(absl::AbortedError(
                           absl::StrCat("transfer ", transfer_id, " was aborted by its sender",
                                        reason.empty() ? "" : ": ", reason.substr(0, 256))),
                       reasons::kTransferAborted),
            &ended);
  return absl::OkStatus();
}

bool TransferTable::Fail(const std::string& transfer_id, const absl::Status& why) {
  Ended ended(this);
  absl::MutexLock lock(&mutex_);
  EndOverLocked(clock_->Now(), &ended);
  const auto it = transfers_.find(transfer_id);
  if (it == transfers_.end() || it->second->kept) return false;
  EndLocked(it->second, why, &ended);
  return true;
}

absl::StatusOr<TransferInfo> TransferTable::Get(const std::string& transfer_id, size_t max_ranges) {
  Ended ended(this);
  absl::MutexLock lock(&mutex_);
  EndOverLocked(clock_->Now(), &ended);
  TransferInfo info;
  if (taken_.contains(transfer_id)) {
    // A sender whose Commit was not answered learns that it arrived.
    info.state = TransferInfo::State::kCommitted;
    return info;
  }
  SLUICE_ASSIGN_OR_RETURN(const std::shared_ptr<Transfer> transfer, FindLocked(transfer_id));
  info.state = transfer->state == Transfer::State::kReceiving   ? TransferInfo::State::kReceiving
               : transfer->state == Transfer::State::kCommitted ? TransferInfo::State::kCommitted
                                                                : TransferInfo::State::kPoisoned;
  info.blocks_landed = transfer->landed;
  info.blocks_total = transfer->blocks.size();
  info.missing = transfer->Missing(max_ranges);
  info.lease_left = std::max(absl::ZeroDuration(), transfer->lease_end - clock_->Now());
  return info;
}

std::optional<std::string> TransferTable::TenantOf(const std::string& id) const {
  absl::MutexLock lock(&mutex_);
  if (const auto it = transfers_.find(id); it != transfers_.end()) return it->second->tenant;
  if (const auto it = taken_.find(id); it != taken_.end()) return it->second.tenant;
  return std::nullopt;
}

absl::Status TransferTable::CheckOwner(const std::string& transfer_id,
                                       const std::string& tenant) const {
  return TenantOf(transfer_id) == tenant ? absl::OkStatus() : NoSuchTransfer(transfer_id);
}

uint64_t TransferTable::BlocksMissing(const std::string& transfer_id) {
  absl::MutexLock lock(&mutex_);
  const auto it = transfers_.find(transfer_id);
  return it == transfers_.end() ? 0 : it->second->blocks.size() - it->second->landed;
}

absl::StatusOr<TransferTable::AttachId> TransferTable::Attach(const HandoffRef& ref) {
  Ended ended(this);
  absl::MutexLock lock(&mutex_);
  EndOverLocked(clock_->Now(), &ended);
  std::shared_ptr<Transfer> transfer;
  const Key key{ref.tenant, ref.rendezvous_key};
  if (!ref.sequence_id.empty()) {
    transfer = FindKeptLocked(ref.sequence_id, ref.tenant);
    if (transfer == nullptr) return NoSuchSequence(ref.sequence_id);
  } else if (!ref.transfer_id.empty()) {
    SLUICE_ASSIGN_OR_RETURN(transfer, FindLocked(ref.transfer_id));
  } else if (const auto it = keys_.find(key); it != keys_.end()) {
    transfer = it->second;
  } else if (expected_.contains(key)) {
    return WithReason(absl::AlreadyExistsError(absl::StrCat("rendezvous_key '", ref.rendezvous_key,
                                                            "' has its Generate already")),
                      reasons::kGenerateExists);
  } else if (expected_.size() >= kMaxExpected) {
    return ResourceExhausted(reasons::kTooManyExpected,
                             "too many Generates wait for their transfer", RetryAfter());
  }
  if (transfer != nullptr && transfer->state == Transfer::State::kPoisoned) {
    return Poisoned(transfer->id);
  }
  if (transfer != nullptr && transfer->attached != 0) {
    return WithReason(
        absl::AlreadyExistsError(absl::StrCat(transfer->kept ? "sequence " : "transfer ",
                                              transfer->id, " has its Generate already")),
        reasons::kGenerateExists);
  }
  const AttachId id = next_attach_++;
  if (transfer != nullptr) {
    transfer->attached = id;
  } else {
    expected_.emplace(key, id);
  }
  attachments_.emplace(id, Attachment{ref, std::move(transfer), absl::OkStatus()});
  return id;
}

std::optional<TransferTable::AttachedInfo> TransferTable::Info(AttachId id) {
  absl::MutexLock lock(&mutex_);
  const auto it = attachments_.find(id);
  if (it == attachments_.end() || it->second.transfer == nullptr) return std::nullopt;
  const Transfer& t = *it->second.transfer;
  return AttachedInfo{t.id, t.prompt, t.max_new_tokens, t.kept};
}

absl::StatusOr<std::optional<ReadySequence>> TransferTable::TakeReady(AttachId id) {
  absl::MutexLock lock(&mutex_);
  const auto it = attachments_.find(id);
  SLUICE_CHECK(it != attachments_.end(), "taken once, while attached");
  if (!it->second.ended.ok()) {
    absl::Status ended = std::move(it->second.ended);
    attachments_.erase(it);
    return ended;
  }
  const std::shared_ptr<Transfer> transfer = it->second.transfer;
  if (transfer == nullptr || transfer->state != Transfer::State::kCommitted ||
      transfer->landings > 0) {
    return std::optional<ReadySequence>();
  }
  ReadySequence ready{transfer->id,
                      std::move(transfer->prompt),
                      transfer->context_length,
                      transfer->max_new_tokens,
                      transfer->kept,
                      std::move(transfer->first_tokens),
                      std::move(transfer->hints),
                      std::move(transfer->home)};
  attachments_.erase(it);
  ForgetLocked(*transfer);
  if (ready.kept) return std::optional<ReadySequence>(std::move(ready));
  taken_.emplace(transfer->id, Taken{transfer->context_length, transfer->tenant});
  taken_order_.push_back(transfer->id);
  if (taken_order_.size() > kTakenRemembered) {
    taken_.erase(taken_order_.front());
    taken_order_.pop_front();
  }
  return std::optional<ReadySequence>(std::move(ready));
}

void TransferTable::Detach(AttachId id, bool abort_transfer) {
  Ended ended(this);
  absl::MutexLock lock(&mutex_);
  const auto it = attachments_.find(id);
  if (it == attachments_.end()) return;
  const Attachment attachment = std::move(it->second);
  attachments_.erase(it);
  if (attachment.transfer == nullptr) {
    // After its transfer has ended, another Generate may expect the same key.
    const auto expected = expected_.find(Key{attachment.ref.tenant, attachment.ref.rendezvous_key});
    if (expected != expected_.end() && expected->second == id) expected_.erase(expected);
    return;
  }
  attachment.transfer->attached = 0;
  if (abort_transfer && attachment.ended.ok()) {
    EndLocked(attachment.transfer, absl::CancelledError("its Generate ended"), &ended);
  }
}

void TransferTable::ForgetLocked(const Transfer& transfer) {
  leases_.erase(transfer.lease_entry);
  kept_ -= transfer.kept ? 1 : 0;
  prompt_bytes_ -= transfer.prompt_bytes;
  if (!transfer.rendezvous_key.empty()) {
    keys_.erase(Key{transfer.tenant, transfer.rendezvous_key});
  }
  transfers_.erase(transfer.id);
}

void TransferTable::EndLocked(std::shared_ptr<Transfer> transfer, const absl::Status& why,
                              Ended* ended) {
  ForgetLocked(*transfer);
  DetachLocked(*transfer, why);
  ended->Add(std::move(transfer));
}

void TransferTable::DetachLocked(Transfer& transfer, const absl::Status& why) {
  if (transfer.attached == 0) return;
  Attachment& attachment = attachments_.at(transfer.attached);
  attachment.ended = why;
  attachment.transfer = nullptr;
  transfer.attached = 0;
}

void TransferTable::RenewLocked(Transfer& transfer, absl::Time now) {
  transfer.lease_end = std::max(transfer.lease_end, now + transfer.lease);
}

void TransferTable::EndOverLocked(absl::Time now, Ended* ended) {
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
      ended->AddExpired(transfer.id);
    }
    EndLocked(transfers_.at(transfer.id),
              WithReason(absl::DeadlineExceededError(absl::StrCat(
                             transfer.kept ? "sequence " : "transfer ", transfer.id,
                             ": its lease of ", absl::FormatDuration(transfer.lease), " ended")),
                         reasons::kLeaseExpired),
              ended);
  }
}

absl::Time TransferTable::Reap(uint64_t* expired) {
  *expired = 0;
  if (SLUICE_FAILPOINT(kKvReap)) return clock_->Now() + kReapAgain;
  Ended ended(this);
  absl::MutexLock lock(&mutex_);
  EndOverLocked(clock_->Now(), &ended);
  *expired = std::exchange(expired_, 0);
  return leases_.empty() ? absl::InfiniteFuture() : leases_.begin()->first;
}

size_t TransferTable::open_transfers() const {
  absl::MutexLock lock(&mutex_);
  return transfers_.size();
}

}  // namespace sluice
