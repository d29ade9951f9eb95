// The memory that CPU workers read and write in co-attention, and one worker's share of the work.
// Only co_attention.cc and pull_share.cc use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernel_table.h"
#include "kernels/sparse_params.h"
#include "src/attention/offload/claim_plan.h"
#include "src/attention/offload/co_attention.h"
#include "src/attention/offload/part_board.h"

namespace sluice {

// One request and its answer, in pinned memory, and what workers share in between.
struct CoAttentionSide {
  int32_t* rows = nullptr;           // [1]
  int32_t* slots = nullptr;          // [max_rows]
  int32_t* positions = nullptr;      // [max_rows]
  float* q = nullptr;                // [max_rows][heads][head_dim]
  kernels::UnitLists lists{};        // one list for each (row, KV head)
  float* o = nullptr;                // [slots][heads][head_dim]
  float* lse = nullptr;              // [slots][heads]
  PartWords* words = nullptr;        // [max_rows][kv_heads], 0 before the request
  PartWords* maker_words = nullptr;  // the same for the maker of lists, behind `words`
  // Results of the parts of lists that have several, in the order of the parts. It is not pinned.
  float* part_o = nullptr;    // [max_rows][kv_heads][most parts][group][head_dim]
  float* part_lse = nullptr;  // [max_rows][kv_heads][most parts][group]
};

// Hands out pieces of one buffer, always the same pieces in the same order.
class CoAttentionMemory {
 public:
  // If `begin` is null it only counts bytes.
  CoAttentionMemory(const CoAttention::Options& options, std::byte* begin)
      : options_(options), begin_(begin) {}
  CoAttentionSide Side();  // without results of parts
  // Returns how many arrays of PartWords a side has, one behind the other.
  int WordArrays() const { return options_.maker == nullptr ? 1 : 2; }
  int32_t* Counts();     // [max_rows + 1]
  PartWords* NoWords();  // [max_rows][kv_heads]
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
// Returns the units from which on a part of a list is worth having, where an element of the cache
// has `element_bytes`.
int32_t CoAttentionPartUnits(const CoAttention::Options& options, int64_t element_bytes);
// Returns the largest number of parts of a list, whatever the type of the cache.
int CoAttentionMostParts(const CoAttention::Options& options);

// A row of a request.
struct CoAttentionRow {
  int32_t row = 0;
  int32_t slot = 0;
  int32_t position = 0;
  uint64_t servers = 0;  // workers, as bits
};
// A part of the list of a (row, KV head).
struct CoAttentionPart {
  CoAttentionRow row;
  int head = 0;
  int64_t list = 0;  // in the request
  int part = 0;
  int parts = 1;  // of the list
};

// The way from the results of parts to the answer.
class PartAnswers {
 public:
  explicit PartAnswers(const CoAttention::Options& options);
  // The place of a part's results, which is in the answer itself if its list has no other part.
  struct Place {
    float* o;    // [group][head_dim]
    float* lse;  // [group]
  };
  Place PlaceOf(const CoAttentionSide& answer, const CoAttentionPart& part) const;
  // Says that the part's results are in their place. If the part was the last one of its list, all
  // of them are merged into the answer.
  void Finish(const PartBoard& board, const CoAttentionSide& answer,
              const CoAttentionPart& part) const;

  int64_t group() const { return group_; }  // query heads per KV head
  int64_t group_floats() const { return group_ * head_dim_; }

 private:
  const kernels::KernelTable* kernels_;
  int64_t heads_;  // KV heads
  int64_t group_;
  int32_t head_dim_;
  int64_t most_parts_;
};

// One worker's share of a round, in memory of its own. The worker attends to a copy of the request
// and to a list of the pages that a copied part of a list stands for, and its results lie here
// until they are given. So a late worker touches no requests, tables or answers that belong to
// another round by then. TakeRows, Divide, Claim and Give are called while the worker holds the
// round; the work between them is done without holding it.
class WorkerShare {
 public:
  explicit WorkerShare(const CoAttention::Options& options);
  WorkerShare(WorkerShare&&) = default;

  using Row = CoAttentionRow;
  using Part = CoAttentionPart;

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

  // Decides with which parts of the taken rows' lists the worker begins; `bit` is the worker's
  // among their servers. The workers of a group divide the parts of all lists of their sequences by
  // tokens, in order, each by the same arithmetic on the same counts (the request's, or the
  // source's for the channel). It is a plan, so that they do not get into each other's way; who
  // claims a part has it. Where lists are made in the round, each worker begins with as many of the
  // lists. REQUIRES: rows were taken.
  void Divide(const PartBoard& board, const CoAttentionSide& request, int channel, uint64_t bit);
  // Returns whether the worker begins with this part of list `item`, of [rows()][kv_heads].
  bool Begins(size_t item, int part) const { return plan_.Begins(item, part); }
  // Claims the next part and copies its queries, its units and their pages: first the parts that
  // Divide planned, then whatever is left of the lists of all taken rows. Returns false if nothing
  // is left, or only of lists that are still to be made.
  bool Claim(const PartBoard& board, const CoAttentionSide& request, const ChannelHome& home);
  // After Claim has returned false: returns whether there are lists still to be made, but for those
  // of slots for which `lost(slot)` is true.
  template <typename Lost>
  bool AwaitsLists(const Lost& lost) {
    return options_.maker != nullptr && made_.Awaits(lost);
  }
  const Part& part() const { return part_; }
  // Returns whether the claimed part has units. With a source it is not known.
  bool empty() const { return options_.source == nullptr && count_ == 0; }

  // Computes the claimed part; the results stay with this worker.
  void Compute(const ChannelHome& home);
  CoAttention::Task TaskOf();
  // Writes the part's results and says that it is done. If it was the last one of its list, it
  // merges all of them into the answer.
  void Give(const PartBoard& board, const CoAttentionSide& answer);

  // Returns the tokens of every part that was given; the newest unit counts as a whole one.
  int64_t tokens() const { return tokens_; }

 private:
  void DivideLists(uint64_t bit);
  void TakeUnits(const CoAttentionSide& request, const ChannelHome& home, PartBoard::Units units);

  CoAttention::Options options_;
  PartAnswers answers_;
  int64_t heads_;         // KV heads
  int64_t group_floats_;  // floats in the vectors of a KV head's query heads
  int64_t tokens_ = 0;
  std::vector<Row> rows_;       // [max_rows] at most
  ClaimPlan plan_;              // of lists [rows][kv_heads]
  MadeLists made_;              // the same lists, where they are made in the round
  std::vector<int32_t> asked_;  // [kv_heads]: tokens of a row's lists, by the source
  // The claimed part. The arrays are those of one row, as in SparseAttentionParams.
  Part part_;
  int32_t count_ = 0;            // units
  std::vector<float> q_;         // [heads][head_dim]
  std::vector<float> o_;         // [heads][head_dim]
  std::vector<float> lse_;       // [heads]
  std::vector<int32_t> units_;   // [kv_heads][capacity]
  std::vector<int32_t> places_;  // [kv_heads][capacity]
  std::vector<int32_t> counts_;  // [kv_heads]
  std::vector<int32_t> pages_;   // [capacity]: the units' blocks, each once
};

}  // namespace sluice
