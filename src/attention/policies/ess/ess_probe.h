// Hooks of policy ess for benches and profiles alone. A server leaves all of them at their
// defaults.
#pragma once

#include <cstdint>
#include <functional>

#include "src/attention/latent/index_selection.h"
#include "src/device/device.h"

namespace sluice {

struct EssProbe {
  // True: the host copies each entry by itself in place of the operator Transfer, which shows what
  // that operator brings. The host then waits for every layer's lists, so steps cannot be recorded.
  bool row_copies = false;
  // Steps that are enqueued while the pointed-to value is true fetch nothing, and their results are
  // wrong. Null: every step fetches.
  const bool* skip_transfers = nullptr;
  // Called after each selection, whose lists it may replace. Null: nothing is called.
  SelectionObserver on_selection;
  // Points in the work of one layer, in their order.
  enum class Stage { kBegin, kSelected, kResidencyUpdated, kFetched, kPrepared, kAttended };
  static constexpr int kStages = 6;
  // Called before the first stage of a layer's decode rows is enqueued, and after each stage.
  // REQUIRES: overlap kNone, so that the stages follow one another on one stream.
  std::function<void(Stream& stream, int layer, int32_t rows, Stage done)> on_stage;
};

}  // namespace sluice
