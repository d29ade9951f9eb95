// What a step's fetches take by themselves: the same operator with lists of the same lengths, layer
// by layer, from memory that is laid out as homes are, beside nothing else.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/policy_options.h"
#include "src/kv/page_pool.h"

namespace sluice::bench {

struct TransferAlone {
  double seconds = 0;  // of all layers' transfers, one after the other
  double bytes = 0;
  double rate() const { return seconds > 0 ? bytes / seconds : 0; }
};

// `misses`: of each sequence, by layer; rounded. Homes of `batch` sequences of `context` tokens, as
// policy ess with these options has them in its pools. Reads and writes the pools' memory.
// REQUIRES: no policy has anything of them. RESOURCE_EXHAUSTED: no memory for lists.
absl::StatusOr<TransferAlone> MeasureTransferAlone(const PolicyOptions& options, int batch,
                                                   int64_t context,
                                                   absl::Span<const double> misses);

}  // namespace sluice::bench
