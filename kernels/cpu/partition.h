// The division of a matrix product over workers: a grid over rows and panels, never over k.
#pragma once

#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

struct Part {
  Range rows;
  Range panels;
};

// Returns this worker's part of rows x panels, cut at multiples of row_unit and panel_unit. Among
// all grids with workers = row parts x panel parts it takes the one whose largest part is smallest,
// and among equals the one that cuts rows least, since each cut of the rows reads the weights once
// more.
inline Part PartOf(int64_t rows, int64_t row_unit, int64_t panels, int64_t panel_unit,
                   Worker worker) {
  const int64_t row_units = CeilDiv(rows, row_unit);
  const int64_t panel_units = CeilDiv(panels, panel_unit);
  int64_t row_parts = 1;
  int64_t best = -1;
  for (int64_t parts = 1; parts <= worker.count; ++parts) {
    if (worker.count % parts != 0) continue;
    const int64_t cost = CeilDiv(row_units, parts) * CeilDiv(panel_units, worker.count / parts);
    if (best < 0 || cost < best) {
      best = cost;
      row_parts = parts;
    }
  }
  const int panel_parts = static_cast<int>(worker.count / row_parts);
  const Range r = Share(row_units, {worker.index / panel_parts, static_cast<int>(row_parts)});
  const Range j = Share(panel_units, {worker.index % panel_parts, panel_parts});
  return {{Min(r.begin * row_unit, rows), Min(r.end * row_unit, rows)},
          {Min(j.begin * panel_unit, panels), Min(j.end * panel_unit, panels)}};
}

}  // namespace
}  // namespace sluice::kernels::cpu
