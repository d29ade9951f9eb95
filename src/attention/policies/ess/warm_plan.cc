#include "src/attention/policies/ess/warm_plan.h"

#include <algorithm>
#include <utility>

namespace sluice {

WarmPlan::WarmPlan(const SelectionHints& hints, int64_t tokens)
    : hint_tokens_(std::max<int64_t>(hints.unit_tokens, 1)),
      tokens_(tokens),
      taken_by_(static_cast<size_t>(tokens), 0) {
  for (const SelectionHints::Entry& entry : hints.entries) {
    if (entry.kv_head.value_or(0) == 0) order_.push_back(&entry);
  }
  std::stable_sort(order_.begin(), order_.end(),
                   [this](const SelectionHints::Entry* a, const SelectionHints::Entry* b) {
                     return a->layer != b->layer ? a->layer < b->layer
                                                 : PositionOf(*a) > PositionOf(*b);
                   });
}

int32_t WarmPlan::PositionOf(const SelectionHints::Entry& entry) const {
  const auto last = static_cast<uint32_t>(tokens_ - 1);
  return static_cast<int32_t>(std::min(entry.position.value_or(last), last));
}

std::vector<WarmEntry> WarmPlan::Of(int layer, int64_t room) {
  ++call_;
  std::vector<WarmEntry> entries;
  const int64_t most = std::min(room, tokens_);
  const auto add = [&](int64_t unit, int32_t stamp) {
    if (static_cast<int64_t>(entries.size()) >= most) return;
    uint32_t& by = taken_by_[static_cast<size_t>(unit)];
    if (std::exchange(by, call_) != call_) entries.push_back({static_cast<int32_t>(unit), stamp});
  };
  const auto of_layer = static_cast<uint32_t>(layer);
  auto hint = std::lower_bound(
      order_.begin(), order_.end(), of_layer,
      [](const SelectionHints::Entry* e, uint32_t value) { return e->layer < value; });
  for (; hint != order_.end() && (*hint)->layer == of_layer; ++hint) {
    const int32_t stamp = PositionOf(**hint);
    for (const uint32_t hinted : (*hint)->units) {
      if (hinted > (tokens_ - 1) / hint_tokens_) continue;
      const int64_t first = int64_t{hinted} * hint_tokens_;
      for (int64_t unit = first; unit < std::min(first + hint_tokens_, tokens_); ++unit) {
        add(unit, stamp);
      }
    }
  }
  for (int64_t unit = tokens_ - 1; unit >= 0 && static_cast<int64_t>(entries.size()) < most;
       --unit) {
    add(unit, 0);
  }
  // The entries were added newest first, and the units of one position are mostly in order.
  // Reversing the list therefore sorts it, unless the hints are odd.
  std::reverse(entries.begin(), entries.end());
  const auto by_unit = [](const WarmEntry& a, const WarmEntry& b) { return a.unit < b.unit; };
  for (auto begin = entries.begin(), end = begin; begin != entries.end(); begin = end) {
    end = std::find_if(begin, entries.end(),
                       [&](const WarmEntry& e) { return e.stamp != begin->stamp; });
    if (!std::is_sorted(begin, end, by_unit)) std::reverse(begin, end);
    if (!std::is_sorted(begin, end, by_unit)) std::sort(begin, end, by_unit);
  }
  return entries;
}

}  // namespace sluice
