// The leader of a group of ranks tells the others this: every change of the batch and of its
// placement, and every step, in the leader's order. Each rank does the same with its own device, so
// that all enqueue the same operations. A message holds what happened since the step before, and
// the step: some 100 bytes, and 24 more for each sequence, beside the prompts of new ones.
//
// Both sides are of one build, so the encoding is that of the machine.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/engine/batch_state.h"
#include "src/kv/selection_hints.h"
#include "src/kv/sequence_cache.h"
#include "src/kv/shared_prefix.h"
#include "src/scheduler/planner.h"

namespace sluice {

// Page numbers, [layer][kind] in the order of blocks.
using RankPages = std::vector<std::vector<int32_t>>;

enum class RankOrder : uint8_t {
  kAdmit,            // slot, RankAdmission
  kBeginPrompt,      // slot, tokens, cached tokens
  kEndPrompt,        // slot, tokens, hints for the whole model
  kWarm,             // slot: the leader saw that it is warm
  kGrow,             // slot, tokens
  kRelease,          // slot
  kMakeFirm,         // slot
  kReserveHostCopy,  // slot, tokens, tokens of the prefix, the prefix's pages
  kEvict,            // slot, tokens, the pages of the host cache
  kDetach,           // slot
  kJoin,             // BatchState::Joining
  kStep,             // buffer, StepPlan
  kStop,
};

// A RankAdmission says what the leader's policy admitted. Pages of DRAM have the leader's numbers
// on every rank, so that rank 0 can write the caches of all heads, and knows which pages are free.
struct RankAdmission {
  int64_t context = 0;
  int64_t total = 0;
  bool firm = true;
  int owner = 0;  // the rank that has the sequence, where each has its own
  bool has_home = false;
  HomePages home;  // the host cache, if there is one
};

class RankPlanWriter {
 public:
  void Admit(int slot, const RankAdmission& admission);
  void BeginPrompt(int slot, int64_t tokens, int64_t cached);
  void EndPrompt(int slot, int64_t tokens, const SelectionHints& hints);
  void Warm(int slot);
  void Grow(int slot, int64_t tokens);
  void Release(int slot);
  void MakeFirm(int slot);
  void ReserveHostCopy(int slot, int64_t tokens, const SharedPrefix& prefix);
  void Evict(int slot, int64_t tokens, const RankPages& home);
  void Detach(int slot);
  void Join(int slot, const BatchState::Joining& joining);
  void Step(int buffer, const StepPlan& plan);
  void Stop();

  // Appends the orders of another plan.
  void Append(const RankPlanWriter& orders) {
    bytes_.insert(bytes_.end(), orders.bytes_.begin(), orders.bytes_.end());
  }
  absl::Span<const uint8_t> message() const { return bytes_; }
  void Clear() { bytes_.clear(); }

 private:
  template <typename T>
  void Put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* from = reinterpret_cast<const uint8_t*>(&value);
    bytes_.insert(bytes_.end(), from, from + sizeof(T));
  }
  template <typename T>
  void PutAll(absl::Span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    Put(static_cast<uint32_t>(values.size()));
    const auto* from = reinterpret_cast<const uint8_t*>(values.data());
    bytes_.insert(bytes_.end(), from, from + values.size() * sizeof(T));
  }
  void PutPages(const RankPages& lists);  // by runs: neighbours mostly have neighbouring numbers
  void Order(RankOrder order, int slot) {
    Put(order);
    Put(static_cast<int32_t>(slot));
  }

  std::vector<uint8_t> bytes_;
};

// Does what orders say. Each function returns an error where this rank cannot do what the leader
// did; the ranks then differ, and the group must end.
class RankOrders {
 public:
  virtual ~RankOrders() = default;
  virtual absl::Status Admit(int slot, RankAdmission admission) = 0;
  virtual absl::Status BeginPrompt(int slot, int64_t tokens, int64_t cached) = 0;
  virtual absl::Status EndPrompt(int slot, int64_t tokens, SelectionHints hints) = 0;
  virtual absl::Status Warm(int slot) = 0;
  virtual absl::Status Grow(int slot, int64_t tokens) = 0;
  virtual absl::Status Release(int slot) = 0;
  virtual absl::Status MakeFirm(int slot) = 0;
  virtual absl::Status ReserveHostCopy(int slot, int64_t tokens, SharedPrefix prefix) = 0;
  virtual absl::Status Evict(int slot, int64_t tokens, RankPages home) = 0;
  virtual absl::Status Detach(int slot) = 0;
  virtual absl::Status Join(int slot, const BatchState::Joining& joining) = 0;
  virtual absl::Status Step(int buffer, const StepPlan& plan) = 0;

 private:
  friend class RankPlanReader;
  StepPlan plan_;  // of the step that is read, whose memory is used again
};

// Carries a message's orders out, one after the other. Returns true where the last is kStop.
// INTERNAL: the message is not one of RankPlanWriter's. Allocates nothing for a kStep.
absl::StatusOr<bool> CarryOut(absl::Span<const uint8_t> message, RankOrders& orders);

}  // namespace sluice
