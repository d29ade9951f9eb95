#include "src/model/policy_model.h"

#include "src/model/shard.h"

namespace sluice {

void DescribeModel(const Model& model, PolicyOptions* options) {
  const ModelConfig& config = model.config();
  options->max_context = model.max_context();
  options->max_rows = model.max_rows();
  options->heads = config.heads;
  const Shard shard = model.shard();
  if (!shard.whole()) {
    const ModelConfig& whole = model.whole_config();
    options->rank_heads = {shard.heads.first, shard.heads.count, whole.heads};
    options->rank_kv_heads = {shard.kv_heads.first, shard.kv_heads.count, whole.kv_heads};
  }
  options->architecture = config.architecture;
  if (!config.latent.has_value()) return;
  options->latent_rank = config.latent->rank;
  options->index_top_k = config.latent->indexer.has_value() ? config.latent->indexer->top_k : 0;
}

}  // namespace sluice
