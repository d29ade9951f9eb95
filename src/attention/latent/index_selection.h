// The positions that rows attend to, in a layer of a model with an indexer: the `top_k` of the
// highest index scores, lower positions first among equals, or all positions if there are no more
// (DeepSeek-V3.2-Exp, section 2.1). This class only enqueues, within the rules of a recorded step.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kernels/latent_params.h"
#include "src/attention/latent_attention.h"
#include "src/device/device.h"

namespace sluice {

// A function that is called after the selection of a layer's rows [first_row, first_row + rows) of
// a step, on the step's stream. `selected` has a list for every row of the step; those of these
// rows are complete.
using SelectionObserver =
    std::function<void(Stream& stream, int layer, const kernels::UnitLists& selected,
                       int32_t first_row, int32_t rows)>;

class IndexSelection {
 public:
  struct Options {
    Device* device = nullptr;
    int max_rows = 0;     // Maximum rows of a step.
    int decode_rows = 0;  // Decode rows of a step, which are scored in one group.
    int top_k = 0;
    int64_t max_context = 0;
    // Most runners-up that are listed for each decode row of each of `layers` layers.
    int runners_up = 0;
    int layers = 0;
    int sequence_rows = 1;  // Most decode rows of one sequence in a step.
  };
  // RESOURCE_EXHAUSTED: there is no memory for scores and lists.
  static absl::StatusOr<std::unique_ptr<IndexSelection>> Create(const Options& options);

  // Enqueues the lists of rows [first_row, first_row + rows) of the step. Rows are processed in
  // groups, so that their scores stay within kScoreBytes or within those of `decode_rows` rows.
  // Calls for rows below `decode_rows` share no scratch if their rows differ; other calls must
  // follow one another on one stream. `scored` is called when the last scores are enqueued and
  // their top-k is not: top-k takes few processors, and work that is put beside it must not take
  // them first. The scores leave `spare_processors` of a GPU to what runs beside them. With
  // `runners_up`, the runners-up of rows below `decode_rows` are listed too.
  void Select(
      Stream& stream, int layer, const kernels::PagedIndexKeys& keys,
      const LatentAttention::Params& attention, int32_t first_row, int32_t rows,
      absl::FunctionRef<void()> scored = [] {}, int32_t spare_processors = 0,
      bool runners_up = false);
  static constexpr int64_t kScoreBytes = int64_t{64} << 20;

  // Returns [max_rows] lists of top_k positions each, by row of the step. They are valid until the
  // next selection of the step.
  kernels::UnitLists lists() const { return lists_; }
  // Returns [decode_rows] lists of runners-up, valid until the layer's next selection. REQUIRES:
  // Options::runners_up > 0.
  kernels::UnitLists runners_up(int layer) const;
  // Calls `observer` from now on, in recordings too. Null: nothing is called.
  void Observe(SelectionObserver observer) { observer_ = std::move(observer); }

 private:
  explicit IndexSelection(const Options& options);

  const Options options_;
  const int64_t score_stride_;
  const int32_t group_rows_;
  Buffer scores_;       // float [group_rows_][score_stride_]
  Buffer list_memory_;  // int32 [max_rows][top_k], then [max_rows]
  kernels::UnitLists lists_{};
  Buffer runner_up_memory_;  // For each layer int32 [decode_rows][runners_up], then [decode_rows].
  SelectionObserver observer_;
};

}  // namespace sluice
