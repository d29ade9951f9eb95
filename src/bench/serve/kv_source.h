// Caches to push: random ones of a model's layout, or recorded ones from a safetensors file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "sluice/v1/common.pb.h"
#include "sluice/v1/ingest.pb.h"
#include "src/kv/cache_layout.h"

namespace sluice::bench {

class KvSource {
 public:
  virtual ~KvSource() = default;
  // The prompt of request number `index` where its length may be chosen: recorded ones have theirs.
  virtual std::vector<int32_t> Prompt(uint64_t seed, int64_t tokens) const = 0;
  // Output tokens that are known to follow it greedily; empty: not known.
  virtual const std::vector<int32_t>& Known() const = 0;
  // Chunks of all layers and kinds that cover a prompt of `tokens` tokens.
  virtual absl::StatusOr<size_t> ChunkCount(int64_t tokens, uint64_t max_chunk_bytes) = 0;
  // Chunk number `index` of them, its transfer id left to the caller. Valid until the next call.
  virtual v1::WriteRequest& Chunk(int64_t tokens, uint64_t max_chunk_bytes, size_t index) = 0;
};

// Values of a normal distribution in the layout's element types. The bytes of one chunk's size are
// the same for every layer and request: nothing in a decode node depends on them but the tokens.
absl::StatusOr<std::unique_ptr<KvSource>> NewRandomKv(const v1::ModelInfo& model);

// Case number `number` of a file as tests/fixtures has them: case0.prompt, case0.k.LAYER and
// case0.v.LAYER [tokens][heads][head_dim], case0.tokens. The error names the file and the tensor.
absl::StatusOr<std::unique_ptr<KvSource>> NewRecordedKv(const v1::ModelInfo& model,
                                                        const std::string& path, int number);

}  // namespace sluice::bench
