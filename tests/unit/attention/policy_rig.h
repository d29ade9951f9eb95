// Drives an attention policy without a model: decode steps of made-up queries, keys and values, in
// the order in which a model calls the policy, and a naive softmax to check the results against.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"
#include "src/device/allocation.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"

namespace sluice::testing {

class PolicyRig {
 public:
  struct Shape {
    int layers = 3;
    int heads = 4;
    int kv_heads = 2;
    int head_dim = 32;
    int block_tokens = 16;
    int slots = 4;
    int max_context = 1024;
    std::string kernels = "portable";  // or "cuda", where all steps are recorded and padded
    int threads = 1;                   // CPU device: its threads
    // CPU device: CpuDeviceOptions::row_bucket; > 0: steps are recorded programs, padded
    int row_bucket = 0;
  };
  // The vectors of a token in one layer.
  struct Vectors {
    // All values fit bf16, so that a selection is the same whether a product rounds its inputs or
    // not.
    std::vector<float> q, predicted;  // [heads][head_dim]
    std::vector<float> k, v;          // [kv_heads][head_dim]
  };
  using Make = std::function<Vectors(uint64_t seed, int layer, int position)>;

  PolicyRig(const Shape& shape, Make make);
  ~PolicyRig();

  // Returns options with device, pools and shapes; the test sets the rest. Every token of every
  // layer counts.
  PolicyOptions Options() const;

  // Hands over the first `context` tokens of stream `seed`; the slot is warm on return.
  // Hands over all but the last `computed` tokens, which are computed as rows of the prompt.
  // `hints` are sent with them.
  void Admit(AttentionPolicy& policy, int slot, uint64_t seed, int context, int total,
             int computed = 0, const SelectionHints& hints = {});
  void Release(AttentionPolicy& policy, int slot);
  // Ends a turn of the slot's sequence, and begins another one with the host cache that it leaves,
  // in which the sequence has `total` tokens at its end; the slot is warm on return.
  void NextTurn(AttentionPolicy& policy, int slot, int total);
  // Returns the next position of a slot.
  int position(int slot) const { return sequences_.at(slot).length; }
  // Makes the next step of a slot compute the row of its last one again.
  void Rewind(int slot) { --sequences_.at(slot).length; }

  // Computes one decode row of each slot through all layers. Returns [layer][row][heads *
  // head_dim].
  std::vector<std::vector<std::vector<float>>> Step(AttentionPolicy& policy,
                                                    const std::vector<int32_t>& slots) {
    return Step(policy, slots, /*generates=*/true);
  }
  // Returns what lies at an address of the device.
  std::vector<float> Read(const float* at, size_t count);

  // Returns softmax(scale * q K) V of stream `seed` at `position` in float64, over the tokens for
  // which `weigh` names a query: the real one, the predicted one, or none.
  enum class Who { kNobody, kReal, kPredicted };
  std::vector<float> Naive(uint64_t seed, int layer, int position,
                           const std::function<Who(int kv_head, int token)>& weigh) const;
  // Returns the blocks with the highest scores for predicted (or real) queries, by kv_head, with
  // the first block and the `last` newest forced in. Scores are those of key codes, or of digests,
  // which count tokens before `position`; reduction is the largest.
  std::vector<std::vector<int32_t>> NaiveTopBlocks(uint64_t seed, int layer, int position,
                                                   int blocks, int last, bool predicted,
                                                   bool codes = true) const;

  const Shape& shape() const { return shape_; }
  float scale() const;
  Device& device() { return *device_; }
  PagePool& hbm() { return *hbm_; }
  PagePool& dram() { return *dram_; }

 private:
  struct Sequence {
    uint64_t seed = 0;
    int length = 0;
  };
  // Memory of one layer.
  struct Layer {
    MirroredBuffer qkv, predicted, out;
  };
  void Enqueue(Stream& stream, AttentionPolicy& policy, int rows, int decode_rows);
  void Ahead(Stream& stream, AttentionPolicy& policy, int layer, int rows);
  std::vector<std::vector<std::vector<float>>> Step(AttentionPolicy& policy,
                                                    const std::vector<int32_t>& slots,
                                                    bool generates);
  void Finish();

  const Shape shape_;
  const Make make_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<PagePool> hbm_, dram_;
  std::map<int, Sequence> sequences_;
  std::vector<Layer> layers_;
  MirroredBuffer slots_, positions_, cos_sin_;
  Buffer partial_;
  std::unique_ptr<Event> done_;
  std::map<int, std::unique_ptr<Program>> programs_;  // by rows; of the policy that came first
  std::unique_ptr<Stream> stream_;
};

// Defines a test on the CPU device's portable kernels and one on a GPU, so that a device which a
// machine lacks is counted as skipped. The shape says where the test runs.
void OnRig(const std::string& kernels, void (*test)(const PolicyRig::Shape&));
#define SLUICE_TEST_ON_CPU_AND_GPU(claim, test)                  \
  TEST_CASE(claim) { sluice::testing::OnRig("portable", test); } \
  TEST_CASE(claim " (cuda)", "[cuda]") { sluice::testing::OnRig("cuda", test); }

float RoundedToBf16(float x);

// Makes random vectors; the predicted query is `error` away from the real one.
PolicyRig::Make RandomVectors(const PolicyRig::Shape& shape, float error);

// ||got - want|| / ||want||.
double RelativeError(const std::vector<float>& got, const std::vector<float>& want);

}  // namespace sluice::testing
