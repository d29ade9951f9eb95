#include "src/kv/kept_sequences.h"

#include <utility>

#include "src/kv/sequence_cache.h"
#include "src/kv/transfer_store.h"
#include "src/request/tenant_quotas.h"

namespace sluice {

absl::StatusOr<std::string> KeptSequences::Keep(KeptSequence sequence) {
  const absl::Duration lease =
      sequence.lease > absl::ZeroDuration() ? sequence.lease : default_lease_;
  const auto transfer =
      std::make_shared<Transfer>(std::move(sequence.tenant), std::move(sequence.tokens),
                                 sequence.context_length, *layout_, lease);
  transfer->approximate = sequence.approximate;
  {
    TransferStore::Lock lock(store_);
    if (!store_->HasRoomLocked(PromptBytes(transfer->prompt_length))) {
      return absl::ResourceExhaustedError("too many transfers are open");
    }
    store_->AddLocked(transfer, lock.now());
  }
  store_->Wake();  // a lease was set
  return transfer->id;
}

void KeptSequences::KeepHome(const std::string& sequence_id, std::unique_ptr<SequenceCache> home) {
  {
    TransferStore::Lock lock(store_);
    const std::shared_ptr<Transfer> transfer = store_->FindKeptLocked(sequence_id);
    if (transfer == nullptr) return;  // `home` goes back after the lock
    if (home == nullptr) {
      store_->EndLocked(transfer, NoSuchSequence(sequence_id));
      return;
    }
    if (quotas_ != nullptr && !home->charged()) {
      home->Hold(quotas_->ChargeDram(
          transfer->tenant, static_cast<uint64_t>(layout_->BytesFor(transfer->context_length))));
    }
    transfer->home = std::move(home);
    transfer->state = Transfer::State::kCommitted;
  }
  store_->Wake();
}

bool KeptSequences::Forget(const std::string& sequence_id, const std::string& tenant) {
  TransferStore::Lock lock(store_);
  const std::shared_ptr<Transfer> transfer = store_->FindKeptLocked(sequence_id);
  if (transfer == nullptr || transfer->tenant != tenant || transfer->attached != 0) return false;
  store_->EndLocked(transfer, NoSuchSequence(sequence_id));
  return true;
}

size_t KeptSequences::count() const { return store_->kept_sequences(); }

}  // namespace sluice
