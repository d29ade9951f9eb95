// Which positions rows attend to, in a layer of a model with an indexer: the `top_k` of the highest
// index scores, lower positions first among equals, or all of them where there are no more
// (DeepSeek-V3.2-Exp, section 2.1). Enqueues only; within the rules of a recorded step.
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

// Behind the selection of a layer's rows [first_row, first_row + rows) of a step, on its stream:
// `selected` has a list for every row of the step, those of these rows are made.
using SelectionObserver =
    std::function<void(Stream& stream, int layer, const kernels::UnitLists& selected,
                       int32_t first_row, int32_t rows)>;

class IndexSelection {
 public:
  struct Options {
    Device* device = nullptr;
    int max_rows = 0;     // of a step
    int decode_rows = 0;  // of a step, for which it must be one piece of work
    int top_k = 0;
    int64_t max_context = 0;
    // Of decode rows, runners-up of the selection that are listed at most, for each of `layers`.
    int runners_up = 0;
    int layers = 0;
  };
  // RESOURCE_EXHAUSTED: no memory for scores and lists.
  static absl::StatusOr<std::unique_ptr<IndexSelection>> Create(const Options& options);

  // Makes the lists of rows [first_row, first_row + rows) of the step. Rows go through in groups,
  // so that their scores stay within kScoreBytes or those of `decode_rows` rows; calls for rows
  // below `decode_rows` share no scratch where their rows differ, others must follow one another on
  // one stream. `scored` is called where the last scores are enqueued and their top-k is not: few
  // processors make that one, and what is put beside it must not take them first. The scores leave
  // `spare_processors` of a GPU to what runs beside them. With `runners_up` there are lists of
  // those too: of rows below `decode_rows`.
  void Select(
      Stream& stream, int layer, const kernels::PagedIndexKeys& keys,
      const LatentAttention::Params& attention, int32_t first_row, int32_t rows,
      absl::FunctionRef<void()> scored = [] {}, int32_t spare_processors = 0,
      bool runners_up = false);
  static constexpr int64_t kScoreBytes = int64_t{64} << 20;

  // [max_rows] lists of top_k positions each, by row of the step; until its next selection.
  kernels::UnitLists lists() const { return lists_; }
  // [decode_rows] lists of runners-up, until the layer's next selection. REQUIRES: they are asked
  // for.
  kernels::UnitLists runners_up(int layer) const;
  // `observer` is called from now on, in recordings too; null: none.
  void Observe(SelectionObserver observer) { observer_ = std::move(observer); }

 private:
  explicit IndexSelection(const Options& options);

  const Options options_;
  const int64_t score_stride_;
  const int32_t group_rows_;
  Buffer scores_;       // float [group_rows_][score_stride_]
  Buffer list_memory_;  // int32 [max_rows][top_k], then [max_rows]
  kernels::UnitLists lists_{};
  Buffer runner_up_memory_;  // by layer int32 [decode_rows][runners_up], then [decode_rows]
  SelectionObserver observer_;
};

}  // namespace sluice
