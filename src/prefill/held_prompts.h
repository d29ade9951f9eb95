// Prompts whose caches wait here until a decode node has read them: computed, held in ordinary
// memory under a lease, given back by Release or when the lease ends. Thread-safe.
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
#include "src/prefill/prefiller.h"
#include "src/request/token.h"
#include "src/sampling/sampling_params.h"

namespace sluice {

// A layer's caches of tokens [token_begin, token_end) of one kind, all heads, as chunk payload.
struct HeldLayer {
  int layer = 0;
  size_t kind = 0;  // of the layout
  int token_begin = 0, token_end = 0;
  std::unique_ptr<uint8_t[]> bytes;
  size_t size = 0;
  // Of each block, in order of `bytes`: made once, whoever reads it and in whatever chunks.
  std::vector<uint32_t> crc32c;

  // Of tokens [from, to) of heads [head_begin, head_end). REQUIRES: `from` is a block's first and
  // `to` a block's or the layer's end; they are one piece of `bytes`.
  uint32_t Crc32cOf(const CacheKind& of_kind, uint32_t from, uint32_t to, uint32_t head_begin,
                    uint32_t head_end) const;
};

// Does not change once it is held; whoever reads it owns a share.
struct HeldPrompt {
  std::string source_id;  // 32 hexadecimal digits
  std::string tenant;
  std::string request_id;  // of whom it was computed for; empty: nobody can name it
  std::string prompt_digest;
  uint32_t context_length = 0;
  std::vector<HeldLayer> layers;  // in the order in which they were computed
  uint64_t bytes = 0;             // of them
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
    // Of an entry of hints: what the pools of decode nodes take is not known here.
    int64_t hint_tokens = 1 << 14;
  };
  HeldPrompts(Options options, Prefiller* prefiller);
  ~HeldPrompts();

  struct Wanted {
    std::vector<int32_t> prompt;
    SamplingParams sampling;  // of the first token
    bool want_first_token = false;
    std::string tenant;
    std::string request_id;
    // Anything that is to live for as long as the prompt is held or read.
    std::shared_ptr<const void> keep = nullptr;
  };
  struct Held {
    std::shared_ptr<const HeldPrompt> prompt;
    absl::Duration queued, compute;
    absl::Duration lease;
  };
  // Computes the prompt and holds its caches; blocking, as Prefiller::Run. Its errors, and
  // RESOURCE_EXHAUSTED (reason HOLD_FULL, with a time to retry) before anything is computed where
  // what is held leaves no room; INVALID_ARGUMENT where it could never fit.
  absl::StatusOr<Held> Hold(const Wanted& wanted, const std::function<bool()>& cancelled);

  // Null: there is none of that name for the tenant. Renews the lease.
  std::shared_ptr<const HeldPrompt> Find(const std::string& source_id, const std::string& tenant);
  // As Find, with another lease than the longest: at most that.
  std::optional<absl::Duration> Renew(const std::string& source_id, const std::string& tenant,
                                      absl::Duration lease);
  // Whether it was held. Its memory goes back with its last reader.
  bool Release(const std::string& source_id, const std::string& tenant);
  // The same for what was computed for a request; looks through all that is held.
  bool ReleaseRequest(const std::string& request_id);

  struct Usage {
    size_t prompts = 0;
    uint64_t bytes = 0;    // promised too
    uint64_t expired = 0;  // leases that ended, so far
    uint64_t max_bytes = 0;
  };
  Usage usage() const;
  absl::Duration max_lease() const { return options_.max_lease; }

 private:
  class Collector;
  // What the memory of prompts is counted in: given back with a prompt's last owner.
  struct Budget;
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
  const std::shared_ptr<Budget> budget_;
  mutable absl::Mutex mutex_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  uint64_t expired_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread reaper_;  // last
};

}  // namespace sluice
