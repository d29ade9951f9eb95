// What CPU workers read and write in co-attention, and one worker's share of it. Used by
// co_attention.cc alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernel_table.h"
#include "kernels/sparse_params.h"
#include "src/attention/offload/co_attention.h"

namespace sluice {

// One request and its answer, in pinned memory.
struct CoAttentionSide {
  int32_t* rows = nullptr;       // [1]
  int32_t* slots = nullptr;      // [max_rows]
  int32_t* positions = nullptr;  // [max_rows]
  float* q = nullptr;            // [max_rows][heads][head_dim]
  kernels::UnitLists lists{};    // of (row, KV head)
  float* o = nullptr;            // [slots][heads][head_dim]
  float* lse = nullptr;          // [slots][heads]
};

// Hands out pieces of one buffer, the same ones in the same order each time.
class CoAttentionMemory {
 public:
  // `begin` null: only counts.
  CoAttentionMemory(const CoAttention::Options& options, std::byte* begin)
      : options_(options), begin_(begin) {}
  CoAttentionSide Side();
  int32_t* Counts();  // [max_rows + 1]
  static size_t Bytes(const CoAttention::Options& options);

 private:
  template <typename T>
  T* Take(int64_t count);

  const CoAttention::Options& options_;
  std::byte* const begin_;
  size_t used_ = 0;
};

// Where the caches of a channel's layer lie.
struct ChannelHome {
  kernels::PagedCache cache{};
  float scale = 0;
};

// Groups of workers that the options make.
int CoAttentionGroups(const CoAttention::Options& options);

// A worker's own memory. It attends to a copy of a list and of the pages that the list stands for,
// made while the round still waited for the worker: a worker that is late meets lists, tables and
// slots that have become another's, and would follow them to pages that are not there.
class WorkerShare {
 public:
  explicit WorkerShare(const CoAttention::Options& options);
  WorkerShare(WorkerShare&&) = default;

  // Attends to one list. False: the round did not wait for it any more, nothing is written.
  // `owes`: whether the round still waits.
  template <typename Owes>
  bool Attend(const CoAttentionSide& request, const ChannelHome& home, int row, int slot, int head,
              const Owes& owes) {
    TakeCopy(request, home, row, slot, head);
    if (!owes()) return false;
    Compute(request, home, row, slot, head);
    tokens_ += int64_t{counts_[static_cast<size_t>(head)]} * options_.unit_tokens;
    return true;
  }
  // Of every list attended to; the newest unit counts as a whole one.
  int64_t tokens() const { return tokens_; }

 private:
  void TakeCopy(const CoAttentionSide& request, const ChannelHome& home, int row, int slot,
                int head);
  void Compute(const CoAttentionSide& request, const ChannelHome& home, int row, int slot,
               int head);

  CoAttention::Options options_;
  int64_t tokens_ = 0;
  // Of one row, as SparseAttentionParams has them.
  int32_t position_ = 0;
  std::vector<int32_t> units_;   // [kv_heads][capacity]
  std::vector<int32_t> places_;  // [kv_heads][capacity]
  std::vector<int32_t> counts_;  // [kv_heads]
  std::vector<int32_t> pages_;   // [capacity]: the list's blocks, each once
};

}  // namespace sluice
