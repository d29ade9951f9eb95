// RankFollower runs the steps of a rank other than 0: it does with its own model, policy and device
// what the leader's engine does with its (rank_plan.h). It serves nobody and reads no results. One
// thread uses it.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/device/device.h"
#include "src/device/rank_channel.h"
#include "src/device/rank_group.h"
#include "src/engine/batch_state.h"
#include "src/engine/rank_plan.h"
#include "src/model/model.h"

namespace sluice {

class RankFollower final : private RankOrders {
 public:
  struct Options {
    int slots = 0;
    int max_context = 0;
    HintPart part;        // the heads of hints that are this rank's
    int halves_from = 0;  // BatchState::Options::halves_from
  };
  // All of them outlive the follower.
  struct Parts {
    Device* device = nullptr;
    Model* model = nullptr;
    AttentionPolicy* policy = nullptr;
    RankChannel* channel = nullptr;
    RankGroup* ranks = nullptr;
    // The pool where host caches are, which follows rank 0's. Null: there are none.
    PagePool* dram = nullptr;
    // Not null: each rank has sequences of its own, and does what is said of those alone.
    RankRows* rows = nullptr;
  };
  // Records the steps' programs, as Engine::Create does on the leader at the same time.
  static absl::StatusOr<std::unique_ptr<RankFollower>> Create(const Options& options,
                                                              const Parts& parts);
  ~RankFollower() override;

  // Runs until the leader stops. Returns the failure of the group or the device otherwise; then the
  // other ranks end too.
  absl::Status Run();

 private:
  RankFollower(const Parts& parts, const Options& options, std::unique_ptr<BatchState> batch,
               std::unique_ptr<Stream> stream);
  absl::Status Admit(int slot, RankAdmission admission) override;
  absl::Status BeginPrompt(int slot, int64_t tokens, int64_t cached) override;
  absl::Status EndPrompt(int slot, int64_t tokens, SelectionHints hints) override;
  absl::Status Warm(int slot) override;
  absl::Status Grow(int slot, int64_t tokens) override;
  absl::Status Release(int slot) override;
  absl::Status MakeFirm(int slot) override;
  absl::Status ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) override;
  absl::Status Evict(int slot, int64_t tokens, RankPages home) override;
  absl::Status Detach(int slot) override;
  absl::Status Join(int slot, const BatchState::Joining& joining) override;
  absl::Status Step(int buffer, const StepPlan& plan) override;

  // Returns whether another rank has the slot's sequence.
  bool Elsewhere(int slot) const { return parts_.rows != nullptr && !parts_.rows->Owns(slot); }
  absl::Status RunOrders();
  // Notes that copies of the slot have begun.
  void Copies(int slot);
  // Tells rank 0 how many copies are done, of those that it asked for first.
  void CountCopies();
  // Waits until a step is done, and checks what its sequences were given.
  absl::Status Finish(int buffer);
  absl::Status FinishAll();
  // Waits until the slot's steps are done, and its copies.
  absl::Status Rest(int slot);

  const Parts parts_;
  const HintPart part_;
  const std::unique_ptr<BatchState> batch_;
  const std::unique_ptr<Stream> stream_;
  std::vector<bool> held_;   // by slot: whether a sequence has it
  std::deque<int> copying_;  // slots whose copies may not be done, as rank 0 asked; -1: they are
  uint32_t copied_ = 0;      // copies before those
  std::array<std::vector<int>, BatchState::kDepth> members_;  // slots of each buffer's step
};

}  // namespace sluice
