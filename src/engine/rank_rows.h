// RankRows says which rank has which sequence, where each rank runs sequences of its own
// (Model::Options::expert_parallel), and divides the plan of a step among the ranks. All ranks are
// told of every sequence and every plan (rank_plan.h), so each finds its own part, and how many
// rows the others have. The engine's thread uses it, or the follower's.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "src/device/rank_group.h"
#include "src/scheduler/planner.h"

namespace sluice {

class RankRows {
 public:
  // `group` outlives this. At first every slot is rank 0's.
  RankRows(RankGroup* group, int slots) : group_(group), owners_(static_cast<size_t>(slots), 0) {}

  RankGroup& group() const { return *group_; }
  // Says that the sequence of `slot` is now `rank`'s. REQUIRES: no step that has it is under way.
  void Give(int slot, int rank) { owners_.at(static_cast<size_t>(slot)) = rank; }
  int OwnerOf(int slot) const { return owners_.at(static_cast<size_t>(slot)); }
  bool Owns(int slot) const { return OwnerOf(slot) == group_->rank(); }

  // The rank's part of a step.
  struct Part {
    StepPlan plan;
    int32_t most_rows = 0;  // of any rank, one at least
  };
  // Returns the part, which stays until the next call.
  const Part& Divide(const StepPlan& plan);

  // Where the result of a sample is.
  struct Place {
    int rank = 0;
    int index = 0;  // among the rank's samples
  };
  // Sets `places` to those of the plan's samples, in order.
  void FindSamples(const StepPlan& plan, std::vector<Place>* places) const;

 private:
  RankGroup* const group_;
  std::vector<int> owners_;  // by slot
  Part part_;
};

}  // namespace sluice
