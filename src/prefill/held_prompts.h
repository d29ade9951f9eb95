// Holds prompts whose caches wait here until a decode node has read them. The caches are under a
// lease, and go with Release or when the lease ends. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/kv/cache_layout.h"
#include "src/kv/selection_hints.h"
#include "src/prefill/held_memory.h"
#include "src/prefill/prefiller.h"
#include "src/request/token.h"
#include "src/sampling/sampling_params.h"

namespace sluice {

// A layer's caches of all tokens of one cache kind, all heads, as chunk payload. They are in one
// piece however the prompt was computed, so that a reader's chunks may be as large as it likes.
struct HeldLayer {
  int layer = 0;
  size_t kind = 0;  // index into the layout's kinds
  int tokens = 0;
  uint8_t* bytes = nullptr;  // in the prompt's memory
  size_t size = 0;
  // The checksum of each block, in the order of `bytes`. They are made once, whoever reads the
  // layer and in whatever chunks.
  std::vector<uint32_t> crc32c;

  // Returns the checksum of tokens [from, to) of heads [head_begin, head_end). REQUIRES: `from` is
  // the first token of a block, `to` is the end of a block or of the layer, and the range is
  // contiguous in `bytes`.
  uint32_t Crc32cOf(const CacheKind& of_kind, uint32_t from, uint32_t to, uint32_t head_begin,
                    uint32_t head_end) const;
};

// A held prompt. It does not change once it is held, and each reader owns a share.
struct HeldPrompt {
  std::string source_id;  // 32 hexadecimal digits
  std::string tenant;
  std::string request_id;  // the request that it was computed for; empty: it has no name
  std::string prompt_digest;
  uint32_t context_length = 0;
  std::shared_ptr<uint8_t[]> memory;  // of the layers, one behind the other
  std::vector<HeldLayer> layers;      // by layer, then by kind
  uint64_t bytes = 0;                 // bytes of the layers
  SelectionHints hints;
  std::optional<OutputToken> first_token;
  std::shared_ptr<const void> kept_with;  // see Wanted
};

class HeldPrompts {
 public:
  struct Options {
    CacheLayout layout;
    uint64_t max_bytes = uint64_t{2} << 30;
    size_t max_prompts = 4096;
    absl::Duration max_lease = absl::Seconds(60);
    // Maximum tokens that an entry of hints names. This node does not know what the pools of decode
    // nodes take.
    int64_t hint_tokens = 1 << 14;
  };
  // The caches lie in `arena`, which has options.max_bytes bytes, or if it is empty, in ordinary
  // memory. Links need an arena that their device reaches (MemoryKind::kPinned).
  HeldPrompts(Options options, Prefiller* prefiller, Buffer arena = Buffer());
  ~HeldPrompts();

  struct Wanted {
    std::vector<int32_t> prompt;
    SamplingParams sampling;  // for the first token
    bool want_first_token = false;
    std::string tenant;
    std::string request_id;
    // An object that must live for as long as the prompt is held or read.
    std::shared_ptr<const void> keep = nullptr;
  };
  struct Held {
    std::shared_ptr<const HeldPrompt> prompt;
    absl::Duration queued, compute;
    absl::Duration lease;
  };
  // Computes the prompt and holds its caches; blocking, as Prefiller::Run. Returns that function's
  // errors; RESOURCE_EXHAUSTED (reason HOLD_FULL, with a time to retry) before anything is computed
  // if the held prompts leave no room; INVALID_ARGUMENT if the prompt could never fit.
  absl::StatusOr<Held> Hold(const Wanted& wanted, const std::function<bool()>& cancelled);

  // Returns the prompt and renews its lease. Null if the tenant has no prompt of this name.
  std::shared_ptr<const HeldPrompt> Find(const std::string& source_id, const std::string& tenant);
  // Renews the lease for `lease`, and at most for the longest one. Returns the granted lease, or
  // nothing if the tenant has no prompt of this name.
  std::optional<absl::Duration> Renew(const std::string& source_id, const std::string& tenant,
                                      absl::Duration lease);
  // Releases the prompt and returns whether it was held. Its memory goes back with its last reader.
  bool Release(const std::string& source_id, const std::string& tenant);
  // Releases the prompts that were computed for a request. Looks through all held prompts.
  bool ReleaseRequest(const std::string& request_id);

  struct Usage {
    size_t prompts = 0;
    uint64_t bytes = 0;    // held prompts, those still read, those being computed
    uint64_t expired = 0;  // leases that ended since the start
    uint64_t max_bytes = 0;
  };
  Usage usage() const;
  absl::Duration max_lease() const { return options_.max_lease; }

 private:
  class Collector;
  struct Entry {
    std::shared_ptr<const HeldPrompt> prompt;
    absl::Time end;
  };
  void ReapLoop();
  std::map<std::string, Entry>::iterator FindLocked(const std::string& source_id,
                                                    const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  Prefiller* const prefiller_;
  HeldMemory memory_;
  mutable absl::Mutex mutex_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  uint64_t expired_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread reaper_;  // last
};

}  // namespace sluice
