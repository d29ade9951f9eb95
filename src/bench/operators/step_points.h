// The operators of a decode step of a DeepSeek-V3.2 rank as `sluice-bench simulate` needs them
// (simulate/operator_times.h): each at several amounts of work, alone and back to back, on operands
// that rotate so that no launch finds its own in a cache. Results are not checked here; the tests
// of kernels do that.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/device/device.h"
#include "src/model/model_config.h"

namespace sluice::bench {

struct StepPointShape {
  ModelConfig config;
  std::vector<int64_t> rows;      // Decode rows, rising.
  std::vector<int64_t> contexts;  // Tokens of a sequence, rising; each at least top_k.
  std::vector<int64_t> misses;    // Entries that a sequence misses, rising; each at most top_k.
  int64_t sequences = 64;         // Whose misses are fetched and given places.
  int64_t home_bytes = 0;         // Pinned memory with homes beyond address translation; 0: none.
  double cold_bytes = 6e8;        // Operands that rotate.

  int64_t top_k() const { return config.latent->indexer->top_k; }
};

struct StepPoint {
  std::string name;  // The operator's, as simulate/step_model.cc asks for it.
  std::string axis;
  double count = 0;  // On that axis.
  int launches = 24;
  double parts = 1;  // Operators of one launch, among which its time is divided.
  std::function<void(Stream& stream, int number)> launch = nullptr;
  std::function<void(Stream& stream)> before = nullptr;  // Before each replay; may be null.
  // UpdateResidency: device memory with what each sequence missed in the last launch.
  const int32_t* missed = nullptr;
};

// Times a point. The point's operands live until it returns.
using TimePoint = std::function<absl::Status(const StepPoint&)>;

// Each function calls `time` for its operators, point by point. RESOURCE_EXHAUSTED: the device
// lacks the memory. Errors of `time` end it.
//
// Products with dense weights, experts, heads, and the head.
absl::Status TimeProducts(Device& device, const StepPointShape& shape, const TimePoint& time);
// Norms, activations, RoPE of queries, the append, the sum of experts, sampling.
absl::Status TimeSmallOperators(Device& device, const StepPointShape& shape, const TimePoint& time);
// Latent attention, the indexer's logits and top-k.
absl::Status TimeLatentAttention(Device& device, const StepPointShape& shape,
                                 const TimePoint& time);
// UpdateResidency and transfers. The point "transfer.far" has homes that fill home_bytes.
absl::Status TimePools(Device& device, const StepPointShape& shape, const TimePoint& time);

// The entries of each sequence at the points of "transfer.far", which has as many as one point of
// "transfer".
inline constexpr int64_t kFarMisses = 128;

}  // namespace sluice::bench
