#include "src/model/shard.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

// Rows of the head are divided in steps of this many, so that parts begin where the kernels' tiles
// and panels do.
constexpr int kVocabularyStep = 16;

absl::Status CannotDivide(const ModelConfig& config, int size, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor_parallel: ", config.name, " cannot be divided among ", size, " ranks: ", why));
}

ShardPart Share(int all, int rank, int size) {
  const int64_t first = int64_t{all} * rank / size, end = int64_t{all} * (rank + 1) / size;
  return {static_cast<int>(first), static_cast<int>(end - first)};
}

}  // namespace

absl::StatusOr<Shard> ShardOf(const ModelConfig& config, int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor_parallel: rank ", rank, " of ", size, " ranks"));
  }
  if (config.latent.has_value() && size > 1) {
    return absl::UnimplementedError(
        absl::StrCat("tensor_parallel: ", config.name, " (", config.architecture,
                     ") has latent caches; llama, qwen2 and qwen3 can be divided: set it to 1, and "
                     "expert_parallel to the number of ranks"));
  }
  Shard shard;
  shard.rank = rank;
  shard.size = size;
  const int kv = config.kv_heads, group = kv > 0 ? config.heads / kv : 0;
  if (size == 1) {
    shard.heads = {0, config.heads};
    shard.kv_heads = {0, kv};
  } else if (kv % size == 0) {
    shard.kv_heads = Share(kv, rank, size);
    shard.heads = {shard.kv_heads.first * group, shard.kv_heads.count * group};
  } else if (size % kv == 0) {
    const int ranks = size / kv;  // that have the same KV head
    shard.kv_heads = {rank / ranks, 1};
    shard.heads = Share(group, rank % ranks, ranks);
    shard.heads.first += shard.kv_heads.first * group;
    if (group < ranks) return CannotDivide(config, size, absl::StrCat(config.heads, " heads"));
  } else {
    return CannotDivide(config, size,
                        absl::StrCat("of its ", kv,
                                     " KV heads and the ranks, one number must "
                                     "divide the other"));
  }
  for (const auto& [all, what, part] :
       {std::tuple{config.intermediate_size, "intermediate_size", &shard.inner},
        std::tuple{config.hidden_size, "hidden_size", &shard.hidden}}) {
    if (size > 1 && all % size != 0) {
      return CannotDivide(config, size, absl::StrCat(what, " ", all, " is no multiple of that"));
    }
    *part = Share(all, rank, size);
  }
  const int step = size == 1 ? config.vocab_size
                             : (config.vocab_size + size * kVocabularyStep - 1) /
                                   (size * kVocabularyStep) * kVocabularyStep;
  shard.vocabulary_step = step;
  shard.vocabulary = {rank * step, std::min(step, config.vocab_size - rank * step)};
  if (config.vocab_size <= (size - 1) * step) {
    return CannotDivide(config, size, absl::StrCat("vocab_size ", config.vocab_size));
  }
  return shard;
}

ModelConfig PartOf(const ModelConfig& config, const Shard& shard) {
  ModelConfig part = config;
  if (shard.whole()) return part;
  part.heads = shard.heads.count;
  part.kv_heads = shard.kv_heads.count;
  part.intermediate_size = shard.inner.count;
  return part;
}

absl::StatusOr<ExpertShard> ExpertShardOf(const ModelConfig& config, int rank, int size,
                                          int redundancy) {
  if (size < 1 || rank < 0 || rank >= size) {
    return absl::InvalidArgumentError(
        absl::StrCat("expert_parallel: rank ", rank, " of ", size, " ranks"));
  }
  ExpertShard shard;
  shard.rank = rank;
  shard.size = size;
  const int routed = config.latent.has_value() ? config.latent->experts.routed : 0;
  if (size > 1 && routed == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expert_parallel: ", config.name, " (", config.architecture,
        ") has no experts that ranks could divide: set it to 1, and tensor_parallel to "
        "the number of ranks"));
  }
  if (routed % size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("expert_parallel: ", config.name, " has ",
                                                   routed, " experts, which ", size,
                                                   " ranks cannot divide evenly"));
  }
  const int share = routed / size;
  if (redundancy < 0 || redundancy > routed - share) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expert_redundancy: ", config.name, " has ", routed, " experts, of which each of ", size,
        " ranks has ", share, ", so it can have copies of up to ", routed - share,
        " more, but expert_redundancy is ", redundancy));
  }
  shard.redundancy = redundancy;
  shard.each = share + redundancy;
  return shard;
}

ExpertExchange ExpertExchangeOf(const ModelConfig& config, const ExpertShard& shard,
                                int64_t most_rows, int64_t unit_bytes) {
  ExpertExchange out;
  if (shard.whole()) return out;
  out.layers = config.layers - config.latent->dense_layers;
  out.dispatch_bytes = shard.size * most_rows * unit_bytes;
  out.combine_bytes = shard.size * most_rows * config.hidden_size * 4;
  return out;
}

StepExchange ExchangeOf(const ModelConfig& config, const Shard& shard, int64_t rows,
                        int64_t logits) {
  StepExchange out;
  if (shard.whole()) return out;
  constexpr int64_t kFloat = 4;
  out.all_reduces = 2 * int64_t{config.layers};
  out.all_reduce_bytes = out.all_reduces * rows * config.hidden_size * kFloat;
  out.all_gathers = logits > 0 ? 2 : 1;
  out.all_gather_bytes = (rows * shard.hidden.count + logits * shard.vocabulary_step) * kFloat;
  return out;
}

}  // namespace sluice
