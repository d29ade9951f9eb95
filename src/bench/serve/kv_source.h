// Makes the caches that are pushed: random ones in a model's layout, or recorded ones from a
// safetensors file.
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
  // Returns the prompt of a request. Recorded caches have their own prompt and ignore both
  // arguments.
  virtual std::vector<int32_t> Prompt(uint64_t seed, int64_t tokens) const = 0;
  // Returns the output tokens that are known to follow the prompt greedily; empty if unknown.
  virtual const std::vector<int32_t>& Known() const = 0;
  // Returns the number of chunks of all layers and kinds that cover a prompt of `tokens` tokens.
  virtual absl::StatusOr<size_t> ChunkCount(int64_t tokens, uint64_t max_chunk_bytes) = 0;
  // Returns chunk number `index` of them; the caller sets its transfer id. Valid until the next
  // call.
  virtual v1::WriteRequest& Chunk(int64_t tokens, uint64_t max_chunk_bytes, size_t index) = 0;
};

// Makes caches of normally distributed values in the layout's element types. The bytes of one chunk
// size are the same for every layer and request: the work of a decode node does not depend on them,
// except for the tokens that it produces.
absl::StatusOr<std::unique_ptr<KvSource>> NewRandomKv(const v1::ModelInfo& model);

// Makes caches from case number `number` of a file like those in tests/fixtures: case0.prompt,
// case0.k.LAYER and case0.v.LAYER [tokens][heads][head_dim], case0.tokens. Errors name the file and
// the tensor.
absl::StatusOr<std::unique_ptr<KvSource>> NewRecordedKv(const v1::ModelInfo& model,
                                                        const std::string& path, int number);

}  // namespace sluice::bench
