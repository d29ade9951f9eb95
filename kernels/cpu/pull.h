// PullAttention and MergeParts on a CPU, for every path and for the reference.
#pragma once

#include "kernels/kernel_table.h"

namespace sluice::kernels::cpu {

using SparseAttentionFunction = void (*)(const SparseAttentionParams&, Worker);

// Does PullAttention, with `attend` for each part. Worker 0 alone is all the pullers: it looks for
// the grants of each in turn.
void PullAttentionBy(SparseAttentionFunction attend, const PullAttentionParams& p, Worker worker);

void MergeParts(const MergePartsParams& p, Worker worker);

// Functions have internal linkage for the reason that scalar.h gives.
namespace {

template <SparseAttentionFunction attend>
void PullAttention(const PullAttentionParams& p, Worker worker) {
  PullAttentionBy(attend, p, worker);
}

}  // namespace
}  // namespace sluice::kernels::cpu
