// Computes prompts, which is the other half of a handoff, with the same model code as the decode
// engine.
//
// Run() computes a prompt in chunks and calls the sink with every layer of every chunk as soon as
// its caches are computed, while the later layers are still being computed.
//
// The caches of earlier prompts stay in HBM for as long as nothing else needs the room. What a
// prompt begins with that is there need not be computed: its layers go to the sink beside the first
// chunk.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "src/base/clock.h"
#include "src/device/device.h"
#include "src/kv/cache_layout.h"
#include "src/kv/selection_hints.h"
#include "src/request/token.h"
#include "src/sampling/sampling_params.h"

namespace sluice {

class Metrics;
class Model;

// Takes one layer's caches of tokens [token_begin, token_end) of one cache kind, all heads, as the
// payload of a chunk (proto/sluice/v1/ingest.proto). `pieces` are valid during the call. Called on
// a thread of the prefiller, in order of chunks, then layers. An error ends the run with that
// error.
class LayerSink {
 public:
  virtual ~LayerSink() = default;
  // Says that the prompt's turn has come; nothing is computed yet.
  virtual absl::Status Begin() = 0;
  // Returns whose prompts this one may share blocks with.
  virtual std::string tenant() const { return ""; }
  // Returns, after Begin, the leading tokens whose layers nobody wants.
  virtual int64_t cached_tokens() const { return 0; }
  virtual absl::Status Layer(int layer, const CacheKind& kind, int token_begin, int token_end,
                             absl::Span<const absl::Span<const uint8_t>> pieces) = 0;
  // A sink may take caches from where they lie in the device's memory, so that they do not pass
  // through pinned memory. Asked once, after Begin.
  virtual bool OnDevice() { return false; }
  // Takes what Layer does, in order. `pieces` stay as they are until FlushDevice has returned.
  // Returns false if what was taken so far may be lost: then every layer is given by Layer, from
  // cached_tokens() on, and none by this any more.
  virtual absl::StatusOr<bool> LayerOnDevice(int /*layer*/, const CacheKind& /*kind*/,
                                             int /*token_begin*/, int /*token_end*/,
                                             absl::Span<const absl::Span<const uint8_t>>
                                             /*pieces*/) {
    return false;
  }
  // Waits until what LayerOnDevice took has arrived, and returns what that does. Nothing reads the
  // pieces after it, whatever it returns.
  virtual absl::StatusOr<bool> FlushDevice() { return true; }
  // Returns, after Begin, the maximum tokens of a layer and KV head that hints may name. 0: hints
  // are of no use.
  virtual int64_t hint_tokens() const { return 0; }
  // Returns, after Begin, whether hints may have the queries of the prompt's last row.
  virtual bool wants_queries() const { return false; }
};

struct PrefillResult {
  std::optional<OutputToken> first_token;
  // The blocks or tokens that the prompt's last rows attend to. Empty unless Options::hints is set
  // and the sink wants them.
  SelectionHints hints;
  absl::Duration queued;
  absl::Duration compute;
};

class Prefiller {
 public:
  struct Options {
    uint32_t max_context = 0;
    uint32_t chunk_tokens = 512;
    uint64_t seed = 0;
    int64_t hbm_bytes = 0;
    bool hints = false;
    bool prefix_cache = true;
    const Metrics* metrics = nullptr;  // counts reused tokens; outlives the prefiller; may be null
  };
  static absl::StatusOr<std::unique_ptr<Prefiller>> Create(const Options& options, Device* device,
                                                           Model* model, Clock* clock);
  virtual ~Prefiller() = default;
  // Computes a prompt. Blocking; one prompt at a time, while others wait their turn. `cancelled` is
  // asked between chunks and layers. Errors: INVALID_ARGUMENT (prompt, sampling),
  // RESOURCE_EXHAUSTED (the prompt does not fit in hbm_bytes), CANCELLED, and the sink's own.
  virtual absl::StatusOr<PrefillResult> Run(const std::vector<int32_t>& prompt,
                                            const SamplingParams& sampling, bool want_first_token,
                                            LayerSink& sink,
                                            const std::function<bool()>& cancelled) = 0;
};

}  // namespace sluice
