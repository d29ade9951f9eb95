// The operators that sparse policies add to a decode step, at one shape and on any device. Operands
// are laid out as in a step: scattered pages, lists for each row and KV head, and data that a step
// would not find in a cache is rotated.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/sparse_params.h"
#include "src/bench/operators/device_operands.h"
#include "src/device/device.h"

namespace sluice::bench {

// The shape of one layer; the default is Qwen3-14B's.
struct PolicyShape {
  int32_t rows = 10;
  int32_t context = 65536;
  int32_t budget_tokens = 2048;
  int32_t heads = 40;
  int32_t kv_heads = 8;
  int32_t head_dim = 128;
  int32_t block_tokens = 32;

  int32_t blocks() const { return context / block_tokens; }
  int32_t budget_blocks() const { return budget_tokens / block_tokens; }
  int64_t lists() const { return int64_t{rows} * kv_heads; }
  int64_t page_bytes() const { return int64_t{4} * kv_heads * block_tokens * head_dim; }
};

struct PolicyOperator {
  std::string name;
  double bytes;       // Bytes of the device's memory that a launch must read or write.
  double link_bytes;  // Bytes of the host's memory that it must read or write.
  // Enqueues launch `number` of many.
  std::function<void(Stream& stream, int number)> launch;
};

class PolicyOperators {
 public:
  // RESOURCE_EXHAUSTED: the device lacks the memory.
  static absl::StatusOr<std::unique_ptr<PolicyOperators>> Create(Device& device,
                                                                 const PolicyShape& shape);
  const std::vector<PolicyOperator>& all() const { return all_; }

 private:
  PolicyOperators(Device& device, const PolicyShape& shape);

  void AddDigests();
  void AddScores();
  void AddTopK();
  void AddPartial();
  void AddResidency();
  void AddAttention();

  kernels::PagedRows Rows(int64_t rows, int32_t rows_per_page, int32_t dim, kernels::DType type,
                          int sets);
  kernels::PagedCache Cache(MemoryKind kind, int64_t blocks, int64_t pages);
  // Returns lists of ascending units; each contains 0 and the two newest units.
  std::vector<int32_t> Lists(int32_t units, int32_t count);
  kernels::UnitLists EmptyLists(int32_t capacity);

  Device& device_;
  const PolicyShape shape_;
  DeviceOperands operands_;
  std::vector<PolicyOperator> all_;
  int32_t* slots_ = nullptr;
  std::vector<int32_t*> positions_;  // Positions of consecutive steps.
  float* q_ = nullptr;               // [rows][heads * head_dim]
};

}  // namespace sluice::bench
