// The blocks of a list that have scores, and the query heads that want them.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/common/paged_rows.cuh"
#include "kernels/fluxion_params.h"

namespace sluice::kernels::cuda {

struct LevelList {
  int row, kv_head, slot, level;
  int first = 0, count = 0;  // blocks [first, first + count) have scores; count 0: none has

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
