// The blocks of a list that have scores, and the query heads that want them.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/common/paged_rows.cuh"
#include "kernels/fluxion_params.h"

namespace sluice::kernels::cuda {

struct LevelList {
  int row, kv_head, slot, level;
  int first = 0, count = 0;  // blocks [first, first + count) have scores; count 0: none has
  // They are known by rows [row_begin, row_end) of digests of `row_level`: 2^fold rows each, but
  // for those of a block that lie in the sink.
  int row_level = 0, row_begin = 0, row_end = 0, fold = 0;

  // Reads the list of (row, kv_head). All threads of a block call it.
  __device__ LevelList(const LevelScoresParams& p, int of_row, int head, int kv_heads)
      : row(of_row), kv_head(head), slot(p.slots[row]), level(p.levels[row * kv_heads + head]) {
    if (slot < 0 || level < 0) return;
    const FluxionSegments segments = SegmentsOf(p.positions[row]);
    first = FirstBlock(segments, level);
    all_ = CpuBlocks(segments, level);
    const int group = p.heads / kv_heads;
    for (int h = 0; h < group; ++h) {
      if (Wants(p, head * group + h)) count = all_;
    }
    if (count == 0) return;
    const DigestRows begin = RowsOfBlock(p.digests, segments, level, first);
    const DigestRows end = RowsOfBlock(p.digests, segments, level, first + count - 1);
    row_level = begin.level;
    row_begin = begin.begin;
    row_end = end.end;
    fold = level - row_level;
  }

  // Returns true if head `head` of the row has scores.
  __device__ bool Wants(const LevelScoresParams& p, int head) const {
    const int selected = p.blocks[int64_t{row} * p.heads + head];
    return selected > 0 && selected < all_;
  }

 private:
  int all_ = 0;
};

}  // namespace sluice::kernels::cuda
