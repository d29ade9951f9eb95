// Measures a step's fetches alone: the same operator with lists of the same lengths, layer by
// layer, from memory laid out like host KV caches, with nothing running beside it.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/policy_options.h"
#include "src/kv/page_pool.h"

namespace sluice::bench {

struct TransferAlone {
  double seconds = 0;  // All layers' transfers, one after the other.
  double bytes = 0;
  double rate() const { return seconds > 0 ? bytes / seconds : 0; }
};

// `misses` holds the misses of each sequence by layer, which are rounded. The host KV caches are
// those of `batch` sequences of `context` tokens, as policy ess with these options has them in its
// pools. Reads and writes the pools' memory. REQUIRES: no policy holds pages of the pools.
// RESOURCE_EXHAUSTED: no memory for the lists.
absl::StatusOr<TransferAlone> MeasureTransferAlone(const PolicyOptions& options, int batch,
                                                   int64_t context,
                                                   absl::Span<const double> misses);

}  // namespace sluice::bench
