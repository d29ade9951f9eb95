#include "src/service/ingest/transfer_watch.h"

#include <optional>
#include <utility>

#include "src/base/logging.h"
#include "src/metrics/metrics.h"
#include "src/service/wire/request_log.h"

namespace sluice {

TransferWatch::TransferWatch(const Metrics& metrics, const Clock* clock, bool log_prompts)
    : metrics_(metrics),
      clock_(clock),
      log_prompts_(log_prompts),
      refusals_(clock, kBurst, absl::Seconds(1)),
      breaks_(clock, kBurst, absl::Seconds(1)),
      aborts_(clock, kBurst, absl::Seconds(1)) {}

void TransferWatch::Reserved(const Manifest& manifest, const std::string& transfer_id) {
  metrics_.reserves_accepted.Add();
  {
    absl::MutexLock lock(&mutex_);
    notes_[transfer_id].reserved = clock_->Now();
    order_.push_back(transfer_id);
    if (order_.size() > kMaxNotes) {
      notes_.erase(order_.front());
      order_.pop_front();
    }
  }
  Log(LogLevel::kDebug, "transfer reserved",
      {{"transfer_id", transfer_id},
       {"prompt_tokens", manifest.prompt_token_ids.size()},
       {"context_length", manifest.context_length},
       {"max_new_tokens", manifest.max_new_tokens}});
  if (!log_prompts_) return;
  const std::vector<int32_t> prompt(manifest.prompt_token_ids.begin(),
                                    manifest.prompt_token_ids.end());
  Log(LogLevel::kInfo, "transfer tokens",
      {{"transfer_id", transfer_id}, {"prompt_token_ids", LoggedTokens(prompt)}});
}

void TransferWatch::ReserveRefused(const absl::Status& why) {
  metrics_.reserves_refused(ReasonLabel(why)).Add();
  if (!LogEnabled(LogLevel::kInfo)) return;
  const std::optional<uint64_t> suppressed = refusals_.Admit();
  if (!suppressed.has_value()) return;
  Log(LogLevel::kInfo, "transfer refused",
      {{"reason", ReasonLabel(why)}, {"error", LoggedError(why)}, {"suppressed", *suppressed}});
}

void TransferWatch::StreamBegan(const std::string& transfer_id) {
  bool resumes = false;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = notes_.find(transfer_id);
    resumes = found != notes_.end() && std::exchange(found->second.broken, false);
  }
  if (!resumes) return;
  metrics_.resumes.Add();
  Log(LogLevel::kDebug, "transfer resumed", {{"transfer_id", transfer_id}});
}

void TransferWatch::ChunkEnded(const absl::StatusOr<uint64_t>& blocks, uint64_t bytes) const {
  if (blocks.ok()) {
    metrics_.ingest_bytes.Add(static_cast<double>(bytes));
    metrics_.ingest_blocks.Add(static_cast<double>(*blocks));
  } else if (absl::IsDataLoss(blocks.status())) {
    metrics_.checksum_failures.Add();
  }
}

void TransferWatch::StreamBroke(const std::string& transfer_id, const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    const auto found = notes_.find(transfer_id);
    if (found != notes_.end()) found->second.broken = true;
  }
  if (!LogEnabled(LogLevel::kWarn)) return;
  const std::optional<uint64_t> suppressed = breaks_.Admit();
  if (!suppressed.has_value()) return;
  Log(LogLevel::kWarn, "transfer stream broke",
      {{"transfer_id", transfer_id},
       {"reason", ReasonLabel(why)},
       {"error", LoggedError(why)},
       {"suppressed", *suppressed}});
}

void TransferWatch::Committed(const std::string& transfer_id, uint32_t context_length) {
  absl::Time reserved;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = notes_.find(transfer_id);
    if (found == notes_.end()) return;  // a repeated Commit has no note
    reserved = found->second.reserved;
    notes_.erase(found);
  }
  const absl::Duration elapsed = clock_->Now() - reserved;
  metrics_.ingest_seconds.Observe(elapsed);
  Log(LogLevel::kDebug, "transfer committed",
      {{"transfer_id", transfer_id},
       {"context_length", context_length},
       {"elapsed_seconds", absl::ToDoubleSeconds(elapsed)}});
}

void TransferWatch::Aborted(const std::string& transfer_id) {
  {
    absl::MutexLock lock(&mutex_);
    // A transfer that was never reserved here or was committed is no abort worth a line.
    if (notes_.erase(transfer_id) == 0) return;
  }
  if (!LogEnabled(LogLevel::kInfo)) return;
  const std::optional<uint64_t> suppressed = aborts_.Admit();
  if (!suppressed.has_value()) return;
  // The sender's own words are left out, since they may quote anything.
  Log(LogLevel::kInfo, "transfer aborted",
      {{"transfer_id", transfer_id}, {"suppressed", *suppressed}});
}

}  // namespace sluice
