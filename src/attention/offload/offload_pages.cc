#include "src/attention/offload/offload_pages.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Rows begin at multiples of this, so that a GPU can read 16 bytes at once.
constexpr int64_t kAlignment = 16;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

absl::Status OutOfRange(const std::string& field, const std::string& expected, int64_t found) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": expected ", expected, ", found ", found));
}

}  // namespace

absl::Status ArrayPages::Fit(int64_t head_bytes) {
  int64_t step = 1;  // smallest number of tokens for which every array has whole rows
  for (const Rows& r : rows) step = std::max(step, r.tokens_per_row);
  int64_t step_bytes = 0;
  for (const Rows& r : rows) {
    SLUICE_CHECK(step % r.tokens_per_row == 0);
    step_bytes += step / r.tokens_per_row * r.row_bytes();
  }
  for (int64_t steps = head_bytes / step_bytes; steps > 0; --steps) {
    int64_t offset = 0;
    for (Rows& r : rows) {
      r.offset = offset;
      r.rows_per_page = static_cast<int32_t>(steps * step / r.tokens_per_row);
      offset = Aligned(offset + r.rows_per_page * r.row_bytes());
    }
    tokens_per_page = steps * step;
    if (offset <= head_bytes) return absl::OkStatus();
  }
  std::string names;
  for (const Rows& r : rows) absl::StrAppend(&names, names.empty() ? "" : ", ", r.name);
  return absl::InvalidArgumentError(
      absl::StrCat("block_tokens: a block of one head has ", head_bytes, " bytes, but the rows of ",
                   names, " for ", step, " tokens take ", step_bytes, "; take larger blocks"));
}

absl::StatusOr<OffloadPages> OffloadPages::Of(const OffloadTierOptions& options) {
  const CacheLayout& layout = options.hbm->layout();
  SLUICE_CHECK(layout.kinds.size() == 1 && layout.kinds[0].part_bytes.size() == 2);
  OffloadPages pages;
  pages.layers = layout.layers;
  pages.kind = layout.kinds[0];
  pages.dense_layers = options.dense_layers;
  const int64_t block_tokens = pages.kind.block_tokens;
  if (options.dense_layers < 0 || options.dense_layers > layout.layers) {
    return OutOfRange("dense_layers", absl::StrCat("0 to the model's ", layout.layers),
                      options.dense_layers);
  }
  if (options.ring_blocks < 1) return OutOfRange("ring_blocks", "at least 1", options.ring_blocks);
  if (options.recall_blocks < 0) {
    return OutOfRange("recall_blocks", "0 or more", options.recall_blocks);
  }
  if (!(options.recall_share >= 0 && options.recall_share <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("recall_share: expected 0 to 1, found ", options.recall_share));
  }
  const int64_t lists = int64_t{layout.layers} * pages.kind.heads;
  if (!options.persistent.empty() && std::ssize(options.persistent) != lists) {
    return OutOfRange("persistent", absl::StrCat("none or ", lists, " heads"),
                      std::ssize(options.persistent));
  }
  if (options.unit_tokens != 1 && options.unit_tokens != block_tokens) {
    return OutOfRange("unit_tokens", absl::StrCat("1 or a block's ", block_tokens),
                      options.unit_tokens);
  }
  pages.units_per_block = block_tokens / options.unit_tokens;
  pages.most_blocks = pages.kind.BlocksFor(options.max_context);
  pages.ring_blocks = options.ring_blocks;
  pages.recall_blocks = options.recall_blocks;
  pages.recall_share = options.recall_share;
  pages.persistent = options.persistent;
  pages.place_blocks = pages.PlaceBlocksOf(options.max_context);
  for (const OffloadArray& array : options.arrays) {
    const bool at_home = array.place == OffloadArray::Place::kDram;
    SLUICE_CHECK(!at_home || array.tokens_per_row > 0, "places lie in HBM");
    pages.groups.push_back(at_home                    ? &OffloadPages::at_home
                           : array.tokens_per_row > 0 ? &OffloadPages::by_token
                                                      : &OffloadPages::by_place);
    (pages.*pages.groups.back())
        .rows.push_back(
            {array.name, std::max<int64_t>(array.tokens_per_row, 1), array.dim, array.type});
  }
  pages.by_token.rows.push_back({"residency", options.unit_tokens, 1, kernels::DType::kFloat32});
  pages.by_place.rows.push_back({"places", options.unit_tokens, 2, kernels::DType::kFloat32});
  SLUICE_RETURN_IF_ERROR(pages.by_token.Fit(pages.kind.block_bytes()));
  SLUICE_RETURN_IF_ERROR(pages.by_place.Fit(pages.kind.block_bytes()));
  if (!pages.at_home.rows.empty()) {
    SLUICE_RETURN_IF_ERROR(pages.at_home.Fit(pages.kind.block_bytes()));
  }
  pages.LayOut();
  return pages;
}

OffloadPages::ArrayAt OffloadPages::Array(size_t index) const {
  const auto wanted = groups.at(index);
  const auto end = groups.begin() + static_cast<int64_t>(index);
  const auto at = static_cast<size_t>(std::count(groups.begin(), end, wanted));
  const ArrayPages& group = this->*wanted;
  return {&group, &group.rows[at]};
}

int64_t OffloadPages::PlaceBlocksOf(int64_t total) const {
  const auto of_long = static_cast<int64_t>(std::ceil(recall_share * static_cast<double>(total)));
  return std::min(ring_blocks + std::max(recall_blocks, kind.BlocksFor(of_long)),
                  kind.BlocksFor(total));
}

int64_t OffloadPages::PlaceBlocksOf(int64_t total, int layer, int head) const {
  return IsPersistent(layer, head) ? ring_blocks + kind.BlocksFor(total) : PlaceBlocksOf(total);
}

int64_t OffloadPages::PlacePagesOf(int64_t total, int layer) const {
  if (!HasHeadTables(layer)) return PlaceBlocksOf(total);
  int64_t blocks = 0;
  for (int head = 0; head < kind.heads; ++head) blocks += PlaceBlocksOf(total, layer, head);
  return (blocks + kind.heads - 1) / kind.heads;
}

int64_t OffloadPages::PagesOf(int64_t total) const {
  int64_t pages = dense_layers * kind.BlocksFor(total) +
                  sparse_layers() * (by_token.PagesFor(total) + place_pages());
  for (int layer = dense_layers; layer < layers; ++layer) pages += PlacePagesOf(total, layer);
  return pages;
}

bool OffloadPages::IsPersistent(int layer, int head) const {
  return !persistent.empty() && persistent[static_cast<size_t>(layer * kind.heads + head)] != 0;
}

bool OffloadPages::HasHeadTables(int layer) const {
  for (int head = 0; head < kind.heads; ++head) {
    if (IsPersistent(layer, head)) return true;
  }
  return false;
}

int64_t OffloadPages::HeadTable(int layer, int head) const {
  int64_t entry = 0;
  for (int before = 0; before < head; ++before) {
    entry += IsPersistent(layer, before) ? ring_blocks + most_blocks : place_blocks;
  }
  return entry;
}

void OffloadPages::LayOut() {
  int64_t next = dense_layers * most_blocks;
  for (int layer = dense_layers; layer < layers; ++layer) {
    places_entries.push_back(next);
    next += HasHeadTables(layer) ? HeadTable(layer, kind.heads) : place_blocks;
    next += token_pages() + place_pages() + home_pages();
  }
  places_entries.push_back(next);
}

int64_t OffloadPages::PoolTokensOf(int64_t total) const {
  return (PagesOf(total) + layers - 1) / layers * kind.block_tokens;
}

int64_t OffloadPages::HomeTokensOf(int64_t total) const {
  const int64_t pages = sparse_layers() * at_home.PagesFor(total);
  if (pages == 0) return total;
  return (kind.BlocksFor(total) + (pages + layers - 1) / layers) * kind.block_tokens;
}

}  // namespace sluice
