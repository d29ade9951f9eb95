#include <algorithm>
#include <cstring>

#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {

void Transfer(const TransferParams& p, Worker worker) {
  for (int64_t list = worker.index; list < p.lists; list += worker.count) {
    const char* source =
        static_cast<const char*>(p.source) +
        (p.source_offsets != nullptr ? p.source_offsets[list] : list * p.source_stride);
    char* target = static_cast<char*>(p.target) +
                   (p.target_offsets != nullptr ? p.target_offsets[list] : list * p.target_stride);
    const int64_t count = std::clamp(p.counts[list], 0, p.capacity);
    for (int64_t i = 0; i < count; ++i) {
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
}

void CopyRows(const CopyRowsParams& p, Worker worker) {
  for (int32_t i = worker.index; i < p.count; i += worker.count) {
    const RowsPiece& piece = p.pieces[i];
    for (int64_t r = 0; r < piece.rows; ++r) {
      const int64_t from = piece.source_rows != nullptr ? piece.source_rows[r] : r;
      if (from < 0) continue;
      const int64_t bytes = piece.words == nullptr
                                ? piece.row_bytes
                                : std::min(int64_t{piece.row_bytes}, int64_t{4} * piece.words[r]);
      std::memcpy(static_cast<char*>(piece.target) + r * piece.target_pitch,
                  static_cast<const char*>(piece.source) + from * piece.source_pitch,
                  static_cast<size_t>(bytes));
    }
  }
}

}  // namespace sluice::kernels::reference
