// Contexts that were computed once, for many sequences and policies to be handed over.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/device/device.h"
#include "src/kv/sequence_cache.h"
#include "src/model/model.h"

namespace sluice {

struct Context {
  std::vector<int32_t> tokens;
  // By layer, of the model's one cache kind, all tokens: a chunk's payload as the wire has it.
  std::vector<std::vector<uint8_t>> layers;
};

// Computes the caches of prompts under policy full.
class ContextMaker {
 public:
  // `max_context`: tokens of the longest prompt. The device's errors.
  static absl::StatusOr<std::unique_ptr<ContextMaker>> Create(int max_context, Device* device,
                                                              Model* model);
  virtual ~ContextMaker() = default;
  virtual absl::StatusOr<Context> Compute(const std::vector<int32_t>& tokens) = 0;
};

// Writes the first tokens of a context to `cache`, as many as there are in it. REQUIRES: the cache
// has room for them.
void WriteContext(const Context& context, const CacheLayout& layout, SequenceCache& cache);

}  // namespace sluice
