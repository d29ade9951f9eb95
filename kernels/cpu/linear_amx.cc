// Matrix products of the path "amx": bf16 activations and panels, float32 tiles of 16 x 16 outputs.
//
// A step multiplies 16 rows x 32 k of x by one kilobyte of a panel. Every output is one chain of
// steps over k in rising order, and what a step adds to an output depends on that output's row and
// column alone, so neither the number of rows nor the tiling changes a bit.
#include <immintrin.h>

#include "kernels/cpu/amx_tiles.h"
#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/linear_bf16.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kStepElements = kPanelDepth * kPanelColumns;  // elements of a panel per step

// Sets up this thread's tiles for `rows` rows of x, 1 to 32. It costs little beside the products of
// one call, and leaves nothing behind that another library's tiles could disturb. With two tiles of
// rows, tiles 0-3 are sums, 4-5 rows of x, 6-7 panels; with one, tiles 0-3 are sums, 4 rows of x,
// 5-7 panels.
void ConfigureTiles(int64_t rows) {
  TileConfig config;
  const auto first = static_cast<uint8_t>(Min(rows, kTileRows));
  const auto second = static_cast<uint8_t>(rows - first);
  for (uint16_t& bytes : config.column_bytes) bytes = 0;
  for (int t = 0; t < 8; ++t) {
    config.column_bytes[t] = kTileBytes;
    config.rows[t] = kTileRows;
  }
  if (second == 0) {
    for (int t = 0; t < 5; ++t) config.rows[t] = first;
  } else {
    // Sums 0, 1 belong to the first rows, 2, 3 to the second.
    config.rows[2] = config.rows[3] = config.rows[5] = second;
  }
  Written(&config);
  _tile_loadconfig(&config);
}

// Rows of x for one step: in place, or, for the last step of a k that is no multiple of 32, from a
// copy filled up with zeros (the panel's padding is zero, but 0 x NaN would not be).
struct RowSource {
  const uint16_t* x;
  int64_t k;
  int64_t whole_steps;
  alignas(64) uint16_t tail[2 * kTileRows * kPanelDepth];

  RowSource(const LinearParams& p, int64_t row, int64_t rows)
      : x(static_cast<const uint16_t*>(p.x) + row * p.w.k),
        k(p.w.k),
        whole_steps(p.w.k / kPanelDepth) {
    const int64_t done = whole_steps * kPanelDepth;
    if (done == k) return;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < kPanelDepth; ++i) {
        tail[r * kPanelDepth + i] = done + i < k ? x[r * k + done + i] : uint16_t{0};
      }
    }
    Written(tail);
  }
};

struct Sums {
  alignas(64) float tile[4][kTileRows * kPanelColumns];
};

void StoreTile(const LinearParams& p, int64_t row, int64_t rows, int64_t panel, const float* tile) {
  for (int64_t r = 0; r < rows; ++r) {
    StoreColumns(p, row + r, panel, _mm512_load_ps(tile + r * kPanelColumns));
  }
}

// Computes 17 to 32 rows x two panels.
void TwoByTwo(const LinearParams& p, const RowSource& source, int64_t row, int64_t rows,
              int64_t panel) {
  const int64_t stride = PanelStride(p.w);
  const uint16_t* w0 = p.w.data + panel * stride;
  const uint16_t* w1 = w0 + stride;
  const int64_t row_bytes = source.k * 2;
  const uint16_t* x0 = source.x;
  const uint16_t* x1 = source.x + kTileRows * source.k;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < source.whole_steps; ++step) {
    _tile_loadd(6, w0 + step * kStepElements, kTileBytes);
    _tile_loadd(4, x0 + step * kPanelDepth, row_bytes);
    _tile_loadd(7, w1 + step * kStepElements, kTileBytes);
    _tile_loadd(5, x1 + step * kPanelDepth, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  if (source.whole_steps * kPanelDepth < source.k) {
    _tile_loadd(6, w0 + source.whole_steps * kStepElements, kTileBytes);
    _tile_loadd(4, source.tail, kTileBytes);
    _tile_loadd(7, w1 + source.whole_steps * kStepElements, kTileBytes);
    _tile_loadd(5, source.tail + kTileRows * kPanelDepth, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  Sums sums;
  _tile_stored(0, sums.tile[0], kTileBytes);
  _tile_stored(1, sums.tile[1], kTileBytes);
  _tile_stored(2, sums.tile[2], kTileBytes);
  _tile_stored(3, sums.tile[3], kTileBytes);
  StoreTile(p, row, kTileRows, panel, sums.tile[0]);
  StoreTile(p, row, kTileRows, panel + 1, sums.tile[1]);
  StoreTile(p, row + kTileRows, rows - kTileRows, panel, sums.tile[2]);
  StoreTile(p, row + kTileRows, rows - kTileRows, panel + 1, sums.tile[3]);
}

// Computes one tile of rows (x in tile 4) x kPanels <= 4 panels. Panels are read once each; two
// tiles take turns at holding them, so that a load need not wait for the product before it.
template <int kPanels>
void OneByFew(const LinearParams& p, const RowSource& source, int64_t row, int64_t rows,
              int64_t panel) {
  const int64_t stride = PanelStride(p.w);
  const uint16_t* w = p.w.data + panel * stride;
  const int64_t steps = CeilDiv(source.k, kPanelDepth);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step) {
    const uint16_t* at = w + step * kStepElements;
    for (int j = 0; j < kPanels; ++j) {
      // Every line of the panels is asked for once, two steps (2 KiB of each panel) ahead.
      const char* ahead = reinterpret_cast<const char*>(at + j * stride + 2 * kStepElements);
      for (int line = 0; line < kStepElements * 2; line += 64)
        _mm_prefetch(ahead + line, _MM_HINT_T0);
    }
    if (step < source.whole_steps) {
      _tile_loadd(4, source.x + step * kPanelDepth, source.k * 2);
    } else {
      _tile_loadd(4, source.tail, kTileBytes);
    }
    _tile_loadd(5, at, kTileBytes);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kPanels > 1) {
      _tile_loadd(6, at + stride, kTileBytes);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kPanels > 2) {
      _tile_loadd(7, at + 2 * stride, kTileBytes);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kPanels > 3) {
      _tile_loadd(5, at + 3 * stride, kTileBytes);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  Sums sums;
  _tile_stored(0, sums.tile[0], kTileBytes);
  if constexpr (kPanels > 1) _tile_stored(1, sums.tile[1], kTileBytes);
  if constexpr (kPanels > 2) _tile_stored(2, sums.tile[2], kTileBytes);
  if constexpr (kPanels > 3) _tile_stored(3, sums.tile[3], kTileBytes);
  for (int j = 0; j < kPanels; ++j) StoreTile(p, row, rows, panel + j, sums.tile[j]);
}

// Computes up to 16 rows of the panels [begin, end). REQUIRES: tiles are configured for that many
// rows.
void FewRows(const LinearParams& p, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  const RowSource source(p, row, rows);
  int64_t panel = begin;
  for (; panel + 4 <= end; panel += 4) OneByFew<4>(p, source, row, rows, panel);
  switch (end - panel) {
    case 3:
      return OneByFew<3>(p, source, row, rows, panel);
    case 2:
      return OneByFew<2>(p, source, row, rows, panel);
    case 1:
      return OneByFew<1>(p, source, row, rows, panel);
    default:
      return;
  }
}

// Computes 17 to 32 rows of the panels [begin, end), an odd panel in two halves of the rows.
void ManyRows(const LinearParams& p, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  const RowSource source(p, row, rows);
  int64_t panel = begin;
  for (; panel + 2 <= end; panel += 2) TwoByTwo(p, source, row, rows, panel);
  if (panel == end) return;
  ConfigureTiles(kTileRows);
  FewRows(p, row, kTileRows, panel, end);
  ConfigureTiles(rows - kTileRows);
  FewRows(p, row + kTileRows, rows - kTileRows, panel, end);
  ConfigureTiles(rows);
}

}  // namespace

void LinearAmx(const LinearParams& p, Worker worker) {
  CheckBf16Linear(p);
  constexpr int64_t kBlockRows = 2 * kTileRows;
  const int64_t panel_unit = p.rows > kTileRows ? 2 : 1;
  const Part part = PartOf(p.rows, kBlockRows, CeilDiv(p.w.n, kPanelColumns), panel_unit, worker);
  // This many panels stay in the second-level cache while every row of the part passes by.
  const int64_t block_panels = Max(2, (512 << 10) / (PanelStride(p.w) * 2) / 4 * 4);
  int64_t configured = 0;
  for (int64_t j = part.panels.begin; j < part.panels.end; j += block_panels) {
    const int64_t end = Min(j + block_panels, part.panels.end);
    for (int64_t r = part.rows.begin; r < part.rows.end; r += kBlockRows) {
      const int64_t rows = Min(kBlockRows, part.rows.end - r);
      if (rows != configured) {
        ConfigureTiles(rows);
        configured = rows;
      }
      if (rows > kTileRows) {
        ManyRows(p, r, rows, j, end);
      } else {
        FewRows(p, r, rows, j, end);
      }
    }
  }
  if (configured != 0) _tile_release();
}

}  // namespace sluice::kernels::cpu
