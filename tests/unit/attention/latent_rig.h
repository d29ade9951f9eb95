// Drives a policy of latent caches without a model: rows of made-up entries, index keys and
// queries, in the order in which a model calls the policy, and a naive model in float64 to check
// selections and results against.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"
#include "src/device/allocation.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"

namespace sluice::testing {

class LatentRig {
 public:
  struct Shape {
    int layers = 3;
    int heads = 4;
    int rank = 32;
    int rope = 16;
    int index_heads = 2;
    int top_k = 32;
    int block_tokens = 16;
    int slots = 3;
    int max_context = 512;
    std::string kernels = "reference";
    bool packed = false;        // 656-byte entries (rank 512, rope 64); else float32
    int row_bucket = 0;         // > 0: steps of decode rows are recorded programs, padded
    int rows_per_sequence = 1;  // PolicyOptions::rows_per_sequence
    double drift = 0.02;        // how far the indexer's queries turn from one position to the next
    size_t pool_bytes = size_t{8} << 20;
    int workers = 3;  // of a mover by way of the CPU
    absl::Duration worker_deadline = absl::Seconds(60);
  };
  // `options` are policy ess's own; the rig sets the others.
  LatentRig(const Shape& shape, const PolicyOptions::Ess& ess, const std::string& name = "ess");
  ~LatentRig();

  PolicyOptions Options() const { return options_; }
  AttentionPolicy& policy() { return *policy_; }
  PagePool& hbm() { return *hbm_; }
  PagePool& dram() { return *dram_; }

  // Hands over the first `context` tokens of stream `seed` to a slot, whose sequence ends at
  // `total`. Returns false if there is no capacity. `prompt`: tokens of the prompt; 0: as many as
  // the context. REQUIRES: context is 0 where caches are packed (prompts make them).
  bool Admit(int slot, uint64_t seed, int context, int total, int prompt = 0);
  // Admits a host cache that DetachHostCache returned.
  void Readmit(int slot, uint64_t seed, int context, int total, int prompt,
               std::unique_ptr<SequenceCache> home);
  // Computes `count` rows of the slot's prompt.
  std::vector<std::vector<std::vector<float>>> Prompt(int slot, int count);
  void EndPrompt(int slot, const SelectionHints& hints = {});
  // Computes a decode row of each slot; neighbours of one slot are rows of one sequence. Rows that
  // are `wrong` are of another stream. Returns [layer][row][heads * rank].
  std::vector<std::vector<std::vector<float>>> Step(const std::vector<int32_t>& slots,
                                                    const std::vector<bool>& wrong = {});
  // Takes the slot's last `rows` rows back: the next one has the first one's position.
  void TakeBack(int slot, int rows) { sequences_.at(slot).length -= rows; }
  // Does the same, with `count` rows of another slot's prompt behind them.
  std::vector<std::vector<std::vector<float>>> Mixed(std::vector<int32_t> slots, int prompt_slot,
                                                     int count);
  int position(int slot) const { return sequences_.at(slot).length; }
  void AwaitWarm(int slot);
  // Returns how often the policy wanted steps of a size to be recorded again; each time they were.
  int recordings() const { return recordings_; }

  // Return the units that row `position` of stream `seed` selects, ascending; what it attends to;
  // and the `count` units that follow those in its ranking, ascending.
  std::vector<int32_t> Selected(uint64_t seed, int layer, int position) const;
  std::vector<int32_t> RunnersUp(uint64_t seed, int layer, int position, int count) const;
  std::vector<float> Naive(uint64_t seed, int layer, int position) const;
  // Returns hints of the last `rows` positions before `tokens`.
  SelectionHints Hints(uint64_t seed, int tokens, int rows) const;

 private:
  // Returns all units up to `position`, the best first.
  std::vector<int32_t> Ranked(uint64_t seed, int layer, int position) const;

  struct Sequence {
    uint64_t seed = 0;
    int length = 0;
  };
  struct Layer {
    MirroredBuffer kv, k, index_q, weights, q, out;
    Buffer made_q, made_weights;  // IndexQuery's results
  };
  struct Token {
    std::vector<float> kv, k, index_q, weights, q;
  };
  Token Make(uint64_t seed, int layer, int position) const;
  // Return the entry and the index key as they are in the caches.
  std::vector<double> Entry(const Token& token) const;
  std::vector<double> Key(const Token& token) const;
  void Enqueue(Stream& stream, int rows, int decode_rows);
  std::vector<std::vector<std::vector<float>>> Run(const std::vector<int32_t>& slots,
                                                   int decode_rows,
                                                   const std::vector<bool>& wrong = {});
  void Finish();

  const Shape shape_;
  const DType type_;  // type of the caches
  PolicyOptions options_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<PagePool> hbm_, dram_;
  std::map<int, Sequence> sequences_;
  std::vector<Layer> layers_;
  MirroredBuffer slots_, positions_, cos_sin_, ones_;
  std::unique_ptr<Event> done_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<AttentionPolicy> policy_;
  std::map<int, std::unique_ptr<Program>> programs_;  // by rows
  int recordings_ = 0;
};

}  // namespace sluice::testing
