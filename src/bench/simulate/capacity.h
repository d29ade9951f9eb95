// How many sequences of a model with latent caches fit a rank's memory, by the same arithmetic that
// the pools use: a sequence's tokens in whole blocks, and under policy ess its places, index keys
// and residency tables in HBM (policies/ess/pool_shape.h) and its entries in DRAM.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "src/model/model_config.h"

namespace sluice::bench {

struct CapacityAsk {
  bool ess = false;
  int64_t context = 0;  // Tokens of a sequence, its answer included.
  double ratio = 0.2;   // Policy ess: places for each token.
  int64_t least_places = 6400;
  int draft_layers = 0;  // Further layers whose caches lie in HBM whole: they draft tokens.
  int block_tokens = 32;
  int64_t hbm_bytes = 0;  // For caches, without weights.
  int64_t dram_bytes = 0;
};

struct Capacity {
  int64_t hbm_bytes_each = 0, dram_bytes_each = 0;
  int64_t sequences = 0;
  std::string bound;   // The memory that ends the batch: "HBM" or "DRAM".
  int64_t places = 0;  // Policy ess: of a sequence in a layer.
  bool whole = false;  // Policy ess: every token has a place.
};

// Errors are those of LatentCacheLayout. REQUIRES: config.latent.
absl::StatusOr<Capacity> CapacityOf(const ModelConfig& config, const CapacityAsk& ask);

}  // namespace sluice::bench
