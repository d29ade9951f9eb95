#include "src/attention/latent/index_selection.h"

#include <algorithm>
#include <limits>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

// Rows of scores begin on cache lines.
constexpr int64_t kScoresAligned = 32;

}  // namespace

IndexSelection::IndexSelection(const Options& options)
    : options_(options),
      score_stride_((options.max_context + kScoresAligned - 1) / kScoresAligned * kScoresAligned),
      group_rows_(static_cast<int32_t>(std::clamp<int64_t>(
          kScoreBytes / (score_stride_ * int64_t{sizeof(float)}),
          std::clamp(options.decode_rows, 1, options.max_rows), options.max_rows))) {}

absl::StatusOr<std::unique_ptr<IndexSelection>> IndexSelection::Create(const Options& options) {
  SLUICE_CHECK(options.max_rows > 0 && options.top_k > 0 && options.max_context > 0);
  std::unique_ptr<IndexSelection> made(new IndexSelection(options));
  SLUICE_RETURN_IF_ERROR(
      BufferAllocator(options.device, "the indexer's scores")
          .Words(MemoryKind::kDevice, made->group_rows_ * made->score_stride_, &made->scores_));
  const int64_t units = int64_t{options.max_rows} * options.top_k;
  SLUICE_RETURN_IF_ERROR(
      BufferAllocator(options.device, "selected positions")
          .Words(MemoryKind::kDevice, units + options.max_rows, &made->list_memory_));
  made->lists_.units = made->list_memory_.as<int32_t>();
  made->lists_.counts = made->lists_.units + units;
  made->lists_.capacity = options.top_k;
  if (options.runners_up > 0) {
    SLUICE_RETURN_IF_ERROR(
        BufferAllocator(options.device, "runners-up of selections")
            .Words(MemoryKind::kDevice,
                   int64_t{options.layers} * options.decode_rows * (options.runners_up + 1),
                   &made->runner_up_memory_));
  }
  return made;
}

kernels::UnitLists IndexSelection::runners_up(int layer) const {
  SLUICE_CHECK(options_.runners_up > 0 && layer < options_.layers);
  const int64_t rows = options_.decode_rows, capacity = options_.runners_up;
  kernels::UnitLists lists{};
  lists.units = runner_up_memory_.as<int32_t>() + layer * rows * (capacity + 1);
  lists.counts = lists.units + rows * capacity;
  lists.capacity = options_.runners_up;
  return lists;
}

void IndexSelection::Select(Stream& stream, int layer, const kernels::PagedIndexKeys& keys,
                            const LatentAttention::Params& a, int32_t first_row, int32_t rows,
                            absl::FunctionRef<void()> scored, int32_t spare_processors,
                            bool runners_up) {
  SLUICE_CHECK(first_row >= 0 && first_row + rows <= options_.max_rows &&
               a.top_k == options_.top_k && a.index_q != nullptr);
  const int64_t head_bytes =
      keys.type == DType::kFloat8E4M3 ? kernels::kIndexDim : kernels::kIndexDim * sizeof(float);
  for (int32_t begin = first_row, end; begin < first_row + rows; begin = end) {
    // A row's scores are always in the same place of the scratch, so a group ends where the scratch
    // does.
    end = std::min(first_row + rows, (begin / group_rows_ + 1) * group_rows_);
    kernels::IndexLogitsParams logits{};
    logits.q = static_cast<const uint8_t*>(a.index_q) + begin * a.index_heads * head_bytes;
    logits.weights = a.index_weights + int64_t{begin} * a.index_heads;
    logits.slots = a.slots + begin;
    logits.positions = a.positions + begin;
    logits.cache = keys;
    logits.scores = scores_.as<float>() + begin % group_rows_ * score_stride_;
    logits.score_stride = score_stride_;
    logits.rows = end - begin;
    logits.heads = a.index_heads;
    logits.spare_processors = spare_processors;
    logits.sequence_rows = options_.sequence_rows;
    options_.device->kernels().IndexLogits(stream, logits);
    if (end == first_row + rows) scored();

    kernels::TopKParams top{};
    top.scores = logits.scores;
    top.score_stride = score_stride_;
    top.slots = logits.slots;
    top.positions = logits.positions;
    top.selected = lists_;
    top.selected.units += int64_t{begin} * options_.top_k;
    top.selected.counts += begin;
    top.rows = logits.rows;
    top.kv_heads = 1;
    top.unit_tokens = 1;
    top.k = options_.top_k;
    top.margin = std::numeric_limits<float>::infinity();
    if (runners_up) {
      SLUICE_CHECK(end <= options_.decode_rows);
      top.runners_up = this->runners_up(layer);
      top.runners_up.units += int64_t{begin} * options_.runners_up;
      top.runners_up.counts += begin;
    }
    options_.device->kernels().TopK(stream, top);
  }
  if (observer_ != nullptr) observer_(stream, layer, lists_, first_row, rows);
}

}  // namespace sluice
