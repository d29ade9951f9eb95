// The order in which one of several workers claims the parts of lists on a board: first those of a
// share that is its own by arithmetic, so that workers do not get into each other's way, then any
// that are left, so that none is idle while a part is unclaimed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "src/attention/offload/part_board.h"

namespace sluice {

// One worker's plan of a round. It allocates nothing once it has had `most_lists` lists.
class ClaimPlan {
 public:
  explicit ClaimPlan(size_t most_lists);

  // Begins a new plan, without lists.
  void Clear();
  // Adds a list of the board, which the workers `servers` (as bits) share. It costs `cost`, in any
  // unit, of which each part but the last one has `part_cost`, and `fixed_cost` more for each part.
  void Add(int64_t list, uint64_t servers, int parts, int64_t cost, int64_t part_cost,
           int64_t fixed_cost);
  // Plans the share of the worker `bit`, which is one of the servers of every list. All workers
  // that share lists get shares of the same cost, by the same arithmetic, if they add the same
  // lists.
  void Divide(uint64_t bit);

  struct Claimed {
    size_t item;  // the list's number in the order of Add, from 0
    int part;
  };
  // Claims the next part, or nothing if none is left. REQUIRES: Divide was called.
  std::optional<Claimed> Next(const PartBoard& board);

  // Returns whether the worker begins with this part.
  bool Begins(size_t item, int part) const {
    return part >= lists_[item].begin && part < lists_[item].end;
  }
  int64_t list(size_t item) const { return lists_[item].list; }
  int parts(size_t item) const { return lists_[item].parts; }

 private:
  struct List {
    int64_t list;
    uint64_t servers;
    int64_t cost, part_cost, fixed_cost;
    int parts;
    int begin, end;  // the parts with which this worker begins
  };
  // Lists with the same servers: their total cost, and the cost of those already divided. Nearly
  // always all lists have the same; they differ only after workers have died.
  struct Group {
    uint64_t servers;
    int64_t cost, before;
  };

  Group& GroupOf(uint64_t servers);
  static bool DivideList(const Group& group, uint64_t bit, List& list);

  std::vector<List> lists_;
  std::vector<Group> groups_;
  size_t next_ = 0;      // list from which on the worker's own parts may be unclaimed
  size_t behind_ = 0;    // list at which its own parts end
  size_t searched_ = 0;  // lists from there on, in a circle, of which nothing is left
};

// The order in which a worker claims the parts of lists that are made while the round goes on. How
// long they become is not known beforehand, so nothing is planned but where each worker begins.
class MadeLists {
 public:
  explicit MadeLists(size_t most_lists) { left_.reserve(most_lists); }

  void Clear() { left_.clear(); }
  // Adds a list of the sequence in `slot`.
  void Add(int64_t list, int slot) { left_.push_back({left_.size(), list, slot}); }
  // Has the worker begin with list `item`, in the order of Add, and take the others in a circle.
  // REQUIRES: there are lists, and nothing was claimed since Clear.
  void BeginAt(size_t item);
  // Claims the next part of the lists that are made, or nothing if all of these are claimed.
  std::optional<ClaimPlan::Claimed> Next(const PartBoard& board);
  // Gives up the lists for whose slots `lost(slot)` is true and that are not made. Returns whether
  // others are still to be made. REQUIRES: Next has just returned nothing.
  template <typename Lost>
  bool Awaits(const Lost& lost) {
    std::erase_if(left_, [&lost](const List& list) { return lost(list.slot); });
    return !left_.empty();
  }

 private:
  struct List {
    size_t item;
    int64_t list;
    int slot;
  };
  std::vector<List> left_;  // that may have unclaimed parts
};

}  // namespace sluice
