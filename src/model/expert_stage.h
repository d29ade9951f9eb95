// ExpertStage runs the experts of a layer of the DeepSeek-V3 family: the router, the routed experts
// and their weighted sum. (The shared experts are one dense FFN.) Internal to src/model.
#pragma once

#include <string>

#include "src/model/layer_operators.h"
#include "src/model/model.h"
#include "src/model/weight_loader.h"

namespace sluice {

// Weights of one layer.
struct ExpertWeights {
  Weight router;      // [routed][hidden]
  DeviceVector bias;  // [routed], used only for the choice
  // The experts one below the other: in gate_up the gate and then the up matrix of each.
  Weight gate_up;  // [routed * 2 * intermediate][hidden]
  Weight down;     // [routed * hidden][intermediate]
};

class ExpertStage {
 public:
  // REQUIRES: `config` and `ops` outlive this.
  ExpertStage(const ModelConfig& config, const LayerOperators& ops);

  absl::StatusOr<ExpertWeights> Load(WeightLoader& loader, int layer) const;
  absl::Status Allocate(Workspace& workspace, int max_rows);

  // Chooses experts for all rows of a step. `normed`: activations [rows][hidden].
  void Choose(Stream& stream, const ExpertWeights& weights, const StepInputs& in,
              const void* normed);
  // Enqueues residual += the weighted sum of the chosen experts. REQUIRES: Choose() of the same
  // rows was called before.
  void Run(Stream& stream, const ExpertWeights& weights, const StepInputs& in, const void* normed,
           float* residual);

 private:
  const ModelConfig& config_;
  const ExpertConfig& experts_;
  const LayerOperators& ops_;
  Buffer logits_;   // float32 [rows][routed]
  Buffer chosen_;   // int32 [rows][k]
  Buffer weights_;  // float32 [rows][k]
  Buffer pairs_;    // int32 [rows * k]
  Buffer begins_;   // int32 [routed + 1]
  // Indexed by pairs of a row and a choice. The pairs of padded rows are not written.
  Buffer gate_up_;    // float32 [rows * k][2 * intermediate]
  Buffer activated_;  // activation [rows * k][intermediate]
  Buffer results_;    // float32 [rows * k][hidden]
};

}  // namespace sluice
