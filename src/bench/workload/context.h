// Contexts whose KV caches were computed once, to be handed over to many sequences and policies.
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

// A context lies in the device's memory: DRAM is needed for host KV caches, and on a machine with a
// GPU a few contexts of 10 GiB each would leave no room beside them.
struct Context {
  std::vector<int32_t> tokens;
  Buffer memory;
  // The KV cache of all tokens in one layer and of one kind, in the form of a chunk's payload on
  // the wire.
  struct Payload {
    size_t offset = 0;  // Offset in `memory`.
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
  // Returns the bytes of all payloads together.
  size_t bytes() const { return payloads.back().offset + payloads.back().bytes; }
};

// Returns the bytes of an arena for the caches of one sequence of `tokens` tokens. Pools divide the
// arena among the kinds in whole pages of every layer.
int64_t ArenaBytes(const CacheLayout& layout, int64_t tokens);

// Returns a context whose payloads have their offsets and sizes, without memory.
Context EmptyContext(const std::vector<int32_t>& tokens, const CacheLayout& layout);

// Reads contexts into the host's memory. Not thread-safe.
class ContextReader {
 public:
  static absl::StatusOr<std::unique_ptr<ContextReader>> Create(Device* device);
  // Calls `take` with consecutive pieces of a payload; together they are the whole payload.
  void Read(const Context& context, int layer, size_t kind,
            const std::function<void(absl::Span<const uint8_t>)>& take);

 private:
  explicit ContextReader(Device* device);

  struct Piece {
    Buffer memory;  // pinned
    std::unique_ptr<Event> copied;
  };
  const std::unique_ptr<Stream> stream_;
  Piece pieces_[2];  // Used in turn.
};

// Computes the KV caches of prompts under policy full.
class ContextMaker {
 public:
  // `max_context` is the number of tokens of the longest prompt. Returns the device's errors.
  static absl::StatusOr<std::unique_ptr<ContextMaker>> Create(int max_context, Device* device,
                                                              Model* model);
  virtual ~ContextMaker() = default;
  virtual absl::StatusOr<Context> Compute(const std::vector<int32_t>& tokens) = 0;
};

// Writes a context's tokens to `cache`. REQUIRES: the cache has room for them.
void WriteContext(const Context& context, const CacheLayout& layout, ContextReader& reader,
                  SequenceCache& cache);

}  // namespace sluice::bench
