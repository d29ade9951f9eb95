#include "src/model/model.h"

#include "src/base/status_macros.h"
#include "src/model/dense_model.h"
#include "src/model/fingerprint.h"
#include "src/model/weight_source.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const Options& options, Device* device) {
  SLUICE_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(options.directory));
  if (options.max_context > config.max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_context: the model's max_position_embeddings is ",
                     config.max_position_embeddings, ", found ", options.max_context));
  }
  std::unique_ptr<WeightSource> source;
  if (options.weights != nullptr) {
    SLUICE_ASSIGN_OR_RETURN(source, options.weights(config));
  } else if (options.load_format == "dummy") {
    source = DummyWeights(config);
  } else {
    SLUICE_ASSIGN_OR_RETURN(source, OpenCheckpoint(options.directory, config));
  }
  SLUICE_RETURN_IF_ERROR(source->CheckNoLeftovers());
  SLUICE_ASSIGN_OR_RETURN(std::string fingerprint, Fingerprint(config, *source));
  return NewDenseModel(options, config, std::move(fingerprint), std::move(source), device);
}

}  // namespace sluice
