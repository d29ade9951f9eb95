// The interface through which CPU workers make the lists of a co-attention round in that very round
// (src/attention/offload/co_attention.h), where the device does not know what to attend to: its
// digests lie in DRAM, say. A list is made by tasks, which the workers of its sequence's group
// share. Each worker takes tasks as long as there are any, then parts of lists that are made, so
// that nothing separates the two and a round has one end.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/params.h"
#include "kernels/sparse_params.h"
#include "src/attention/offload/part_board.h"
#include "src/attention/offload/slot_workers.h"

namespace sluice {

class ListMaker {
 public:
  // A request, and where its lists go. A worker may look at it while it holds the round.
  struct Round {
    int channel = 0;
    int32_t rows = 0;
    const int32_t* slots = nullptr;      // [rows]; -1: a padded row, which has no lists
    const int32_t* positions = nullptr;  // [rows]
    const float* q = nullptr;            // [rows][heads][head_dim]
    PartWords* words = nullptr;          // [rows][kv_heads] for the maker's own use, 0 at first
    kernels::UnitLists lists{};          // [rows][kv_heads], in pinned memory
  };
  virtual ~ListMaker() = default;

  // Adds what the tasks depend on to the copies with which a request of `rows` rows is posted: two
  // pieces at most, to memory that belongs to the maker. One round is under way at a time.
  virtual void Post(int rows, kernels::CopyRowsParams* copies) = 0;

  // The following are one worker's side of a round. It holds the round in all but Compute.
  //
  // Takes the lists of the rows that the worker serves, one or more. All workers of a group make
  // the lists of its rows together.
  virtual void Take(int worker, const Round& round, const SlotWorkers& workers) = 0;
  // Claims a task and copies what it depends on. Returns the slot that it belongs to, or nothing if
  // no task is left to claim; others may still be at theirs. A worker that has given a task asks
  // again, since it may have to go on with the same list.
  virtual std::optional<int> Claim(int worker, const Round& round) = 0;
  // Does the claimed task, in memory of the worker's own.
  virtual void Compute(int worker, int channel) = 0;
  // Gives its results. Returns a list that is complete now, with its count and its units, or
  // nothing. Each list of the rows that are served is returned once, by one worker.
  virtual std::optional<int64_t> Give(int worker, const Round& round) = 0;
};

}  // namespace sluice
