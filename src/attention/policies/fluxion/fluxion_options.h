// Checks of the options of policy fluxion, and the sizes that follow from them.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/fluxion_params.h"
#include "kernels/fluxion_segments.h"
#include "src/attention/policy_options.h"

namespace sluice {

// Units of lists are blocks of the cache.
struct FluxionShape {
  int32_t layers = 0;
  int32_t dense_layers = 0;
  int32_t slots = 0;
  int32_t rows = 0;  // decode rows of a step at most
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t unit_tokens = 0;
  int32_t first_level = 0;  // the level whose blocks are units
  int32_t plan_first = 0;   // lists have blocks of levels plan_first to plan_last
  int32_t plan_last = 0;
  int32_t digest_levels = 1;   // levels [0, digest_levels) have digests
  int32_t most_units = 0;      // units of the longest sequence
  int32_t sink_units = 0;      // units of the sink
  int32_t ring_units = 0;      // units of the ring, which holds all local tokens
  int32_t resident_units = 0;  // places of the longest sequence, the ring's included

  int64_t lists() const { return int64_t{rows} * kv_heads; }
  // Returns the elements of a row of digests. Rows of all levels have no spread: with blocks of 16
  // tokens they would take 75 bytes of a page for each element of a head, and it has 64 in bf16.
  int32_t digest_dim() const {
    return (digest_levels == 1 ? kernels::kDigestVectors : kernels::kDigestPieces) * head_dim;
  }
  int32_t recall_units() const { return resident_units - ring_units; }
  // Returns the stride of a row's scores, in blocks of the smallest level.
  int64_t score_stride() const {
    return int64_t{most_units} * unit_tokens / kernels::LevelTokens(0) + 1;
  }
};

// INVALID_ARGUMENT: the message names the option that is out of range.
absl::Status CheckFluxionOptions(const PolicyOptions& options);

// Returns the sizes of a policy for `rows` decode rows. REQUIRES: CheckFluxionOptions(options).
FluxionShape FluxionShapeOf(const PolicyOptions& options, int rows);

// Returns the share of the missing units that the device reads, which is 0 where it pulls parts of
// what is left, and where workers make the lists. With `device_share` negative, the device and the
// workers end at about the same time.
float FluxionDeviceShare(const PolicyOptions& options);

}  // namespace sluice
