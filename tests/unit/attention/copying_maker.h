// A maker of lists for tests of co-attention: it makes those that the device has, by a few tasks
// for each, which only count, and one more that copies the list.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "kernels/sparse_params.h"
#include "src/attention/offload/list_maker.h"
#include "src/attention/offload/part_board.h"
#include "src/attention/offload/slot_workers.h"
#include "src/device/device.h"

namespace sluice::co_attention {

class CopyingMaker : public ListMaker {
 public:
  static constexpr int kTasks = 3;  // of a list, before the one that copies it

  CopyingMaker(Device& device, int workers, int rows, int kv_heads, int capacity)
      : kv_heads_(kv_heads),
        capacity_(capacity),
        tasks_(static_cast<size_t>(rows * kv_heads), kTasks),
        workers_(static_cast<size_t>(workers)) {
    const auto lists = static_cast<size_t>(rows * kv_heads);
    posted_ =
        *device.Allocate(MemoryKind::kPinned, lists * (1 + static_cast<size_t>(capacity)) * 4, "");
    counts_ = posted_.as<int32_t>();
    units_ = counts_ + lists;
  }

  // Makes these lists of the device in the rounds that are posted from now on.
  void Copy(const kernels::UnitLists& lists) { lists_ = lists; }
  // Is called by workers for each task, with the position of the list's row and whether it is the
  // task that copies the list. It is set while nothing is under way.
  std::function<void(int32_t position, bool copies)> on_task = [](int32_t, bool) {};

  void Post(int rows, kernels::CopyRowsParams* copies) override {
    const int32_t bytes = rows * kv_heads_ * 4;
    copies->pieces[copies->count++] = {lists_.counts, counts_, 0, bytes, nullptr, 1, bytes};
    const int32_t of_units = bytes * capacity_;
    copies->pieces[copies->count++] = {lists_.units, units_, 0, of_units, nullptr, 1, of_units};
  }
  void Take(int worker, const Round& round, const SlotWorkers& workers) override {
    Worker& mine = workers_[static_cast<size_t>(worker)];
    mine.lists.clear();
    mine.whole = false;
    for (int32_t row = 0; row < round.rows; ++row) {
      const int slot = round.slots[row];
      if (slot < 0 || (workers.Servers(slot) >> worker & 1) == 0) continue;
      for (int head = 0; head < kv_heads_; ++head) mine.lists.push_back(row * kv_heads_ + head);
    }
    // Workers begin in different places.
    const size_t at = static_cast<size_t>(worker) % mine.lists.size();
    std::rotate(mine.lists.begin(), mine.lists.begin() + static_cast<int64_t>(at),
                mine.lists.end());
  }
  std::optional<int> Claim(int worker, const Round& round) override {
    Worker& mine = workers_[static_cast<size_t>(worker)];
    mine.copies = mine.whole;
    mine.whole = false;
    for (size_t i = 0; !mine.copies; ++i) {
      if (i == mine.lists.size()) return std::nullopt;
      mine.list = mine.lists[i];
      mine.task = Board(round).Claim(mine.list, 0, kTasks);
      if (mine.task >= 0) break;
    }
    const int64_t row = mine.list / kv_heads_;
    mine.position = round.positions[row];
    if (mine.copies) {
      const int32_t* const units = units_ + mine.list * capacity_;
      mine.units.assign(units, units + counts_[mine.list]);
    }
    return round.slots[row];
  }
  void Compute(int worker, int /*channel*/) override {
    const Worker& mine = workers_[static_cast<size_t>(worker)];
    on_task(mine.position, mine.copies);
  }
  std::optional<int64_t> Give(int worker, const Round& round) override {
    Worker& mine = workers_[static_cast<size_t>(worker)];
    if (!mine.copies) {
      mine.whole = Board(round).Finish(mine.list, mine.task);
      return std::nullopt;
    }
    std::copy(mine.units.begin(), mine.units.end(),
              round.lists.units + mine.list * round.lists.capacity);
    round.lists.counts[mine.list] = static_cast<int32_t>(mine.units.size());
    return mine.list;
  }

 private:
  struct Worker {
    std::vector<int64_t> lists;
    int64_t list = 0;
    int task = 0;
    int32_t position = 0;
    bool whole = false, copies = false;
    std::vector<int32_t> units;
  };
  PartBoard Board(const Round& round) const { return {round.words, tasks_.data(), 1}; }

  const int kv_heads_;
  const int capacity_;
  const std::vector<int32_t> tasks_;  // [lists]
  std::vector<Worker> workers_;
  Buffer posted_;
  int32_t* counts_ = nullptr;
  int32_t* units_ = nullptr;
  kernels::UnitLists lists_{};
};

}  // namespace sluice::co_attention
