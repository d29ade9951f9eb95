// Contexts that were computed once, for many sequences and policies to be handed over.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/device/device.h"
#include "src/kv/sequence_cache.h"
#include "src/model/model.h"

namespace sluice {

// Lies in the device's memory: DRAM is for homes, and on a machine with a GPU a few contexts of
// 10 GiB each leave no room beside them.
struct Context {
  std::vector<int32_t> tokens;
  // [layers][layer_bytes], of the model's one cache kind, all tokens: a chunk's payload as the wire
  // has it.
  Buffer memory;
  size_t layer_bytes = 0;
  std::vector<uint32_t> crc32c;  // by layer

  const uint8_t* layer(int layer) const {
    return memory.as<uint8_t>() + static_cast<size_t>(layer) * layer_bytes;
  }
};

// Reads contexts into the host's memory. One thread at a time.
class ContextReader {
 public:
  static absl::StatusOr<std::unique_ptr<ContextReader>> Create(Device* device);
  // Calls `take` with pieces of a layer, one after the other: together all of it.
  void ReadLayer(const Context& context, int layer,
                 const std::function<void(absl::Span<const uint8_t>)>& take);

 private:
  explicit ContextReader(Device* device);

  struct Piece {
    Buffer memory;  // pinned
    std::unique_ptr<Event> copied;
  };
  const std::unique_ptr<Stream> stream_;
  Piece pieces_[2];  // in turn
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
void WriteContext(const Context& context, const CacheLayout& layout, ContextReader& reader,
                  SequenceCache& cache);

}  // namespace sluice
