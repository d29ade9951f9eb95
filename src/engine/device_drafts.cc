// Drafting on the device, behind the sampling of a step.
#include "src/engine/device_drafts.h"

#include <numeric>
#include <vector>

#include "kernels/draft_params.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"
#include "src/sampling/sampling_params.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<DeviceDrafts>> DeviceDrafts::Create(const Options& options,
                                                                   Device* device,
                                                                   const Model& model) {
  SLUICE_CHECK(model.drafts() && options.drafts > 0 && options.drafts <= kernels::kMaxDeviceDrafts);
  const ModelConfig& config = model.config();
  std::unique_ptr<DeviceDrafts> made(new DeviceDrafts(options, device, config.vocab_size));
  DraftWindow::Options window;
  window.device = device;
  window.layout = &model.cache_layout();
  window.heads = config.heads;
  window.rank = config.latent->rank;
  window.rope = config.latent->rope_dim;
  window.slots = options.slots;
  window.max_rows = model.max_rows();
  window.decode_rows = options.max_samples;
  window.max_context = options.max_context;
  SLUICE_ASSIGN_OR_RETURN(made->window_, DraftWindow::Create(window));
  SLUICE_RETURN_IF_ERROR(made->Allocate());
  return made;
}

absl::Status DeviceDrafts::Allocate() {
  const int64_t samples = options_.max_samples;
  SLUICE_RETURN_IF_ERROR(
      BufferAllocator(device_, "rows that draft")
          .Words(MemoryKind::kDevice, samples * (3 + options_.drafts), &memory_));
  std::vector<int32_t> numbers(static_cast<size_t>(samples));
  std::iota(numbers.begin(), numbers.end(), 0);
  SLUICE_ASSIGN_OR_RETURN(numbers_, Uploaded(device_, numbers, "rows that draft"));
  SamplingParams greedy;
  greedy.temperature = 0;
  const std::vector<kernels::SamplingSlot> slots(
      static_cast<size_t>(options_.slots),
      MakeSamplingSlot(greedy, /*seed=*/0, /*prompt_length=*/0, /*stop_count=*/0));
  const size_t bytes = slots.size() * sizeof(slots[0]);
  SLUICE_ASSIGN_OR_RETURN(greedy_,
                          device_->Allocate(MemoryKind::kDevice, bytes, "sampling of drafts"));
  const std::unique_ptr<Stream> stream = device_->NewStream(Device::StreamKind::kCopy);
  const std::unique_ptr<Event> done = device_->NewEvent();
  stream->Copy(greedy_.data(), slots.data(), bytes);
  stream->Record(*done);
  done->Wait();
  return device_->Health();
}

void DeviceDrafts::Settle(Stream& stream, const Step& step) const {
  kernels::SettleDraftsParams settle{};
  settle.slots = step.sample_slots;
  settle.positions = step.sample_positions;
  settle.chosen = step.chosen;
  settle.step_rows = step.sample_rows;
  settle.tokens = step.tokens;
  settle.token_stride = step.rows.token_stride;
  settle.draft_slots = SlotsOfDrafts();
  settle.draft_rows = RowsOfDrafts();
  settle.draft_positions = Positions();
  settle.out_drafts = step.out;
  settle.rows = step.samples;
  settle.drafts = options_.drafts;
  device_->kernels().SettleDrafts(stream, settle);
}

void DeviceDrafts::Choose(Stream& stream, const Step& step, int draft) const {
  kernels::SampleParams choose{};
  choose.logits = step.logits;
  choose.slots = SlotsOfDrafts();
  choose.positions = Positions() + int64_t{draft + 1} * step.samples;
  choose.sampling = greedy_.as<kernels::SamplingSlot>();
  choose.tokens = step.tokens;
  choose.token_stride = step.rows.token_stride;
  choose.out_tokens = step.out + int64_t{draft} * step.samples;
  choose.scratch = step.scratch;
  choose.rows = step.samples;
  choose.vocab = vocab_;
  device_->kernels().Sample(stream, choose);
}

void DeviceDrafts::Enqueue(Stream& stream, const Step& step, Model& model) const {
  if (step.samples > 0) Settle(stream, step);
  DraftInputs in = step.rows;
  in.logit_rows = RowsOfDrafts();
  in.logit_count = step.samples;
  in.logits = step.logits;
  model.Draft(stream, in, *window_);
  if (step.samples == 0) return;
  Choose(stream, step, 0);
  for (int draft = 1; draft < options_.drafts; ++draft) {
    in.slots = in.token_slots = SlotsOfDrafts();
    in.positions = Positions() + int64_t{draft} * step.samples;
    in.rows = in.decode_rows = step.samples;
    in.previous = draft == 1 ? RowsOfDrafts() : numbers_.as<int32_t>();
    in.logit_rows = numbers_.as<int32_t>();
    model.Draft(stream, in, *window_);
    Choose(stream, step, draft);
  }
}

}  // namespace sluice
