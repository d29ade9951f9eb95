// Turns the sending process into a node that is read from: it holds caches of random bytes and
// serves them with the KvSource of a prefill node.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "src/bench/ingest/ingest_sender.h"

namespace sluice::bench {

class IngestSource {
 public:
  // Serves on a free port, with the job's layout and certificate. Caches consist of `bytes`.
  // REQUIRES: `bytes` outlives the result.
  static absl::StatusOr<std::unique_ptr<IngestSource>> Start(const SendJob& job,
                                                             absl::Span<const uint8_t> bytes);
  virtual ~IngestSource() = default;
  // Holds one more prompt of job.context tokens, each of them 1, and reports its address.
  virtual absl::Status Hold(const SendJob& job, SendResult* result) = 0;
};

}  // namespace sluice::bench
