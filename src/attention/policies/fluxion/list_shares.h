// Which lists the device reads whole, where lists are not divided: the static ways to schedule that
// Fluxion's scheduler is compared with (8.3). Only benches have them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/policies/fluxion/fluxion_options.h"
#include "src/attention/policy_options.h"
#include "src/device/device.h"

namespace sluice {

// Returns the device's share of each list of some sequences, 1 or 0, [lengths.size()][kv_heads].
// `share` is the device's part of the rate of both processors, from 0 to 1, and `lengths` are the
// sequences' tokens.
//
// With kHeads the device has that part of the lists by their number, and of each sequence's within
// one list, whatever the lengths. With kLengths lists are as long as their sequences: the longest
// first, each goes to the processor that would be done with it earlier. REQUIRES: another division
// than kEachList.
std::vector<float> WholeLists(PolicyOptions::Fluxion::Division division, double share,
                              absl::Span<const int32_t> lengths, int32_t kv_heads);

// The shares of the sequences in a step, in device memory, where recorded steps read them. Only the
// engine's thread may call it.
class ListShares {
 public:
  // RESOURCE_EXHAUSTED: there is no memory.
  static absl::StatusOr<std::unique_ptr<ListShares>> Create(const PolicyOptions& options,
                                                            const FluxionShape& shape);

  // Assigns the lists of a step's sequences anew, before the step's first operator. The rows are
  // those of AttentionPolicy::BeginStep; a sequence is as long as its last row's position says.
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions);

  // kernels::DivideListsParams::shares
  const float* shares() const { return device_.as<float>(); }

 private:
  // Maximum steps under way at once.
  static constexpr size_t kSteps = 2;
  struct Sent {
    Buffer shares;  // float [slots][kv_heads], pinned
    std::unique_ptr<Event> done;
  };

  ListShares(const PolicyOptions& options, const FluxionShape& shape);

  const PolicyOptions::Fluxion::Division division_;
  const double share_;
  const int32_t kv_heads_;
  std::vector<float> now_;  // [slots][kv_heads], as the device has it after the newest step
  Buffer device_;           // float [slots][kv_heads]
  std::array<Sent, kSteps> sent_;
  size_t next_ = 0;
};

}  // namespace sluice
