#include "src/bench/policies/selection_overlap.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "src/attention/forwarding_policy.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/engine_run.h"
#include "src/bench/harness/step_device.h"

namespace sluice::bench {
namespace {

// Keeps the lists of every step in which all sequences have a decode row.
class SelectionLog : public ForwardingPolicy {
 public:
  SelectionLog(AttentionPolicy* policy, Buffer memory, int context, int rows, int layers, int top_k,
               int steps)
      : ForwardingPolicy(policy),
        memory_(std::move(memory)),
        context_(context),
        rows_(rows),
        layers_(layers),
        top_k_(top_k),
        most_(steps) {}

  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    ForwardingPolicy::BeginStep(stream, slots, positions);
    const bool whole = static_cast<int>(positions.size()) == rows_ &&
                       *std::min_element(positions.begin(), positions.end()) >= context_;
    kept_ = whole && steps_ < most_;
    if (kept_) ++steps_;
  }

  void Note(Stream& stream, int layer, const kernels::UnitLists& selected, int32_t first_row,
            int32_t rows) {
    if (!kept_) return;
    stream.Copy(ListOf(steps_ - 1, layer, first_row), selected.units + int64_t{first_row} * top_k_,
                static_cast<size_t>(rows) * static_cast<size_t>(top_k_) * sizeof(int32_t));
  }

  // Returns the shares by layer. REQUIRES: every step is done. Rows keep their order from step to
  // step.
  std::vector<double> Shares() const {
    std::vector<double> shares(static_cast<size_t>(layers_), 0.0);
    std::vector<int32_t> both;
    for (int layer = 0; layer < layers_; ++layer) {
      int64_t shared = 0;
      for (int step = 1; step < steps_; ++step) {
        for (int row = 0; row < rows_; ++row) {
          const int32_t* const now = ListOf(step, layer, row);
          const int32_t* const before = ListOf(step - 1, layer, row);
          both.clear();
          std::set_intersection(now, now + top_k_, before, before + top_k_,
                                std::back_inserter(both));
          shared += static_cast<int64_t>(both.size());
        }
      }
      const int64_t all = int64_t{std::max(steps_ - 1, 1)} * rows_ * top_k_;
      shares[static_cast<size_t>(layer)] = static_cast<double>(shared) / static_cast<double>(all);
    }
    return shares;
  }

 private:
  int32_t* ListOf(int step, int layer, int row) const {
    return memory_.as<int32_t>() + ((int64_t{step} * layers_ + layer) * rows_ + row) * top_k_;
  }

  const Buffer memory_;  // int32 [steps][layers][rows][top_k]
  const int context_, rows_, layers_, top_k_, most_;
  int steps_ = 0;  // Steps whose lists are kept.
  bool kept_ = false;
};

}  // namespace

absl::StatusOr<std::vector<double>> MeasureSelectionOverlap(const PolicyWorld& world,
                                                            const std::string& name,
                                                            const std::vector<Context>& contexts,
                                                            int steps) {
  const int layers = world.model->config().layers;
  const int top_k = world.model->config().latent->indexer->top_k;
  PolicyWorld own = world;
  SelectionLog* log = nullptr;
  own.options.ess.probe.on_selection =
      [&log](Stream& stream, int layer, const kernels::UnitLists& selected, int32_t first_row,
             int32_t count) { log->Note(stream, layer, selected, first_row, count); };
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionPolicy> policy, SetUpPolicy(own, name));
  EngineRunOptions options;
  options.context = static_cast<int>(contexts.front().tokens.size());
  options.windows = 1;
  options.steps = steps;
  options.contexts = &contexts;
  options.dram = world.dram;
  const int fit =
      LargestBatch(own, *policy, options.context, options.context + EngineTokens(options)).batch;
  const int rows = options.batch = std::min(static_cast<int>(contexts.size()), fit);
  if (rows == 0) return std::vector<double>();
  SLUICE_ASSIGN_OR_RETURN(
      Buffer memory,
      world.device->Allocate(
          MemoryKind::kPinned,
          static_cast<size_t>(int64_t{steps} * layers * rows * top_k) * sizeof(int32_t),
          "selections"));
  SelectionLog observed(policy.get(), std::move(memory), options.context, rows, layers, top_k,
                        steps);
  log = &observed;
  const std::unique_ptr<Device> device = NewStepDevice(world.device, {.record = false});
  SLUICE_RETURN_IF_ERROR(
      RunEngine(options, world.slots, device.get(), world.model, world.hbm, &observed).status());
  return observed.Shares();
}

}  // namespace sluice::bench
