#include "src/attention/offload/warm_copies.h"

#include <algorithm>

#include "src/base/status_macros.h"
#include "src/kv/page_copies.h"

namespace sluice {

absl::StatusOr<WarmConstants> WarmConstants::Create(const OffloadPages& pages, Device* device) {
  WarmConstants constants;
  constants.places_ = pages.place_units();
  constants.units_ = pages.most_blocks * pages.units_per_block;
  constants.per_page_ =
      std::max(pages.by_token.rows.back().rows_per_page, pages.by_place.rows.back().rows_per_page);
  const int64_t zeros = pages.kind.block_bytes() / int64_t{sizeof(int32_t)};
  const int64_t count = constants.places_ + 2 * constants.units_ + 5 * constants.per_page_ + zeros;
  SLUICE_ASSIGN_OR_RETURN(
      constants.buffer_,
      device->Allocate(MemoryKind::kPinned, static_cast<size_t>(count) * sizeof(int32_t),
                       "residency tables"));
  auto* out = constants.buffer_.as<int32_t>();
  for (int32_t i = 0; i < constants.places_; ++i) *out++ = i;
  const auto rows = [&out](int64_t n, auto&& value) {
    for (int64_t i = 0; i < n; ++i) {
      *out++ = value(i);
      *out++ = 0;
    }
  };
  rows(constants.units_, [](int64_t i) { return static_cast<int32_t>(i); });
  out = std::fill_n(out, constants.per_page_, -1);
  rows(constants.per_page_, [](int64_t) { return -1; });
  rows(constants.per_page_, [](int64_t) { return kernels::kNoPlace; });
  std::fill_n(out, zeros, 0);
  return constants;
}

void WarmCopies::Make(const std::vector<std::vector<int32_t>>& units, Ops* first, Ops* then) const {
  SLUICE_CHECK(units.size() == static_cast<size_t>(pages.sparse_layers() * pages.kind.heads),
               "a list for each sparse layer and KV head");
  first->clear();
  then->clear();
  for (int layer = 0; layer < pages.dense_layers; ++layer) CopyDense(layer, first);
  auto list = units.begin();
  for (int layer = pages.dense_layers; layer < pages.layers; ++layer) {
    for (int head = 0; head < pages.kind.heads; ++head) {
      ClearTables(layer, head, first);
      CopyRing(layer, head, first);
      if (pages.IsPersistent(layer, head)) {
        CopyPersistent(layer, head, first);
      } else {
        CopyUnits(layer, head, *list, first, then);
      }
      ++list;
    }
  }
}

uint8_t* WarmCopies::PlaceBlock(int layer, int head, int64_t block) const {
  const int32_t* const places = table + pages.PlacesEntry(layer);
  const int64_t block_bytes = pages.kind.block_bytes();
  if (!pages.HasHeadTables(layer)) {
    return hbm.PageAddress(0, places[block]) + head * block_bytes;
  }
  const int32_t number = places[pages.HeadTable(layer, head) + block];
  return hbm.PageAddress(0, number / pages.kind.heads) + number % pages.kind.heads * block_bytes;
}

// The row's ring has no part in these: its tokens come here when they leave it.
void WarmCopies::CopyPersistent(int layer, int head, Ops* ops) const {
  const int64_t unit = pages.unit_tokens();
  const int64_t end = std::max<int64_t>(tokens / unit - pages.ring_units() + 1, 0);
  CopyTokens(layer, head, 0, pages.ring_units() * unit, end * unit, ops);
}

void WarmCopies::CopyRows(const ArrayPages::Rows& rows, int64_t entry, int head, int64_t row,
                          int64_t count, const int32_t* values, bool repeat, Ops* ops) const {
  for (const int64_t end = row + count; row < end;) {
    const int64_t n = std::min(end - row, rows.rows_per_page - row % rows.rows_per_page);
    ops->push_back({rows.At(hbm, table + entry, head, row), values,
                    static_cast<size_t>(n * rows.row_bytes())});
    if (!repeat) values += n * rows.dim;
    row += n;
  }
}

void WarmCopies::CopyDense(int layer, Ops* ops) const {
  CopyPages(dram, home.Pages(layer, 0).data(), hbm, table + pages.DenseEntry(layer), 0,
            pages.kind.BlocksFor(tokens), ops);
}

void WarmCopies::ClearTables(int layer, int head, Ops* ops) const {
  const int64_t units = (total + pages.unit_tokens() - 1) / pages.unit_tokens();
  CopyRows(pages.residency(), pages.ByTokenEntry(layer), head, 0, units, constants.none(), true,
           ops);
  const int64_t blocks = pages.PlaceBlocksOf(total);
  const int64_t count = blocks * pages.units_per_block;
  const int64_t ring = std::min(pages.ring_units(), count);
  const int64_t entry = pages.ByPlaceEntry(layer);
  const ArrayPages::Rows& places = pages.places();
  CopyRows(places, entry, head, 0, ring, constants.no_place_rows(), true, ops);
  CopyRows(places, entry, head, ring, count - ring, constants.free_rows(), true, ops);
  CopyRows(places, entry, head, count, pages.place_units() - count, constants.no_place_rows(), true,
           ops);
  for (const ArrayPages::Rows& rows : pages.by_place.rows) {
    if (&rows == &places) continue;
    CopyRows(rows, entry, head, 0, blocks * pages.kind.block_tokens, constants.zeros(), true, ops);
  }
}

void WarmCopies::CopyTokens(int layer, int head, int64_t from, int64_t to, int64_t count,
                            Ops* ops) const {
  const CacheKind& kind = pages.kind;
  const int64_t row_bytes = kind.part_bytes[0];
  for (const int64_t end = from + count; from < end;) {
    const int64_t at = from % kind.block_tokens, there = to % kind.block_tokens;
    const int64_t n = std::min({end - from, kind.block_tokens - at, kind.block_tokens - there});
    const uint8_t* source = home.BlockAddress(layer, 0, head, from / kind.block_tokens);
    uint8_t* target = PlaceBlock(layer, head, to / kind.block_tokens);
    if (n == kind.block_tokens) {
      ops->push_back({target, source, static_cast<size_t>(kind.block_bytes())});
    } else {
      for (int64_t part = 0; part < 2; ++part) {  // K, V
        const int64_t base = part * kind.block_tokens * row_bytes;
        ops->push_back({target + base + there * row_bytes, source + base + at * row_bytes,
                        static_cast<size_t>(n * row_bytes)});
      }
    }
    from += n;
    to += n;
  }
}

// The ring as the row of position `tokens` will find it: its own unit is the newest.
void WarmCopies::CopyRing(int layer, int head, Ops* ops) const {
  const int64_t unit = pages.unit_tokens();
  const int64_t ring_tokens = pages.ring_blocks * pages.kind.block_tokens;
  int64_t from = std::max<int64_t>(tokens / unit - pages.ring_units() + 1, 0) * unit;
  while (from < tokens) {
    const int64_t to = from % ring_tokens;
    const int64_t count = std::min(tokens - from, ring_tokens - to);
    CopyTokens(layer, head, from, to, count, ops);
    from += count;
  }
}

void WarmCopies::CopyUnits(int layer, int head, const std::vector<int32_t>& units, Ops* first,
                           Ops* then) const {
  const int64_t unit = pages.unit_tokens();
  const int64_t places = pages.PlaceBlocksOf(total) * pages.units_per_block;
  const int64_t room = std::max<int64_t>(places - pages.ring_units(), 0);
  const auto count = static_cast<size_t>(std::min(static_cast<int64_t>(units.size()), room));
  const int64_t end = std::max<int64_t>(tokens / unit - pages.ring_units() + 1, 0);
  for (size_t begin = 0, next; begin < count; begin = next) {
    next = begin + 1;
    while (next < count && units[next] == units[next - 1] + 1) ++next;
    const int64_t from = units[begin], to = pages.ring_units() + static_cast<int64_t>(begin);
    const auto n = static_cast<int64_t>(next - begin);
    SLUICE_CHECK(from >= 0 && from + n <= end && (begin == 0 || from > units[begin - 1]),
                 "warm units are ascending, and older than the ring");
    CopyTokens(layer, head, from * unit, to * unit, n * unit, first);
    CopyRows(pages.residency(), pages.ByTokenEntry(layer), head, from, n, constants.index() + to,
             false, then);
    CopyRows(pages.places(), pages.ByPlaceEntry(layer), head, to, n,
             constants.unit_rows() + 2 * from, false, then);
  }
}

}  // namespace sluice
