#include "src/model/policy_model.h"

namespace sluice {

void DescribeModel(const Model& model, PolicyOptions* options) {
  const ModelConfig& config = model.config();
  options->max_context = model.max_context();
  options->max_rows = model.max_rows();
  options->heads = config.heads;
  options->architecture = config.architecture;
  if (!config.latent.has_value()) return;
  options->latent_rank = config.latent->rank;
  options->index_top_k = config.latent->indexer.has_value() ? config.latent->indexer->top_k : 0;
}

}  // namespace sluice
