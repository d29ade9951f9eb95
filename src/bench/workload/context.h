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

namespace sluice::bench {

// Lies in the device's memory: DRAM is for homes, and on a machine with a GPU a few contexts of
// 10 GiB each leave no room beside them.
struct Context {
  std::vector<int32_t> tokens;
  Buffer memory;
  // Of a layer and kind, all tokens: a chunk's payload as the wire has it.
  struct Payload {
    size_t offset = 0;  // in memory
    size_t bytes = 0;
    uint32_t crc32c = 0;
  };
  size_t kinds = 1;
  std::vector<Payload> payloads;  // [layers][kinds]

  const Payload& payload(int layer, size_t kind) const {
    return payloads[static_cast<size_t>(layer) * kinds + kind];
  }
  Payload& payload(int layer, size_t kind) {
    return payloads[static_cast<size_t>(layer) * kinds + kind];
  }
  // Of all payloads.
  size_t bytes() const { return payloads.back().offset + payloads.back().bytes; }
};

// Of an arena for the caches of one sequence of `tokens` tokens: pools divide it among the kinds in
// whole pages of every layer.
int64_t ArenaBytes(const CacheLayout& layout, int64_t tokens);

// A context whose payloads have their places, without memory.
Context EmptyContext(const std::vector<int32_t>& tokens, const CacheLayout& layout);

// Reads contexts into the host's memory. One thread at a time.
class ContextReader {
 public:
  static absl::StatusOr<std::unique_ptr<ContextReader>> Create(Device* device);
  // Calls `take` with pieces of a payload, one after the other: together all of it.
  void Read(const Context& context, int layer, size_t kind,
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

}  // namespace sluice::bench
