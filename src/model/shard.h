// A Shard is the part of a dense model that one rank of a tensor-parallel group has (Megatron-LM,
// arXiv 1909.08053, section 3): whole heads of attention, a part of the FFN's inner width, rows of
// the head by vocabulary, and columns of the embedding. Pure values and functions, for any thread.
//
// A rank computes with its part what one device would compute with all, up to two sums over ranks a
// layer, behind attention's and behind the FFN's last product. The KV heads are divided among the
// ranks; where there are fewer of them than ranks, each is on several, which divide its queries'
// heads, if need be unevenly.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "src/model/model_config.h"

namespace sluice {

// Numbers [first, first + count) of a dimension.
struct ShardPart {
  int first = 0;
  int count = 0;
};

struct Shard {
  int rank = 0;
  int size = 1;
  ShardPart heads, kv_heads;
  ShardPart inner;       // of intermediate_size
  ShardPart hidden;      // columns of the embedding
  ShardPart vocabulary;  // rows of the head
  // The rows of every rank's head but the last one's, which may have fewer.
  int vocabulary_step = 0;

  bool whole() const { return size == 1; }
};

// Returns the part of rank `rank` of `size`. INVALID_ARGUMENT, which names tensor_parallel, if the
// model cannot be divided so; UNIMPLEMENTED for latent models and size > 1.
absl::StatusOr<Shard> ShardOf(const ModelConfig& config, int rank, int size);

// Returns the config as the rank sees it: heads, kv_heads and intermediate_size are the rank's.
ModelConfig PartOf(const ModelConfig& config, const Shard& shard);

// The routed experts that one rank of an expert-parallel group has (GShard, arXiv 2006.16668,
// section 3). It has all the other weights too, and attends for sequences of its own. Which experts
// of a layer these are, expert_placement.h says.
struct ExpertShard {
  int rank = 0;
  int size = 1;
  int redundancy = 0;  // copies of other ranks' experts that a rank has
  int each = 0;        // experts of a layer that a rank has, these copies included

  bool whole() const { return size == 1; }
};

// Returns the part of rank `rank` of `size`. INVALID_ARGUMENT, which names expert_parallel, if the
// model has no experts or cannot divide them so, and which names expert_redundancy, if that is more
// than the experts of other ranks.
absl::StatusOr<ExpertShard> ExpertShardOf(const ModelConfig& config, int rank, int size,
                                          int redundancy = 0);

// A step of `rows` rows and `logits` logit rows moves this between ranks, by the operations of
// src/device/rank_group.h, in bytes of this rank's operands.
struct StepExchange {
  int64_t all_reduces = 0, all_reduce_bytes = 0;
  int64_t all_gathers = 0, all_gather_bytes = 0;
};
StepExchange ExchangeOf(const ModelConfig& config, const Shard& shard, int64_t rows,
                        int64_t logits);

// The exchange of rows between the ranks of an expert-parallel group, in bytes of a rank's operands
// in a layer (all of what it may send, to every rank).
struct ExpertExchange {
  int64_t layers = 0;          // that have experts
  int64_t dispatch_bytes = 0;  // of one all-to-all
  int64_t combine_bytes = 0;   // of the all-to-all back
};
// `most_rows`: the most rows that any rank has in the step. `unit_bytes`: of a row on its way out
// (kernels/exchange_params.h).
ExpertExchange ExpertExchangeOf(const ModelConfig& config, const ExpertShard& shard,
                                int64_t most_rows, int64_t unit_bytes);

}  // namespace sluice
