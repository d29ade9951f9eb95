// Policies around others that show the inputs and results of attention to latent caches. They are
// for tests of one sequence in slot 0 that is computed from its first token on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/attention/forwarding_policy.h"
#include "src/device/device.h"
#include "src/model/model.h"

namespace sluice::testing {

// Records, for every layer, the indexer's queries and the attention results of a step's last row,
// and the index keys of all rows so far.
class LatentWatch : public ForwardingPolicy {
 public:
  // REQUIRES: all three outlive this object, and the caches are packed or float32.
  LatentWatch(AttentionPolicy* policy, Device* device, const Model& model);

  void AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) override;
  void AttendLatent(Stream& stream, int layer, const Params& params) override;

  // Must be called after a step of positions [position, position + count) is done.
  void Collect(int position, int count);

  // The indexer's query and the attention result of the step's last row, as bytes.
  std::string Query(int layer) const;
  std::string Result(int layer) const;
  // Returns the last row's index scores of positions [0, position + 1), in float64.
  std::vector<double> Scores(int layer) const;
  // Returns the `top_k` best of them, ascending; lower positions come first among equals.
  std::vector<int32_t> Selected(int layer) const;

 private:
  struct Layer {
    Buffer keys, query, result;  // Memory that the device reaches, written by copies.
    std::string all_keys;        // [positions][key bytes]
  };
  Device* const device_;
  const ModelConfig config_;
  const kernels::DType type_;  // Type of the index keys.
  const size_t key_bytes_, query_bytes_, result_bytes_;
  std::vector<Layer> layers_;
  Buffer written_;  // [max_rows][key bytes]
  int length_ = 0;
};

// Runs policy `first`, and beside it `second` on the same inputs, to the bit: entries, index keys
// and queries. The model goes on with what `first` gives; both are asked for float32 results, too.
// `first` attends twice, which must change nothing: it is policy full.
class BothPolicies : public ForwardingPolicy {
 public:
  // REQUIRES: all outlive this object.
  BothPolicies(AttentionPolicy* first, AttentionPolicy* second, Device* device, const Model& model);

  bool Admit(int slot, int64_t context, int64_t total, Promise promise,
             std::unique_ptr<SequenceCache>& home) override;
  bool Warm(int slot) override;
  Event& WarmEvent(int slot) override;
  bool Grow(int slot, int64_t tokens) override;
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override;
  void Release(int slot) override;
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override;
  void BeginPrompt(int slot, int64_t tokens, int64_t cached) override;
  void EndStep(Stream& stream) override;
  void AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                    int32_t first_row) override;
  void AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) override;
  void AttendLatent(Stream& stream, int layer, const Params& params) override;

  // Returns the results [rows][heads * rank] of each policy in a layer of the last step, which is
  // done.
  std::vector<std::vector<float>> First(int layer, int rows) const;
  std::vector<std::vector<float>> Second(int layer, int rows) const;

 private:
  struct Results {
    Buffer first, second;  // On the host.
  };
  std::vector<std::vector<float>> Rows(const Buffer& from, int rows) const;

  AttentionPolicy* const first_;
  AttentionPolicy* const second_;
  const int64_t row_;             // Elements of a row.
  std::vector<Results> results_;  // Indexed by layer.
  Buffer out_;                    // float [rows][heads * rank]
};

}  // namespace sluice::testing
