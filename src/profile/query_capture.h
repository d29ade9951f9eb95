// The queries, keys and values of prompts as attention sees them: after q_norm, k_norm and RoPE.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "src/base/dtype.h"
#include "src/device/device.h"
#include "src/model/model.h"
#include "src/profile/traffic.h"

namespace sluice {

// Queries and keys of one layer and KV head.
struct HeadQueries {
  // [tokens * group][head_dim]; the group's query heads of a token lie together.
  std::vector<float> q;
  std::vector<float> k;  // [tokens][head_dim]
  std::vector<float> v;  // [tokens][head_dim]; empty if values were not wanted
};

struct CapturedQueries {
  int64_t layers = 0, kv_heads = 0, head_dim = 0;
  std::vector<HeadQueries> heads;  // [layers * kv_heads]
  const HeadQueries& of(int64_t layer, int64_t head) const {
    return heads[static_cast<size_t>(layer * kv_heads + head)];
  }
};

// Appends `count` elements of a cache, which are float32 or bfloat16.
void AppendFloats(const void* elements, int64_t count, DType type, std::vector<float>* to);

// Computes the prompts with full attention and keeps about `tokens` of their tokens, evenly spread.
// `progress(done, all)` gets numbers of prompt tokens. Values are kept only if wanted. REQUIRES:
// every prompt fits the model's max_context, and model->max_rows() >= 1. RESOURCE_EXHAUSTED: there
// is no memory.
absl::StatusOr<CapturedQueries> CaptureQueries(
    Device* device, Model* model, const std::vector<Prompt>& prompts, int64_t tokens,
    const std::function<void(int64_t, int64_t)>& progress, bool values = false);

}  // namespace sluice
