#include "src/engine/rank_rows.h"

#include <algorithm>

namespace sluice {

const RankRows::Part& RankRows::Divide(const StepPlan& plan) {
  StepPlan& own = part_.plan;
  own.rows.clear();
  own.row_count = own.decode_rows = own.sample_count = 0;
  std::array<int32_t, kMaxRanks> rows{};
  int32_t row = 0;  // decode rows come first
  for (const PlanRow& planned : plan.rows) {
    rows[static_cast<size_t>(OwnerOf(planned.slot))] += planned.count;
    const bool decodes = row < plan.decode_rows;
    row += planned.count;
    if (!Owns(planned.slot)) continue;
    own.rows.push_back(planned);
    own.row_count += planned.count;
    if (decodes) own.decode_rows += planned.count;
    if (planned.sample) own.sample_count += 1 + planned.drafts;
  }
  part_.most_rows = std::max(1, *std::max_element(rows.begin(), rows.end()));
  return part_;
}

void RankRows::FindSamples(const StepPlan& plan, std::vector<Place>* places) const {
  places->clear();
  std::array<int, kMaxRanks> samples{};
  for (const PlanRow& planned : plan.rows) {
    if (!planned.sample) continue;
    const int rank = OwnerOf(planned.slot);
    for (int i = 0; i <= planned.drafts; ++i) {
      places->push_back({rank, samples[static_cast<size_t>(rank)]++});
    }
  }
}

}  // namespace sluice
