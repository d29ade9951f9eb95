#include <cstring>

#include "kernels/cpu/cpu_tables.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

int64_t CountOf(const TransferParams& p, int64_t list) {
  return Max(0, Min(p.counts[list], p.capacity));
}

void CopyEntries(const TransferParams& p, int64_t list, int64_t begin, int64_t end) {
  const char* source =
      static_cast<const char*>(p.source) +
      (p.source_offsets != nullptr ? p.source_offsets[list] : list * p.source_stride);
  char* target = static_cast<char*>(p.target) +
                 (p.target_offsets != nullptr ? p.target_offsets[list] : list * p.target_stride);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t entry = list * p.capacity + i;
    const int64_t from = p.source_units != nullptr ? p.source_units[entry] : i;
    const int64_t to = p.target_units != nullptr ? p.target_units[entry] : i;
    if (from < 0 || to < 0) continue;
    for (int64_t part = 0; part < p.parts; ++part) {
      std::memcpy(target + to * p.target_pitch + part * p.part_pitch,
                  source + from * p.source_pitch + part * p.part_pitch,
                  static_cast<size_t>(p.unit_bytes));
    }
  }
}

}  // namespace

// Entries are numbered list by list, and each worker takes its share of the numbers: a list may be
// longer than all the others together.
void Transfer(const TransferParams& p, Worker worker) {
  int64_t total = 0;
  for (int64_t list = 0; list < p.lists; ++list) total += CountOf(p, list);
  const Range mine = Share(total, worker);
  int64_t before = 0;
  for (int64_t list = 0; list < p.lists && before < mine.end; ++list) {
    const int64_t count = CountOf(p, list);
    CopyEntries(p, list, Max(mine.begin - before, 0), Min(mine.end - before, count));
    before += count;
  }
}

// Workers share the rows of each piece.
void CopyRows(const CopyRowsParams& p, Worker worker) {
  for (int32_t i = 0; i < p.count; ++i) {
    const RowsPiece& piece = p.pieces[i];
    const Range mine = Share(piece.rows, worker);
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      const int64_t from = piece.source_rows != nullptr ? piece.source_rows[r] : r;
      if (from < 0) continue;
      const int64_t bytes = piece.words == nullptr
                                ? piece.row_bytes
                                : Min(int64_t{piece.row_bytes}, int64_t{4} * piece.words[r]);
      std::memcpy(static_cast<char*>(piece.target) + r * piece.target_pitch,
                  static_cast<const char*>(piece.source) + from * piece.source_pitch,
                  static_cast<size_t>(bytes));
    }
  }
}

}  // namespace sluice::kernels::cpu
