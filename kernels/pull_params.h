// This file declares the contracts of operators with which a device takes its share of the parts of
// lists (kernels/list_parts.h) that CPU threads share out while the operator runs. The other parts
// are the CPU workers' (src/attention/offload/co_attention.h).
//
// A *puller* is one group of threads of the operator, a cluster of thread blocks on a GPU. Pullers
// and an *arbiter*, a thread of the host, speak through words in pinned memory. Each word has one
// writer, because additions of both sides of the link to one word can undo one another.
#pragma once

#include <cstdint>

#include "kernels/sparse_params.h"

namespace sluice::kernels {

inline constexpr int32_t kMostPullers = 128;

// The word of a puller: how many parts it has asked for since the words were made. It stays from
// one launch to the next, since a recorded program writes the same constants each time.
struct alignas(64) PullAsk {
  uint32_t number;
};

// The arbiter's answer to the ask of that number. It writes `number` last, with release.
struct alignas(64) PullGrant {
  int32_t list;  // row * kv_heads + KV head; -1: nothing is left in this launch
  int32_t part;
  uint32_t number;
};

// Each puller does this: it asks for a part, and as soon as that is granted for the next one, so
// that the grant comes while it attends to the first. It attends to the part's units, writes the
// result, and goes on until a grant says that nothing is left. Every puller of a launch asks until
// it gets that answer, and asks for nothing after it.
//
// If a grant does not come within `deadline_ns`, or *closed is not 0 when a puller begins, the
// puller asks for nothing more in this launch; after a missed deadline it writes 1 to *missed
// first. Results of parts that were granted to it are written all the same.
struct PullAttentionParams {
  // Lists, cache, queries, scale and rows, as in SparseAttention. `units` is not null; `o`, `lse`,
  // `places` and `wanted` are ignored; kv_head_begin is 0, kv_head_end the number of KV heads.
  // Lists may be in pinned memory and be written by the host while the operator runs: a list's
  // count and units are read only after a part of it has been granted, and the grant makes them
  // visible. So they are read with plain loads that are coherent, never through a read-only path.
  SparseAttentionParams attention;
  int32_t least_units;      // of a part (UnitsOfPart)
  int32_t most_parts;       // >= the parts of every list, at most kMostListParts
  int32_t pullers;          // at most kMostPullers
  PullAsk* asks;            // [pullers] pinned, written by the device
  const PullGrant* grants;  // [pullers] pinned, written by the host
  const uint32_t* closed;   // pinned, written by the host
  uint32_t* missed;         // pinned, written by the device
  uint64_t deadline_ns;
  // Device memory. Before the first launch `taken` is 0.
  float* part_o;    // [lists][most_parts][group][head_dim]
  float* part_lse;  // [lists][most_parts][group]
  uint32_t* taken;  // [lists] bits of the parts whose results are written
};

// Merges the parts of each list whose bit is in `taken`, in their order, into o and lse (0 and -inf
// where there is none), and wipes `taken`. Padded rows (slot -1) are wiped too, and nothing is
// written for them. o_h = sum_i w_i o_i with w_i = exp(lse_i - lse), as in Merge.
struct MergePartsParams {
  const float* part_o;
  const float* part_lse;
  uint32_t* taken;
  const int32_t* slots;  // [rows]
  float* o;              // [rows][heads][head_dim]
  float* lse;            // [rows][heads]
  int32_t rows;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t most_parts;
};

}  // namespace sluice::kernels
