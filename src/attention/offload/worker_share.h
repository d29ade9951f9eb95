// The memory that CPU workers read and write in co-attention, and one worker's share of the work.
// Only co_attention.cc uses it.
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
  kernels::UnitLists lists{};    // one list for each (row, KV head)
  float* o = nullptr;            // [slots][heads][head_dim]
  float* lse = nullptr;          // [slots][heads]
};

// Hands out pieces of one buffer, always the same pieces in the same order.
class CoAttentionMemory {
 public:
  // If `begin` is null it only counts bytes.
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

// The caches of a channel's layer.
struct ChannelHome {
  kernels::PagedCache cache{};
  float scale = 0;
};

// Returns into how many groups these options divide the workers.
int CoAttentionGroups(const CoAttention::Options& options);

// One worker's share of a round, in memory of its own. The worker attends to a copy of the request
// and to a list of the pages that a copied list stands for, and its results lie here until they are
// given. So a late worker touches no requests, tables or answers that belong to another round by
// then. The functions Take... and Give are called while the worker holds the round; the work
// between them is done without holding it.
class WorkerShare {
 public:
  explicit WorkerShare(const CoAttention::Options& options);
  WorkerShare(WorkerShare&&) = default;

  struct Row {
    int32_t row = 0;
    int32_t slot = 0;
    int32_t position = 0;
    uint64_t servers = 0;  // workers, as bits
  };
  // Takes the rows of the request that belong to the worker. `servers_of(slot)` returns 0 if the
  // worker does not serve the slot.
  template <typename ServersOf>
  void TakeRows(const CoAttentionSide& request, const ServersOf& servers_of) {
    rows_.clear();
    for (int32_t row = 0; row < *request.rows; ++row) {
      const int32_t slot = request.slots[row];
      if (slot < 0) continue;  // a padded row
      const uint64_t servers = servers_of(slot);
      if (servers != 0) rows_.push_back({row, slot, request.positions[row], servers});
    }
  }
  const std::vector<Row>& rows() const { return rows_; }

  // Decides which KV heads of the taken rows are this worker's; `bit` is the worker's among their
  // servers. The workers of a group divide all lists of their sequences by tokens, in order, each
  // by the same arithmetic on the same counts (the request's, or the source's for the channel):
  // lists differ by a factor of ten, and a round takes as long as its last worker.
  void TakeItems(const CoAttentionSide& request, int channel, uint64_t bit);
  // Returns whether KV head `head` of row i of rows() is this worker's.
  bool Mine(size_t i, int head) const {
    return mine_[i * static_cast<size_t>(options_.kv_heads) + static_cast<size_t>(head)];
  }

  // Takes one KV head of a row: its queries, and the list with its pages.
  void TakeQuery(const CoAttentionSide& request, const Row& row, int head);
  void TakeList(const CoAttentionSide& request, const ChannelHome& home, const Row& row, int head);
  // Computes one KV head that was taken; the results stay with this worker.
  void Compute(const ChannelHome& home, const Row& row, int head);
  CoAttention::Task TaskOf(const Row& row, int head);
  void Give(const CoAttentionSide& answer, const Row& row, int head);

  // Returns the tokens of every list that was given; the newest unit counts as a whole one.
  int64_t tokens() const { return tokens_; }

 private:
  CoAttention::Options options_;
  int64_t group_;         // query heads per KV head
  int64_t group_floats_;  // floats in the vectors of such a group
  int64_t tokens_ = 0;
  std::vector<Row> rows_;       // [max_rows] at most
  std::vector<bool> mine_;      // [rows][kv_heads]
  std::vector<int32_t> costs_;  // [rows][kv_heads]: cost of a list, in tokens
  std::vector<int32_t> asked_;  // [kv_heads]: tokens of a row's lists, by the source
  // Rows with the same servers: the total cost of their lists, and the cost of those already given
  // out.
  struct Group {
    uint64_t servers;
    int64_t cost, before;
  };
  std::vector<Group> groups_;
  // Arrays of one row, as in SparseAttentionParams.
  std::vector<float> q_;         // [heads][head_dim]
  std::vector<float> o_;         // [heads][head_dim]
  std::vector<float> lse_;       // [heads]
  std::vector<int32_t> units_;   // [kv_heads][capacity]
  std::vector<int32_t> places_;  // [kv_heads][capacity]
  std::vector<int32_t> counts_;  // [kv_heads]
  std::vector<int32_t> pages_;   // [capacity]: the list's blocks, each once
};

}  // namespace sluice
