// What the last rows of a prompt selected, of each layer (sparse attention's indexer): hints for
// which entries a decode node begins with in HBM. A least-recently-used set that is given them, the
// oldest row's first, is what it would be had it seen those rows (ESS, LRU warm-up).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/sparse_params.h"
#include "src/device/device.h"
#include "src/kv/selection_hints.h"

namespace sluice {

// Rows whose selections are kept: ESS warms up with those of the last 32 positions.
inline constexpr int kLastSelections = 32;

// One prompt at a time.
class LastSelections {
 public:
  // Lists of up to `top_k` tokens. RESOURCE_EXHAUSTED: no memory for them.
  static absl::StatusOr<std::unique_ptr<LastSelections>> Create(Device* device, int layers,
                                                                int32_t top_k);

  // A prompt of `tokens` tokens; what was kept of the one before is forgotten.
  void Begin(int64_t tokens);
  // Keeps, of the lists of rows [0, rows) that begin at position `first_position`, those of the
  // last rows of the prompt; enqueued on the stream.
  void Keep(Stream& stream, int layer, const kernels::UnitLists& selected, int64_t first_position,
            int rows);
  // The hints of all layers, none of it being under way any more: each token once, with the newest
  // row that selected it, newest rows first; of each layer no more than `most_tokens`. Blocking.
  SelectionHints Read(Stream& stream, int64_t most_tokens);

 private:
  LastSelections(Device* device, int layers, int32_t top_k);
  int64_t rows() const { return std::min<int64_t>(tokens_, kLastSelections); }

  Device* const device_;
  const int layers_;
  const int32_t top_k_;
  Buffer units_;   // int32 [layers][kLastSelections][top_k]; row i is position tokens - rows() + i
  Buffer counts_;  // int32 [layers][kLastSelections]
  Buffer read_;    // pinned: units, then counts
  int64_t tokens_ = 0;
  std::vector<bool> kept_;       // [layers][kLastSelections] of this prompt
  std::vector<uint32_t> named_;  // by token: 1 + the layer whose hints name it already
};

}  // namespace sluice
