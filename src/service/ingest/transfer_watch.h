// Writes metrics and log lines about transfers as the ingest service sees them. Lines that callers
// can cause at will are limited in number. No line has tokens, unless log_prompts asks for them.
// Thread-safe.
#pragma once

#include <deque>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/base/log_limiter.h"
#include "src/kv/transfer_table.h"

namespace sluice {

class Metrics;

class TransferWatch {
 public:
  TransferWatch(const Metrics& metrics, const Clock* clock, bool log_prompts);

  void Reserved(const Manifest& manifest, const std::string& transfer_id);
  void ReserveRefused(const absl::Status& why);
  // Notes that a stream writes its first chunk to the transfer.
  void StreamBegan(const std::string& transfer_id);
  // Notes that a chunk has been through: the number of its blocks, or the reason why they do not
  // count.
  void ChunkEnded(const absl::StatusOr<uint64_t>& blocks, uint64_t bytes) const;
  // Notes that a stream that wrote to the transfer ended with an error.
  void StreamBroke(const std::string& transfer_id, const absl::Status& why);
  void Committed(const std::string& transfer_id, uint32_t context_length);
  void Aborted(const std::string& transfer_id);

 private:
  // A note about each of the newest kMaxNotes transfers. Notes about transfers that end without a
  // Commit go when they are old.
  struct Note {
    absl::Time reserved;
    bool broken = false;  // its last stream broke
  };
  static constexpr size_t kMaxNotes = 4096;
  static constexpr int kBurst = 20;

  const Metrics& metrics_;
  const Clock* const clock_;
  const bool log_prompts_;
  LogLimiter refusals_, breaks_, aborts_;
  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Note> notes_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> order_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
