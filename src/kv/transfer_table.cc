#include "src/kv/transfer_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/kv/transfer_store.h"
#include "src/request/tenant_quotas.h"

namespace sluice {
namespace {

constexpr size_t kMaxExpected = 65536;  // Generates that wait for a Reserve; each has a deadline
constexpr size_t kCommitRanges = 64;

absl::Status CheckFirstTokens(const std::vector<OutputToken>& tokens, uint32_t max_new_tokens,
                              uint32_t vocab_size) {
  const size_t most = std::min<size_t>(max_new_tokens, kMaxFirstTokens);
  if (tokens.size() > most) {
    return InvalidField("first_tokens",
                        absl::StrCat("at most ", most, " on this transfer, found ", tokens.size()));
  }
  for (const OutputToken& token : tokens) {
    if (token.id < 0 || static_cast<uint32_t>(token.id) >= vocab_size) {
      return InvalidField("first_tokens",
                          absl::StrCat("token id ", static_cast<uint32_t>(token.id),
                                       " is outside the vocabulary of ", vocab_size));
    }
  }
  return absl::OkStatus();
}

std::vector<PagePool*> PoolsOf(PagePool* rank_zero, std::vector<PagePool*> others) {
  others.insert(others.begin(), rank_zero);
  return others;
}

HintBounds BoundsOf(const CacheLayout& layout, uint32_t context_length,
                    const TransferTable::Options& options) {
  HintBounds bounds;
  bounds.layers = static_cast<uint32_t>(layout.layers);
  bounds.kv_heads = static_cast<uint32_t>(layout.kinds[0].heads);
  bounds.block_tokens = static_cast<uint32_t>(layout.kinds[0].block_tokens);
  bounds.context_length = context_length;
  bounds.most_tokens = options.hint_tokens;
  bounds.queries = options.hint_queries;
  return bounds;
}

// Returns the answer to a Commit while blocks of `transfer` are missing. Fills *missing if it is
// not null.
absl::Status MissingBlocks(const Transfer& transfer, TransferInfo* missing) {
  std::vector<MissingRange> ranges = transfer.Missing(kCommitRanges);
  const MissingRange& first = ranges.front();
  absl::Status status =
      WithReason(absl::FailedPreconditionError(absl::StrCat(
                     transfer.blocks.size() - transfer.landed, " of ", transfer.blocks.size(),
                     " blocks are missing, the first: layer ", first.layer, ", kind ", first.kind,
                     ", heads [", first.head_begin, ", ", first.head_end, "), tokens [",
                     first.token_begin, ", ", first.token_end, "); write them and commit again")),
                 reasons::kMissingBlocks);
  if (missing != nullptr) {
    missing->blocks_landed = transfer.landed;
    missing->blocks_total = transfer.blocks.size();
    missing->missing = std::move(ranges);
  }
  return status;
}

absl::Status GenerateExists(const std::string& what) {
  return WithReason(absl::AlreadyExistsError(absl::StrCat(what, " has its Generate already")),
                    reasons::kGenerateExists);
}

TransferInfo::State StateOf(const Transfer& transfer) {
  switch (transfer.state) {
    case Transfer::State::kReceiving:
      return TransferInfo::State::kReceiving;
    case Transfer::State::kCommitted:
      return TransferInfo::State::kCommitted;
    case Transfer::State::kPoisoned:
      break;
  }
  return TransferInfo::State::kPoisoned;
}

}  // namespace

TransferTable::TransferTable(Options options, PagePool* dram, const PagePool* hbm, Clock* clock)
    : options_(std::move(options)),
      dram_(PoolsOf(dram, options_.other_ranks)),
      hbm_(hbm),
      store_(std::make_unique<TransferStore>(
          TransferStore::Limits{options_.max_open, options_.max_prompt_bytes, options_.retry_after},
          clock)),
      kept_(store_.get(), &layout(), options_.quotas, options_.max_lease) {
  SLUICE_CHECK(dram_.size() == 1 || options_.ledger != nullptr);
  SLUICE_CHECK(options_.places.empty() || options_.places.size() == dram_.size());
  if (!options_.prefix_cache) return;
  for (PagePool* const pool : dram_) prefixes_.push_back(PrefixCache::Create(pool));
}

TransferTable::~TransferTable() = default;

void TransferTable::SetWake(std::function<void()> wake) { store_->SetWake(std::move(wake)); }

TransferTable::Choice TransferTable::ChooseRanks(const std::string& tenant,
                                                 absl::Span<const int32_t> context,
                                                 const TokensByKind& hbm_tokens) {
  Choice choice;
  std::vector<int64_t> shared;
  for (const std::shared_ptr<PrefixCache>& prefixes : prefixes_) {
    choice.prefixes.push_back(prefixes->Find(tenant, context));
    shared.push_back(choice.prefixes.back().tokens());
  }
  choice.prefixes.resize(dram_.size());
  choice.order = {0};
  if (options_.ledger != nullptr) {
    choice.order = options_.ledger->RanksFor(hbm_tokens, shared, std::ssize(context));
  }
  return choice;
}

std::unique_ptr<SequenceCache> TransferTable::KnownBeginning(const std::string& tenant,
                                                             absl::Span<const int32_t> prompt,
                                                             int64_t total) {
  if (prefixes_.empty()) return nullptr;
  const int64_t most = ShareableTokens(std::ssize(prompt), total);
  Choice choice = ChooseRanks(tenant, prompt.subspan(0, static_cast<size_t>(most)),
                              options_.footprint(0, total).hbm_tokens);
  const auto rank = static_cast<size_t>(choice.order.front());
  SharedPrefix& prefix = choice.prefixes[rank];
  return prefix.empty() ? nullptr : prefixes_[rank]->NewSequence(std::move(prefix));
}

std::unique_ptr<SequenceCache> TransferTable::ReserveHome(const Manifest& m, int64_t total,
                                                          const Footprint& need) {
  const int64_t prompt = std::ssize(m.prompt_token_ids);
  const int64_t most = std::min<int64_t>(m.context_length, ShareableTokens(prompt, total));
  const std::vector<int32_t> tokens(m.prompt_token_ids.begin(), m.prompt_token_ids.begin() + most);
  Choice choice = ChooseRanks(m.tenant, tokens, need.hbm_tokens);
  if (SLUICE_FAILPOINT(kKvReserve)) return nullptr;
  for (const int rank : choice.order) {
    PagePool* const pool = dram_[static_cast<size_t>(rank)];
    SharedPrefix& prefix = choice.prefixes[static_cast<size_t>(rank)];
    Reservation reservation = pool->TryReserve(need.dram_tokens - prefix.tokens());
    if (reservation.empty()) continue;
    auto home = std::make_unique<SequenceCache>(pool, std::move(reservation), std::move(prefix));
    home->EnsureTokens(m.context_length);
    return home;
  }
  return nullptr;
}

absl::StatusOr<TransferTable::Reserved> TransferTable::Reserve(const Manifest& m) {
  SLUICE_RETURN_IF_ERROR(CheckManifest(m, options_, layout()));
  const int64_t total = static_cast<int64_t>(m.prompt_token_ids.size()) + m.max_new_tokens;
  const Footprint need = options_.footprint(m.context_length, total);
  SLUICE_RETURN_IF_ERROR(CheckCouldFit(need, *dram_.front(), *hbm_));
  const TransferKey key{m.tenant, m.rendezvous_key};
  std::shared_ptr<Transfer> transfer;
  // Checks whether the table has room for the transfer, and adds it once there is one.
  const auto enter = [&]() -> absl::Status {
    TransferStore::Lock lock(store_.get());
    if (!m.rendezvous_key.empty() && store_->HasKeyLocked(key)) {
      return WithReason(absl::AlreadyExistsError(absl::StrCat("rendezvous_key '", m.rendezvous_key,
                                                              "' is in use by another transfer")),
                        reasons::kRendezvousKeyInUse);
    }
    if (!store_->HasRoomLocked(PromptBytes(m.prompt_token_ids.size()))) {
      return store_->TooManyLocked("try again later");
    }
    if (transfer != nullptr) store_->AddLocked(transfer, lock.now());
    return absl::OkStatus();
  };
  // First, so that nothing is reserved for what is refused here, and what is over makes room.
  SLUICE_RETURN_IF_ERROR(enter());
  std::shared_ptr<const void> charge;
  if (options_.quotas != nullptr) {
    SLUICE_ASSIGN_OR_RETURN(
        charge, options_.quotas->TakeDram(
                    m.tenant, static_cast<uint64_t>(layout().BytesFor(need.dram_tokens))));
  }
  std::unique_ptr<SequenceCache> home = ReserveHome(m, total, need);
  if (home == nullptr) {
    return ResourceExhausted(
        reasons::kDramFull,
        absl::StrCat("no room now for the caches of ",
                     dram_.front()->layout().Describe(need.dram_tokens), " tokens in DRAM",
                     dram_.size() > 1 ? " of any rank" : "", "; try again later"),
        store_->RetryAfter());
  }
  std::shared_ptr<const void> place;  // counted at once: others may come while this waits
  if (options_.ledger != nullptr) {
    place = options_.ledger->Count(home->pool()->rank(), need.hbm_tokens, total);
  }
  const int64_t cached_tokens = home->shared_tokens();
  home->Hold(std::move(charge));
  if (options_.await_free_pages != nullptr) SLUICE_RETURN_IF_ERROR(options_.await_free_pages());
  const HeadPlaces* const places =
      options_.places.empty() ? nullptr
                              : &options_.places[static_cast<size_t>(home->pool()->rank())];
  transfer = std::make_shared<Transfer>(
      m, std::move(home), m.lease > absl::ZeroDuration() ? m.lease : options_.max_lease, places);
  transfer->place = std::move(place);
  Reserved reserved{transfer->id,         transfer->lease,       options_.max_chunk_bytes,
                    options_.hint_tokens, options_.hint_queries, cached_tokens};
  if (places != nullptr) reserved.rank_heads = places->OfOneRank();
  SLUICE_RETURN_IF_ERROR(enter());  // others may have come meanwhile
  store_->Wake();
  return reserved;
}

absl::StatusOr<std::unique_ptr<ChunkLanding>> TransferTable::BeginChunk(
    const ChunkHeader& header, uint64_t payload_bytes, std::optional<uint64_t> most) {
  return ChunkLanding::Begin(store_.get(), header, payload_bytes,
                             most.value_or(options_.max_chunk_bytes));
}

absl::StatusOr<uint32_t> TransferTable::Commit(const std::string& transfer_id,
                                               std::vector<OutputToken> first_tokens,
                                               TransferInfo* missing, SelectionHints hints) {
  uint32_t context_length = 0;
  {
    TransferStore::Lock lock(store_.get());
    if (const auto* const taken = store_->FindTakenLocked(transfer_id); taken != nullptr) {
      return taken->context_length;
    }
    SLUICE_ASSIGN_OR_RETURN(const std::shared_ptr<Transfer> transfer,
                            store_->FindLocked(transfer_id));
    if (transfer->state == Transfer::State::kPoisoned) return Poisoned(transfer_id);
    context_length = transfer->context_length;
    if (transfer->state == Transfer::State::kCommitted) return context_length;
    SLUICE_RETURN_IF_ERROR(
        CheckFirstTokens(first_tokens, transfer->max_new_tokens, options_.vocab_size));
    SLUICE_RETURN_IF_ERROR(CheckHints(hints, BoundsOf(layout(), context_length, options_)));
    if (options_.hint_queries == 0) hints.queries = {};
    if (options_.hint_tokens == 0) hints.entries = {};
    const bool keeps_hints = !hints.empty();
    if (keeps_hints && !store_->HasBytesLocked(hints.bytes())) {
      return store_->TooManyLocked("try again later, or commit without hints");
    }
    transfer->Renew(lock.now());
    if (transfer->landed < transfer->blocks.size()) return MissingBlocks(*transfer, missing);
    transfer->first_tokens = std::move(first_tokens);
    if (keeps_hints) store_->SetHintsLocked(*transfer, std::move(hints));
    transfer->state = Transfer::State::kCommitted;
  }
  store_->Wake();
  return context_length;
}

absl::Status TransferTable::Abort(const std::string& transfer_id, const std::string& reason) {
  Fail(transfer_id, WithReason(absl::AbortedError(absl::StrCat(
                                   "transfer ", transfer_id, " was aborted by its sender",
                                   reason.empty() ? "" : ": ", reason.substr(0, 256))),
                               reasons::kTransferAborted));
  return absl::OkStatus();
}

bool TransferTable::Fail(const std::string& transfer_id, const absl::Status& why) {
  TransferStore::Lock lock(store_.get());
  absl::StatusOr<std::shared_ptr<Transfer>> transfer = store_->FindLocked(transfer_id);
  if (!transfer.ok()) return false;
  store_->EndLocked(*std::move(transfer), why);
  return true;
}

absl::StatusOr<TransferInfo> TransferTable::Get(const std::string& transfer_id, size_t max_ranges) {
  TransferStore::Lock lock(store_.get());
  TransferInfo info;
  if (store_->FindTakenLocked(transfer_id) != nullptr) {
    // A sender whose Commit was not answered learns that it arrived.
    info.state = TransferInfo::State::kCommitted;
    return info;
  }
  SLUICE_ASSIGN_OR_RETURN(const std::shared_ptr<Transfer> transfer,
                          store_->FindLocked(transfer_id));
  info.state = StateOf(*transfer);
  info.blocks_landed = transfer->landed;
  info.blocks_total = transfer->blocks.size();
  info.missing = transfer->Missing(max_ranges);
  info.lease_left = std::max(absl::ZeroDuration(), transfer->lease_end - lock.now());
  return info;
}

std::optional<std::string> TransferTable::TenantOf(const std::string& id) const {
  return store_->TenantOf(id);
}

absl::Status TransferTable::CheckOwner(const std::string& transfer_id,
                                       const std::string& tenant) const {
  return TenantOf(transfer_id) == tenant ? absl::OkStatus() : NoSuchTransfer(transfer_id);
}

uint64_t TransferTable::BlocksMissing(const std::string& transfer_id) {
  TransferStore::Lock lock(store_.get());
  const absl::StatusOr<std::shared_ptr<Transfer>> transfer = store_->FindLocked(transfer_id);
  return transfer.ok() ? (*transfer)->blocks.size() - (*transfer)->landed : 0;
}

absl::StatusOr<AttachId> TransferTable::Attach(const HandoffRef& ref) {
  TransferStore::Lock lock(store_.get());
  Attachments& attachments = store_->attachments();
  TransferKey key{ref.tenant, ref.rendezvous_key};
  std::shared_ptr<Transfer> transfer;
  if (!ref.sequence_id.empty()) {
    transfer = store_->FindKeptLocked(ref.sequence_id);
    if (transfer == nullptr || transfer->tenant != ref.tenant) {
      return NoSuchSequence(ref.sequence_id);
    }
  } else if (!ref.transfer_id.empty()) {
    SLUICE_ASSIGN_OR_RETURN(transfer, store_->FindLocked(ref.transfer_id));
  } else {
    transfer = store_->FindKeyLocked(key);
  }
  if (transfer == nullptr) {
    if (attachments.Expects(key)) {
      return GenerateExists(absl::StrCat("rendezvous_key '", ref.rendezvous_key, "'"));
    }
    if (attachments.expected() >= kMaxExpected) {
      return ResourceExhausted(reasons::kTooManyExpected,
                               "too many Generates wait for their transfer", store_->RetryAfter());
    }
    return attachments.Expect(std::move(key));
  }
  if (transfer->state == Transfer::State::kPoisoned) return Poisoned(transfer->id);
  if (transfer->attached != 0) {
    return GenerateExists(absl::StrCat(transfer->kept ? "sequence " : "transfer ", transfer->id));
  }
  return attachments.Bind(std::move(key), std::move(transfer));
}

std::optional<TransferTable::AttachedInfo> TransferTable::Info(AttachId id) {
  TransferStore::Lock lock(store_.get());
  const Attachment* const attachment = store_->attachments().Find(id);
  if (attachment == nullptr || attachment->transfer == nullptr) return std::nullopt;
  const Transfer& t = *attachment->transfer;
  return AttachedInfo{t.id, t.prompt, t.max_new_tokens, t.kept};
}

absl::StatusOr<std::optional<ReadySequence>> TransferTable::TakeReady(AttachId id) {
  SLUICE_ASSIGN_OR_RETURN(const std::shared_ptr<Transfer> transfer, store_->TakeReady(id));
  if (transfer == nullptr) return std::optional<ReadySequence>();
  // It is out of the store and nobody writes to it: this thread alone has it.
  return std::optional<ReadySequence>(ReadySequence{
      transfer->id, transfer->tenant, std::move(transfer->prompt), transfer->context_length,
      transfer->max_new_tokens, transfer->kept, std::move(transfer->first_tokens),
      std::move(transfer->hints), std::move(transfer->home), transfer->approximate,
      transfer->reused_tokens, std::move(transfer->place)});
}

void TransferTable::Detach(AttachId id, bool abort_transfer) {
  TransferStore::Lock lock(store_.get());
  if (store_->attachments().Find(id) == nullptr) return;
  Attachment attachment = store_->attachments().Remove(id);
  if (attachment.transfer != nullptr && abort_transfer) {
    store_->EndLocked(std::move(attachment.transfer), absl::CancelledError("its Generate ended"));
  }
}

absl::Time TransferTable::Reap(uint64_t* expired) { return store_->Reap(expired); }

size_t TransferTable::open_transfers() const { return store_->open_transfers(); }

}  // namespace sluice
