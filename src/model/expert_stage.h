// The experts of a layer of the DeepSeek-V3 family: router, routed experts and their weighted sum.
// (The shared experts are one dense FFN.) Internal to src/model.
#pragma once

#include <string>

#include "src/model/layer_operators.h"
#include "src/model/model.h"
#include "src/model/weight_loader.h"

namespace sluice {

// Weights of one layer.
struct ExpertWeights {
  Weight router;      // [routed][hidden]
  DeviceVector bias;  // [routed], for the choice alone
  // The experts one below the other: of each gate, then up; and down.
  Weight gate_up;  // [routed * 2 * intermediate][hidden]
  Weight down;     // [routed * hidden][intermediate]
};

class ExpertStage {
 public:
  // `config` and `ops` stay valid.
  ExpertStage(const ModelConfig& config, const LayerOperators& ops);

  absl::StatusOr<ExpertWeights> Load(WeightLoader& loader, int layer) const;
  absl::Status Allocate(Workspace& workspace, int max_rows);

  // Chooses experts for all rows of a step. `normed`: activations [rows][hidden].
  void Choose(Stream& stream, const ExpertWeights& weights, const StepInputs& in,
              const void* normed);
  // residual += the chosen experts' weighted sum. REQUIRES: after Choose() of the same rows.
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
  // Of each pair of a row and a choice; those of padded rows are not written.
  Buffer gate_up_;    // float32 [rows * k][2 * intermediate]
  Buffer activated_;  // activation [rows * k][intermediate]
  Buffer results_;    // float32 [rows * k][hidden]
};

}  // namespace sluice
