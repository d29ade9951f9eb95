#include "src/kv/page_runs.h"

#include <algorithm>

#include "src/base/status_macros.h"

namespace sluice {

PageRun PageRuns::Take(int64_t count, int32_t wanted) {
  auto best = runs_.end();
  for (auto it = runs_.begin(); it != runs_.end(); ++it) {
    if (it->first == wanted) {
      best = it;
      break;
    }
    if (best == runs_.end()) {
      best = it;
      continue;
    }
    const bool holds = it->second >= count, best_holds = best->second >= count;
    if (holds ? (!best_holds || it->second < best->second)
              : (!best_holds && it->second > best->second)) {
      best = it;
    }
  }
  SLUICE_CHECK(best != runs_.end(), "free pages are in runs");
  auto node = runs_.extract(best);  // reused for the rest of the run
  const auto [first, length] = node.value();
  const auto take = static_cast<int32_t>(std::min<int64_t>(length, count));
  if (take < length) {
    node.value() = {first + take, length - take};
    runs_.insert(std::move(node));
  }
  return {first, take};
}

void PageRuns::Add(PageRun run) {
  auto next = runs_.lower_bound({run.first, 0});
  if (next != runs_.end() && next->first == run.first + run.count) {
    run.count += next->second;
    next = runs_.erase(next);
  }
  if (next != runs_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == run.first) {
      run.first = previous->first;
      run.count += previous->second;
      runs_.erase(previous);
    }
  }
  runs_.emplace(run.first, run.count);
}

void PageRuns::Cut(PageRun run) {
  auto it = runs_.upper_bound({run.first, INT32_MAX});
  SLUICE_CHECK(it != runs_.begin());
  --it;
  const auto [first, count] = *it;
  const int32_t end = first + count, cut_end = run.first + run.count;
  SLUICE_CHECK(first <= run.first && cut_end <= end, "what is cut out is free");
  runs_.erase(it);
  if (first < run.first) runs_.emplace(first, run.first - first);
  if (cut_end < end) runs_.emplace(cut_end, end - cut_end);
}

}  // namespace sluice
