// Small scalar helpers of the kernels.
//
// Everything here has internal linkage on purpose. Files compiled for AVX2 or AVX-512 include this
// header too; an inline function with external linkage would exist once per program, possibly in
// its AVX-512 form, and crash the machines that lack it. For the same reason such files call no
// function templates of the standard library.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"

namespace sluice::kernels {

// Ends the process: a kernel was called outside its contract.
[[noreturn]] void KernelCheckFailed(const char* what);

namespace {

constexpr float kNegativeInfinity = -__builtin_inff();

struct Range {
  int64_t begin;
  int64_t end;
};

// Returns this worker's contiguous share of `total` items.
constexpr Range Share(int64_t total, Worker worker) {
  return {total * worker.index / worker.count, total * (worker.index + 1) / worker.count};
}

constexpr int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr float Bf16ToFloat(uint16_t v) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(v) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN.
constexpr uint16_t FloatToBf16(float v) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Returns the index of element (row, column) of a weight matrix, in elements.
constexpr int64_t WeightIndex(const WeightMatrix& w, int64_t row, int64_t column) {
  if (w.layout != WeightLayout::kPanel16) return row * w.k + column;
  const int64_t depth = CeilDiv(w.k, kPanelDepth) * kPanelDepth;
  return row / kPanelColumns * depth * kPanelColumns + column / 2 * (2 * kPanelColumns) +
         row % kPanelColumns * 2 + column % 2;
}

// Returns the offset of K of (slot, token, head) in a cache, in elements of the page's type from
// `base`. V is block_tokens * head_dim elements further on.
constexpr int64_t KeyIndex(const PagedCache& c, int64_t slot, int64_t token, int64_t head) {
  int64_t block = token / c.block_tokens;
  if (c.ring_blocks > 0) block %= c.ring_blocks;
  return HeadBlockOffset(c, slot, block, head) / SizeOf(c.type) +
         token % c.block_tokens * c.head_dim;
}

// Returns the offset of row `row` of (slot, head), in bytes from `base`.
constexpr int64_t RowOffset(const PagedRows& r, int64_t slot, int64_t row, int64_t head) {
  const int64_t page = r.page_table[slot * r.table_stride + row / r.rows_per_page];
  return page * r.page_bytes + head * r.head_bytes + row % r.rows_per_page * r.dim * SizeOf(r.type);
}

}  // namespace
}  // namespace sluice::kernels
