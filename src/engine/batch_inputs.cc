// The inputs of a step: what a plan's rows and samples are on the device, and the tokens that the
// host brings along for them.
#include <algorithm>

#include "src/device/kernel_set.h"
#include "src/engine/batch_state.h"

namespace sluice {

BatchState::Inputs BatchState::InputsAt(const Buffer& buffer, const Shape& shape) {
  Inputs in{};
  in.slots = buffer.as<int32_t>();
  in.positions = in.slots + shape.rows;
  in.numbers = in.positions + shape.rows;
  in.logit_rows = in.numbers + shape.rows;
  in.sample_slots = in.logit_rows + shape.samples;
  in.sample_positions = in.sample_slots + shape.samples;
  in.tokens = in.sample_positions + shape.samples;
  in.token_places = in.tokens + shape.rows;
  in.token_count = in.token_places + shape.rows;
  in.stores = in.token_count + 1;
  in.token_slots = in.stores + shape.samples;
  return in;
}

void BatchState::FillInputs(int buffer, const StepPlan& plan, const Shape& shape) {
  const Inputs host = InputsAt(host_inputs_[static_cast<size_t>(buffer)], shape);
  int32_t row = 0, sample = 0;
  for (const PlanRow& planned : plan.rows) {
    for (int32_t i = 0; i < planned.count; ++i, ++row) {
      host.slots[row] = planned.slot;
      host.positions[row] = static_cast<int32_t>(planned.first_position + i);
      host.numbers[row] = planned.decoded + i;
    }
    if (!planned.sample) continue;
    for (int32_t chooser = row - 1 - planned.drafts; chooser < row; ++chooser, ++sample) {
      host.logit_rows[sample] = chooser;
      host.sample_slots[sample] = planned.slot;
      host.sample_positions[sample] = host.positions[chooser];
    }
  }
  for (; row < shape.rows; ++row) {
    host.slots[row] = -1;
    host.positions[row] = 0;
    host.numbers[row] = 0;
  }
  for (; sample < shape.samples; ++sample) {
    host.logit_rows[sample] = -1;
    host.sample_slots[sample] = -1;
    host.sample_positions[sample] = 0;
  }
}

void BatchState::FillDraftInputs(int buffer, const StepPlan& plan, const Shape& shape,
                                 absl::Span<const int32_t> tokens) {
  const Inputs host = InputsAt(host_inputs_[static_cast<size_t>(buffer)], shape);
  std::fill_n(host.token_places, shape.rows, -1);
  std::fill_n(host.tokens, shape.rows, -1);
  for (int32_t row = 0; row < shape.rows; ++row) {
    host.token_slots[row] = host.positions[row] > 0 ? host.slots[row] : -1;
  }
  for (size_t row = 0; row < tokens.size(); ++row) {
    if (tokens[row] < 0) continue;
    host.tokens[row] = tokens[row];
    host.token_places[row] = host.slots[row] * max_context_ + host.positions[row];
  }
  *host.token_count = shape.rows;
  int32_t sample = 0;
  for (const PlanRow& planned : plan.rows) {
    if (!planned.sample) continue;
    std::fill_n(host.stores + sample, 1 + planned.drafts, planned.drafts == 0 ? 1 : 0);
    sample += 1 + planned.drafts;
  }
  std::fill_n(host.stores + sample, shape.samples - sample, 0);
}

void BatchState::PutTokens(Stream& stream, const Shape& shape) const {
  const Inputs in = InputsAt(inputs_, shape);
  kernels::TransferParams put{};
  put.source = in.tokens;
  put.target = device_tables_.tokens.data();
  put.source_pitch = put.target_pitch = put.unit_bytes = sizeof(int32_t);
  put.target_units = in.token_places;
  put.counts = in.token_count;
  put.lists = 1;
  put.capacity = shape.rows;
  device_->kernels().Transfer(stream, put);
}

}  // namespace sluice
