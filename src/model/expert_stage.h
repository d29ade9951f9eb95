// ExpertStage runs the experts of a layer of the DeepSeek-V3 family: the router, the routed experts
// and their weighted sum. (The shared experts are one dense FFN.) Internal to src/model.
//
// Where ranks divide the experts (shard.h), the router is on every rank, and rows travel: the rank
// packs each row once for every rank that has some of its experts, an all-to-all moves what there
// is, each rank's experts work on what arrived, and another all-to-all brings back, for each row
// that was sent, the weighted sum of the rank's experts. These sums are added in the order of the
// ranks. Where an expert is on several ranks, a table says to which of them the rows of this rank
// go. So a row's bits depend on the number of ranks and on where the experts are; with copies of
// experts on its own rank too; and never on the rows beside it.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "src/device/rank_group.h"
#include "src/model/expert_placement.h"
#include "src/model/layer_operators.h"
#include "src/model/model.h"
#include "src/model/row_exchange.h"
#include "src/model/shard.h"
#include "src/model/weight_loader.h"

namespace sluice {

// Weights of one layer. `own` is the number of the rank's experts, copies included: all, without
// ranks.
struct ExpertWeights {
  Weight router;      // [routed][hidden]
  DeviceVector bias;  // [routed], used only for the choice
  // The experts one below the other: in gate_up the gate and then the up matrix of each.
  Weight gate_up;  // [own * 2 * intermediate][hidden]
  Weight down;     // [own * hidden][intermediate]
  // int32 [routed]: PackRowsParams::physical; empty where experts are in their order.
  Buffer physical;
  Buffer load;  // int64 [routed]: how often rows of this rank chose each; empty: it is not counted
};

class ExpertStage {
 public:
  // `options` are the model's: its ranks, and how rows travel. REQUIRES: ExpertShardOf takes them;
  // `config` and `ops` outlive this.
  ExpertStage(const ModelConfig& config, const Model::Options& options, const LayerOperators& ops);

  absl::StatusOr<ExpertWeights> Load(WeightLoader& loader, int layer) const;
  // Returns a hash of where the experts of all layers are.
  std::string Digest() const;
  absl::Status Allocate(Workspace& workspace, int max_rows);

  // Chooses experts for some rows of a step. `normed`: activations [rows of the step][hidden].
  void Choose(Stream& stream, const ExpertWeights& weights, const StepInputs& in, RowRange rows,
              const void* normed);
  // Returns whether ranks divide the experts, so that the functions of an exchange do the rest.
  bool divided() const { return !shard_.whole(); }
  // Enqueues residual += the weighted sum of the chosen experts, for all rows. REQUIRES: Choose()
  // of them was called before, and !divided().
  void Run(Stream& stream, const ExpertWeights& weights, const StepInputs& in, const void* normed,
           float* residual);

  // Enqueues the packing of chosen rows, which is a whole step, `half` 0, or a half of one.
  // `residual` and `normed` have all rows of the step. REQUIRES: divided(), here and below.
  void Pack(Stream& stream, const ExpertWeights& weights, int half, const StepInputs& in,
            RowRange rows, const void* normed, float* residual);
  RowExchange& exchange(int half) { return *exchanges_[static_cast<size_t>(half)]; }
  // Enqueues the work of the rank's experts, between Dispatch and Return of the exchange.
  void Work(Stream& stream, const ExpertWeights& weights, int half);

 private:
  ExpertPlacement PlacementOf(int layer) const;
  // Returns the activations of the rows from `first` on.
  const void* RowsOf(const void* normed, int64_t first) const {
    return static_cast<const uint8_t*>(normed) +
           first * config_.hidden_size * ops_.activation_bytes();
  }
  // Enqueues rows.sums += the weighted sum of the rank's experts.
  void Compute(Stream& stream, const ExpertWeights& weights, const RowExchange::Arrived& rows);

  const ModelConfig& config_;
  const ExpertConfig& experts_;
  const ExpertShard shard_;
  const ExpertLoad load_;
  const bool count_load_;
  const LayerOperators& ops_;
  Buffer logits_;   // float32 [rows][routed]
  Buffer chosen_;   // int32 [rows][k]
  Buffer weights_;  // float32 [rows][k]
  Buffer pairs_;    // int32 [rows * k]
  Buffer begins_;   // int32 [routed + 1]
  // Indexed by pairs of a row and a choice; where ranks divide the experts, of a row that arrived.
  // The pairs of padded rows, and of other ranks' experts, are not written.
  Buffer gate_up_;    // float32 [rows * k][2 * intermediate]
  Buffer activated_;  // activation [rows * k][intermediate]
  Buffer results_;    // float32 [rows * k][hidden]
  // The first serves a whole step or its first half, the other the second half. Each is null where
  // it is not needed.
  std::array<std::unique_ptr<RowExchange>, 2> exchanges_;
};

}  // namespace sluice
