// Runs a model step by step with the tokens that the test dictates, and shows the logits.
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
#include "src/device/rank_group.h"
#include "src/kv/page_pool.h"
#include "src/model/expert_placement.h"
#include "src/model/model.h"

namespace sluice::testing {

// A policy with pools of its own.
struct PlacedPolicy {
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<AttentionPolicy> policy;
};

class Teacher {
 public:
  // `choose` changes the policy's options, which name `full` at first. With `ranks` this is one
  // rank of a group that divides the model. Then all ranks are asked for the same, or, where they
  // divide the experts, for as many steps of their own.
  enum class Divided { kTensors, kExperts, kExpertsByFp8 };
  // Where the experts are, as in Model::Options.
  struct Experts {
    int redundancy = 0;
    ExpertLoad load;
    bool count = false;
  };
  using Choose = std::function<void(PolicyOptions&)>;
  Teacher(const std::string& model_dir, const std::string& kernels, DType kv_dtype,
          const Choose& choose = nullptr, const RankGroupOptions* ranks = nullptr,
          Divided divided = Divided::kTensors, const Experts& experts = {0, {}, false});

  // Makes another policy for the same model and device.
  PlacedPolicy Place(const Choose& choose);
  // Puts `front` in the policy's place: the model calls `front`, which calls the policy. REQUIRES:
  // it is called before the first Begin, and `front` outlives this object.
  void SetFront(AttentionPolicy* front) { front_ = front; }

  // Starts a new sequence: its prompt and the tokens that will be dictated after it.
  void Begin(const std::vector<int32_t>& tokens);
  // The same, with given caches of the first `context` tokens: bf16 [context][kv_heads][head_dim]
  // for each layer.
  void BeginWithCache(const std::vector<int32_t>& tokens, int context,
                      const std::vector<std::vector<uint16_t>>& k,
                      const std::vector<std::vector<uint16_t>>& v);
  // Changes the token that is dictated at a position.
  void SetToken(int position, int32_t token);
  // Computes tokens [position, position + count) and returns the logits of the last one, [vocab].
  // `generates`: they are past the prompt, which ended before the first of them. `most_rows`: as in
  // StepInputs.
  std::vector<float> Step(int position, int count, bool generates, int most_rows = 0);
  // Begins a sequence and returns how many operators of each name a step behind its prompt
  // launches. REQUIRES: the device keeps traces.
  std::map<std::string, int> LaunchesOfStep(const std::vector<int32_t>& prompt);
  // Takes part in a step of the other ranks, without rows.
  void IdleStep(int most_rows);

  AttentionPolicy& policy() { return *placed_.policy; }
  Device& device() { return *device_; }
  const RankGroup& ranks() const { return *ranks_; }
  const Model& model() const { return *model_; }
  const ModelConfig& config() const { return model_->config(); }
  // Returns a copy of what lies at an address of the device.
  std::vector<float> Read(const float* at, size_t count);

 private:
  // Copies the host's memory to the device's.
  void ToDevice(const MirroredBuffer& both);
  // Waits for everything that is enqueued.
  void Finish();
  void Admit(const std::vector<int32_t>& tokens, int context, std::unique_ptr<SequenceCache> home);
  void AwaitWarm();
  void End();
  // Returns a step's inputs, whose rows are in rows_.
  StepInputs InputsOf(int count, int decode_rows, int most_rows);
  std::unique_ptr<Device> device_;
  std::unique_ptr<RankGroup> ranks_;  // null: the model is whole
  std::unique_ptr<Model> model_;
  PlacedPolicy placed_;
  AttentionPolicy* front_ = nullptr;  // The policy that the model calls.
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> done_;
  MirroredBuffer tokens_, rows_, logits_;
  bool admitted_ = false;
  bool prompt_ended_ = false;
  int32_t decoded_ = 0;  // decode rows of the sequence so far
};

}  // namespace sluice::testing
