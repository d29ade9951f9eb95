// RowExchange takes the rows of a step to the ranks that have their experts, and brings the
// experts' sums back (kernels/exchange_params.h). Every rank calls Dispatch and Combine in turn, in
// each layer of each step, whether or not it has rows. Internal to src/model.
//
// A rank may send all of its rows to one other, so a block has room for the most rows that any rank
// has in the step. All buffers are there once for max_rows of them.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "src/device/rank_group.h"
#include "src/model/layer_operators.h"

namespace sluice {

class RowExchange {
 public:
  struct Options {
    int dim = 0;      // of a row
    int choices = 0;  // of a row
    int ranks = 1;
    int experts_each = 0;
    DType type = DType::kFloat32;  // of a row's values as they travel
  };
  // `group` may be null where nothing will be computed. It and `ops` outlive this.
  RowExchange(const Options& options, RankGroup* group, const LayerOperators& ops)
      : options_(options), group_(group), ops_(ops) {}

  absl::Status Allocate(Workspace& workspace, int max_rows);

  // The rows that arrived, as an expert's operators take them. A row without a choice is none.
  struct Arrived {
    const void* x = nullptr;  // activations [rows][dim]
    const int32_t* chosen = nullptr;
    const float* weights = nullptr;
    const int32_t* pairs = nullptr;
    const int32_t* begins = nullptr;
    float* sums = nullptr;  // float32 [rows][dim], zeros: for what Combine brings back
    int32_t rows = 0;
  };
  struct Rows {
    const void* x = nullptr;  // activations [rows][dim]
    const int32_t* chosen = nullptr;
    const float* weights = nullptr;
    int32_t rows = 0;
    int32_t most_rows = 0;  // of any rank in the step, the same on each
  };
  // Enqueues what sends the rows off and what takes those that arrive.
  Arrived Dispatch(Stream& stream, const Rows& rows);
  // Enqueues out += the sums that other ranks made for the rows of the newest Dispatch.
  void Combine(Stream& stream, const Rows& rows, float* out);

 private:
  const Options options_;
  RankGroup* const group_;
  const LayerOperators& ops_;
  Buffer sent_, arrived_;                     // [ranks][rows] units
  Buffer sent_counts_, arrived_counts_;       // int32 [ranks]
  Buffer returned_counts_;                    // int32 [ranks]: those of sent_counts_ again
  Buffer places_;                             // int32 [rows][ranks]
  Buffer x_;                                  // activation [ranks * rows][dim]
  Buffer chosen_, weights_, pairs_, begins_;  // of rows that arrived
  Buffer sums_, returned_;                    // float32 [ranks * rows][dim]
};

}  // namespace sluice
