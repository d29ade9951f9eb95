#include "src/attention/offload/claim_plan.h"

#include <algorithm>
#include <bit>

namespace sluice {

ClaimPlan::ClaimPlan(size_t most_lists) {
  lists_.reserve(most_lists);
  groups_.reserve(most_lists);
}

void ClaimPlan::Clear() {
  lists_.clear();
  groups_.clear();
}

void ClaimPlan::Add(int64_t list, uint64_t servers, int parts, int64_t cost, int64_t part_cost,
                    int64_t fixed_cost) {
  lists_.push_back({list, servers, cost, part_cost, fixed_cost, parts, 0, 0});
  GroupOf(servers).cost += cost + parts * fixed_cost;
}

ClaimPlan::Group& ClaimPlan::GroupOf(uint64_t servers) {
  for (Group& group : groups_) {
    if (group.servers == servers) return group;
  }
  return groups_.emplace_back(Group{servers, 0, 0});
}

void ClaimPlan::Divide(uint64_t bit) {
  next_ = behind_ = searched_ = 0;
  for (size_t item = 0; item < lists_.size(); ++item) {
    List& list = lists_[item];
    Group& group = GroupOf(list.servers);
    if (!DivideList(group, bit, list)) behind_ = item;
    group.before += list.cost + list.parts * list.fixed_cost;
  }
}

// A part is this worker's to begin with if its middle lies in the worker's share. Shares of several
// workers follow each other. Returns whether the list's last part lies in a later worker's share.
bool ClaimPlan::DivideList(const Group& group, uint64_t bit, List& list) {
  const int64_t rank = std::popcount(group.servers & (bit - 1));
  const int64_t workers = std::popcount(group.servers);
  const auto rank_of = [&](int64_t part) {
    const int64_t first = part * list.part_cost;
    const int64_t cost = list.fixed_cost + std::min(list.part_cost, list.cost - first);
    const int64_t before = group.before + part * list.fixed_cost + first;
    return (2 * before + cost) * workers / (2 * group.cost);
  };
  const int64_t last = rank_of(list.parts - 1);
  if (last < rank) return false;
  while (rank_of(list.begin) < rank) ++list.begin;
  list.end = list.begin;
  while (list.end < list.parts && rank_of(list.end) == rank) ++list.end;
  return last > rank;
}

// The worker looks for parts that are left behind its own share and in a circle, so that several
// workers that have nothing to do do not all look in the same place.
std::optional<ClaimPlan::Claimed> ClaimPlan::Next(const PartBoard& board) {
  const auto claim = [&](size_t item, int begin, int end) {
    return begin == end ? -1 : board.Claim(lists_[item].list, begin, end);
  };
  for (; next_ < lists_.size(); ++next_) {
    const int part = claim(next_, lists_[next_].begin, lists_[next_].end);
    if (part >= 0) return Claimed{next_, part};
  }
  for (; searched_ < lists_.size(); ++searched_) {
    const size_t item = (behind_ + searched_) % lists_.size();
    const int part = claim(item, 0, lists_[item].parts);
    if (part >= 0) return Claimed{item, part};
  }
  return std::nullopt;
}

void MadeLists::BeginAt(size_t item) {
  std::rotate(left_.begin(), left_.begin() + static_cast<std::ptrdiff_t>(item), left_.end());
}

std::optional<ClaimPlan::Claimed> MadeLists::Next(const PartBoard& board) {
  for (size_t i = 0; i < left_.size();) {
    const List& list = left_[i];
    if (!board.IsMade(list.list)) {
      ++i;
      continue;
    }
    const int part = board.Claim(list.list, 0, board.Parts(list.list));
    if (part >= 0) return ClaimPlan::Claimed{list.item, part};
    left_.erase(left_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return std::nullopt;
}

}  // namespace sluice
