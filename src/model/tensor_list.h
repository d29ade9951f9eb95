// Lists every tensor that a model's config implies, by its name in published checkpoints. The
// loader, the dummy weights and the fingerprint all go by this list.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/device/weight_rows.h"
#include "src/model/model_config.h"

namespace sluice {

enum class TensorForm {
  kFloating,  // BF16, F16 or F32
  kFp8,       // F8_E4M3; its scales are a tensor beside it
  kScales,    // F32 [ceil(rows / 128), ceil(columns / 128)] for a matrix [rows, columns]
};

struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;  // [rows, columns] or [n]
  TensorForm form = TensorForm::kFloating;

  int64_t elements() const;
};

// Returns "<matrix>_scale_inv", the tensor of the scales by which an fp8 matrix's values are
// multiplied.
std::string ScalesTensor(const std::string& matrix);
// Returns the number of scales of a matrix.
constexpr int64_t ScaleCount(int64_t rows, int64_t cols) {
  return (rows + kScaleBlock - 1) / kScaleBlock * ((cols + kScaleBlock - 1) / kScaleBlock);
}

// Returns the tensors, sorted by name. With a tied head there is no lm_head.weight.
std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config);

// Returns whether the model's checkpoint has a layer behind its last one that drafts
// (num_nextn_predict_layers of config.json).
bool HasDraftLayer(const ModelConfig& config);
// Returns the tensors of that layer that are read where a node drafts with it, sorted by name; none
// if there is no such layer. They are no part of ExpectedTensors: a node that does not draft can do
// without them, and caches are the same with and without. Of several such layers the first one is
// taken. Its indexer and its copy of the embedding are passed over: it attends to the newest tokens
// (src/attention/latent/draft_window.h), and the embedding is the model's.
std::vector<TensorSpec> DraftTensors(const ModelConfig& config);

// Returns "model.layers.<layer>.<suffix>", for example for LayerTensor(3,
// "self_attn.q_proj.weight").
std::string LayerTensor(int layer, const char* suffix);

inline constexpr char kEmbeddingTensor[] = "model.embed_tokens.weight";
inline constexpr char kFinalNormTensor[] = "model.norm.weight";
inline constexpr char kHeadTensor[] = "lm_head.weight";
// Suffixes of what a layer that drafts has beside a decoder layer.
inline constexpr char kDraftTokenNorm[] = "enorm.weight";
inline constexpr char kDraftHiddenNorm[] = "hnorm.weight";
inline constexpr char kDraftProjection[] = "eh_proj.weight";
inline constexpr char kDraftHeadNorm[] = "shared_head.norm.weight";
inline constexpr char kDraftHead[] = "shared_head.head.weight";

// Returns the name of the matrix that makes logits, which is the embedding if the head is tied.
const char* HeadTensor(const ModelConfig& config);

// Returns whether a checkpoint may have `name` although the config does not imply it. These are a
// copy of the embedding under the head's name if the head is tied, rotary frequencies, which old
// checkpoints saved and which follow from the config, and layers past the last, which draft.
bool IsIgnorableTensor(const ModelConfig& config, const std::string& name);

}  // namespace sluice
