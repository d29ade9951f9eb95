#include "src/engine/batch_state.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/attention_policy.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {

using kernels::kMaxLogitBias;
using kernels::kMaxStopIds;
using kernels::SamplingSlot;

absl::StatusOr<std::unique_ptr<BatchState>> BatchState::Create(const Options& options,
                                                               Device* device, const Model& model) {
  const int64_t samples = int64_t{options.slots} * (1 + options.draft_tokens);
  SLUICE_CHECK(samples <= model.max_logits() && samples <= model.max_rows());
  // PutTokens counts the tokens of all histories in int32.
  if (options.draft_tokens > 0 && int64_t{options.slots} * options.max_context > INT32_MAX) {
    return absl::InvalidArgumentError(absl::StrCat(
        "speculation: expected at most 2^31 tokens of max_context x max_sequences, found ",
        int64_t{options.slots} * options.max_context));
  }
  std::unique_ptr<BatchState> state(new BatchState(options, device, model));
  SLUICE_CHECK(options.ranks == nullptr || options.draft_tokens == 0, "ranks make no drafts");
  SLUICE_RETURN_IF_ERROR(state->AllocateAll());
  if (options.device_drafts && options.draft_tokens > 0) {
    SLUICE_ASSIGN_OR_RETURN(state->device_drafts_,
                            DeviceDrafts::Create({options.slots, options.max_context,
                                                  options.draft_tokens, state->max_samples_},
                                                 device, model));
  }
  return state;
}

BatchState::BatchState(const Options& options, Device* device, const Model& model)
    : device_(device),
      log_(options.log),
      ranks_(options.ranks),
      halves_from_(options.ranks != nullptr ? options.halves_from : 0),
      slots_(options.slots),
      max_context_(options.max_context),
      draft_tokens_(options.draft_tokens),
      has_device_drafts_(options.device_drafts && options.draft_tokens > 0),
      vocab_(model.config().vocab_size),
      max_rows_(model.max_rows()),
      max_samples_(options.slots * (1 + options.draft_tokens)) {
  for (Marks& m : marks_) {
    for (auto* mark : {&m.begin, &m.rows_in, &m.forward_done, &m.sampled, &m.end}) {
      *mark = device->NewTimedEvent();
    }
  }
  for (int slot = 0; slot < slots_; ++slot) joined_.push_back(device->NewEvent());
}

absl::Status BatchState::Allocate(Buffer* buffer, MemoryKind kind, int64_t bytes,
                                  const char* what) {
  SLUICE_ASSIGN_OR_RETURN(*buffer, device_->Allocate(kind, static_cast<size_t>(bytes), what));
  return absl::OkStatus();
}

absl::Status BatchState::AllocateAll() {
  const int64_t n = slots_;
  for (auto [tables, kind] : {std::pair{&device_tables_, MemoryKind::kDevice},
                              std::pair{&host_tables_, MemoryKind::kPinned}}) {
    SLUICE_RETURN_IF_ERROR(
        Allocate(&tables->tokens, kind, n * max_context_ * 4, "token histories"));
    SLUICE_RETURN_IF_ERROR(Allocate(
        &tables->sampling, kind, n * static_cast<int64_t>(sizeof(SamplingSlot)), "sampling state"));
    SLUICE_RETURN_IF_ERROR(Allocate(&tables->stop_ids, kind, n * kMaxStopIds * 4, "stop ids"));
    SLUICE_RETURN_IF_ERROR(Allocate(&tables->bias_ids, kind, n * kMaxLogitBias * 4, "logit bias"));
    SLUICE_RETURN_IF_ERROR(
        Allocate(&tables->bias_values, kind, n * kMaxLogitBias * 4, "logit bias"));
  }
  const int64_t input_bytes = InputBytes({max_rows_, 0, max_samples_});
  SLUICE_RETURN_IF_ERROR(Allocate(&inputs_, MemoryKind::kDevice, input_bytes, "step inputs"));
  SLUICE_RETURN_IF_ERROR(Allocate(&results_, MemoryKind::kDevice, result_bytes(), "step results"));
  const int64_t all_results = result_bytes() * (ranks_ != nullptr ? ranks_->group().size() : 1);
  if (ranks_ != nullptr) {
    SLUICE_RETURN_IF_ERROR(
        Allocate(&all_results_, MemoryKind::kDevice, all_results, "all ranks' results"));
  }
  for (int i = 0; i < kDepth; ++i) {
    const auto b = static_cast<size_t>(i);
    SLUICE_RETURN_IF_ERROR(
        Allocate(&host_inputs_[b], MemoryKind::kPinned, input_bytes, "step inputs"));
    SLUICE_RETURN_IF_ERROR(
        Allocate(&host_results_[b], MemoryKind::kPinned, all_results, "step results"));
  }
  SLUICE_RETURN_IF_ERROR(
      Allocate(&logits_, MemoryKind::kDevice, int64_t{max_samples_} * vocab_ * 4, "logits"));
  return Allocate(&sample_scratch_, MemoryKind::kDevice,
                  device_->kernels().SampleScratchBytes(vocab_), "sampling scratch");
}

void BatchState::Join(Stream& stream, int slot, absl::Span<const int32_t> tokens,
                      const SamplingParams& params, uint64_t seed, int32_t prompt_length,
                      absl::Span<const int32_t> stop_ids) {
  Joining joining;
  joining.tokens = tokens;
  joining.sampling =
      MakeSamplingSlot(params, seed, prompt_length, static_cast<int32_t>(stop_ids.size()));
  joining.stop_ids = stop_ids;
  SLUICE_CHECK(params.logit_bias.size() <= kMaxLogitBias);
  std::array<Joining::LogitBias, kMaxLogitBias> bias;
  size_t count = 0;
  for (const auto& [id, value] : params.logit_bias) bias[count++] = {id, value};
  joining.logit_bias = absl::MakeConstSpan(bias.data(), count);
  Join(stream, slot, joining);
}

void BatchState::Join(Stream& stream, int slot, const Joining& joining) {
  const absl::Span<const int32_t> tokens = joining.tokens, stop_ids = joining.stop_ids;
  SLUICE_CHECK(static_cast<int64_t>(tokens.size()) <= max_context_ &&
               stop_ids.size() <= kMaxStopIds && joining.logit_bias.size() <= kMaxLogitBias);
  if (log_ != nullptr) log_->Joined(slot, joining);
  auto* bias_ids = host_tables_.bias_ids.as<int32_t>() + int64_t{slot} * kMaxLogitBias;
  auto* bias_values = host_tables_.bias_values.as<float>() + int64_t{slot} * kMaxLogitBias;
  for (const auto& [id, value] : joining.logit_bias) {
    *bias_ids++ = static_cast<int32_t>(id);
    *bias_values++ = value;
  }
  std::copy(tokens.begin(), tokens.end(),
            host_tables_.tokens.as<int32_t>() + int64_t{slot} * max_context_);
  std::copy(stop_ids.begin(), stop_ids.end(),
            host_tables_.stop_ids.as<int32_t>() + int64_t{slot} * kMaxStopIds);
  host_tables_.sampling.as<SamplingSlot>()[slot] = joining.sampling;

  const auto send = [&](Buffer Tables::*table, size_t row_bytes, size_t bytes) {
    if (bytes == 0) return;
    const size_t at = static_cast<size_t>(slot) * row_bytes;
    stream.Copy((device_tables_.*table).as<uint8_t>() + at,
                (host_tables_.*table).as<uint8_t>() + at, bytes);
  };
  send(&Tables::tokens, static_cast<size_t>(max_context_) * 4, tokens.size() * 4);
  send(&Tables::sampling, sizeof(SamplingSlot), sizeof(SamplingSlot));
  send(&Tables::stop_ids, kMaxStopIds * 4, stop_ids.size() * 4);
  send(&Tables::bias_ids, kMaxLogitBias * 4, joining.logit_bias.size() * 4);
  send(&Tables::bias_values, kMaxLogitBias * 4, joining.logit_bias.size() * 4);
  stream.Record(joined(slot));
}

void BatchState::BeginDrafts(Stream& stream, int slot, int64_t first) {
  if (device_drafts_ != nullptr) device_drafts_->Begin(stream, slot, static_cast<int32_t>(first));
}

void BatchState::Begin(Stream& stream, int buffer) {
  Marks& marks = marks_[static_cast<size_t>(buffer)];
  marks.timed = true;
  stream.Record(*marks.begin);
}

BatchState::Times BatchState::TimesOf(int buffer) const {
  const Marks& m = marks_[static_cast<size_t>(buffer)];
  return {m.rows_in->Since(*m.begin) + m.end->Since(*m.sampled), m.forward_done->Since(*m.rows_in),
          m.sampled->Since(*m.forward_done)};
}

int32_t BatchState::BucketOf(int32_t rows) const {
  return std::min(device_->RowBucket(rows), max_rows_);
}

absl::Status BatchState::RecordPrograms(Stream& stream, Model& model, AttentionPolicy& policy) {
  programs_.clear();
  for (int32_t rows = 1; rows <= max_samples_; ++rows) {
    const int32_t bucket = BucketOf(rows);
    if (bucket == 0 || (!programs_.empty() && programs_.back().shape.rows == bucket)) continue;
    const Shape shape{bucket, bucket, std::min(bucket, max_samples_), 0, Halves(bucket)};
    StepProgram program;
    program.shape = shape;
    SLUICE_ASSIGN_OR_RETURN(program.forward, RecordForward(stream, shape, model, policy));
    SLUICE_ASSIGN_OR_RETURN(program.sample,
                            device_->Record(stream, [this, shape, &model](Stream& s) {
                              Sample(s, shape);
                              Draft(s, shape, model);
                            }));
    programs_.push_back(std::move(program));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Program>> BatchState::RecordForward(Stream& stream,
                                                                   const Shape& shape, Model& model,
                                                                   AttentionPolicy& policy) {
  return device_->Record(
      stream, [this, shape, &model, &policy](Stream& s) { Forward(s, shape, model, policy); });
}

void BatchState::RecordAgain(Stream& stream, StepProgram& program, Model& model,
                             AttentionPolicy& policy) {
  const absl::Time begin = absl::Now();
  absl::StatusOr<std::unique_ptr<Program>> again =
      RecordForward(stream, program.shape, model, policy);
  if (!again.ok()) {
    Log(LogLevel::kWarn, "a step could not be recorded again, and goes on as it was recorded",
        {{"decode_rows", program.shape.decode_rows},
         {"error", std::string(again.status().message())}});
    return;
  }
  program.forward = *std::move(again);
  Log(LogLevel::kInfo, "a step was recorded again",
      {{"decode_rows", program.shape.decode_rows},
       {"elapsed_seconds", absl::ToDoubleSeconds(absl::Now() - begin)}});
}

BatchState::StepProgram* BatchState::ProgramFor(const StepPlan& plan, int32_t rows) {
  if (plan.decode_rows < plan.row_count) return nullptr;
  // Several handed-over first tokens of a sequence are as many decode rows, which may be more than
  // any program has.
  const auto program = std::find_if(
      programs_.begin(), programs_.end(),
      [bucket = BucketOf(rows)](const StepProgram& p) { return p.shape.rows == bucket; });
  return program == programs_.end() ? nullptr : &*program;
}

BatchState::Shape BatchState::ShapeOf(const StepPlan& own, int32_t most_rows, bool halves) const {
  // A rank without rows takes part with a padded one.
  if (own.row_count == 0) return {1, 1, 0, most_rows, halves};
  return {own.row_count, own.decode_rows, own.sample_count, most_rows, halves};
}

void BatchState::Forward(Stream& stream, const Shape& shape, Model& model,
                         AttentionPolicy& policy) const {
  const Inputs in = InputsAt(inputs_, shape);
  if (draft_tokens_ > 0) PutTokens(stream, shape);
  StepInputs step;
  step.tokens = device_tables_.tokens.as<int32_t>();
  step.token_stride = max_context_;
  step.slots = in.slots;
  step.positions = in.positions;
  step.numbers = in.numbers;
  step.rows = shape.rows;
  step.decode_rows = shape.decode_rows;
  step.logit_rows = in.logit_rows;
  step.logit_count = shape.samples;
  step.logits = logits_.as<float>();
  step.most_rows = shape.most_rows;
  step.halves = shape.halves;
  model.Forward(stream, step, policy);
}

void BatchState::Sample(Stream& stream, const Shape& shape) const {
  const Inputs in = InputsAt(inputs_, shape);
  const Results results = ResultsAt(results_);
  kernels::SampleParams choose{};
  choose.logits = logits_.as<float>();
  choose.slots = in.sample_slots;
  choose.positions = in.sample_positions;
  choose.sampling = device_tables_.sampling.as<SamplingSlot>();
  choose.stop_ids = device_tables_.stop_ids.as<int32_t>();
  choose.bias_ids = device_tables_.bias_ids.as<int32_t>();
  choose.bias_values = device_tables_.bias_values.as<float>();
  choose.tokens = device_tables_.tokens.as<int32_t>();
  choose.token_stride = max_context_;
  choose.out_tokens = results.tokens;
  choose.out_logprobs = results.logprobs;
  choose.out_top_ids = results.top_ids;
  choose.out_top_logprobs = results.top_logprobs;
  choose.scratch = sample_scratch_.data();
  choose.rows = shape.samples;
  choose.vocab = vocab_;
  choose.stores = draft_tokens_ > 0 ? in.stores : nullptr;
  if (shape.samples > 0) device_->kernels().Sample(stream, choose);
  if (ranks_ == nullptr) return;
  ranks_->group().AllGather(stream, results_.data(), all_results_.data(),
                            static_cast<size_t>(result_bytes()));
}

void BatchState::Draft(Stream& stream, const Shape& shape, Model& model) const {
  if (device_drafts_ == nullptr) return;
  const Inputs in = InputsAt(inputs_, shape);
  const Results results = ResultsAt(results_);
  DeviceDrafts::Step step;
  step.tokens = device_tables_.tokens.as<int32_t>();
  step.rows.tokens = step.tokens;
  step.rows.token_stride = max_context_;
  step.rows.slots = in.slots;
  step.rows.token_slots = in.token_slots;
  step.rows.positions = in.positions;
  step.rows.rows = shape.rows;
  step.rows.decode_rows = shape.decode_rows;
  step.sample_slots = in.sample_slots;
  step.sample_positions = in.sample_positions;
  step.sample_rows = in.logit_rows;
  step.chosen = results.tokens;
  step.samples = shape.samples;
  step.logits = logits_.as<float>();
  step.scratch = sample_scratch_.data();
  step.out = results.drafts;
  device_drafts_->Enqueue(stream, step, model);
}

void BatchState::Launch(Stream& stream, int buffer, const StepPlan& plan, Model& model,
                        AttentionPolicy& policy, absl::Span<const int32_t> tokens) {
  SLUICE_CHECK(plan.row_count <= max_rows_ && plan.sample_count <= max_samples_ &&
               std::ssize(tokens) <= (draft_tokens_ > 0 ? plan.row_count : 0));
  if (log_ != nullptr) log_->Launching(buffer, plan);
  const auto b = static_cast<size_t>(buffer);
  Marks& marks = marks_[b];
  const bool timed = std::exchange(marks.timed, false);
  const RankRows::Part* const part = ranks_ != nullptr ? &ranks_->Divide(plan) : nullptr;
  const StepPlan& own = part != nullptr ? part->plan : plan;
  const int32_t most_rows = part != nullptr ? part->most_rows : plan.row_count;
  if (part != nullptr) ranks_->FindSamples(plan, &places_[b]);
  StepProgram* const program = ProgramFor(plan, most_rows);
  const bool halves = plan.decode_rows == plan.row_count && Halves(most_rows);
  const Shape shape = program != nullptr ? program->shape : ShapeOf(own, most_rows, halves);
  if (policy.WantsRecording(shape.decode_rows) && program != nullptr) {
    RecordAgain(stream, *program, model, policy);
  }
  FillInputs(buffer, own, shape);
  if (draft_tokens_ > 0) FillDraftInputs(buffer, own, shape, tokens);
  const Inputs rows = InputsAt(host_inputs_[b], shape);
  // Before the copy: a kernel may read tables before the kernels ahead of it in the stream have
  // ended (kernels/cuda/common/launch.cuh), but never before a copy ahead of it has.
  const auto row_count = static_cast<size_t>(own.row_count);
  policy.BeginStep(stream, {rows.slots, row_count}, {rows.positions, row_count});
  stream.Copy(inputs_.data(), host_inputs_[b].data(), static_cast<size_t>(InputBytes(shape)));
  if (timed) stream.Record(*marks.rows_in);

  if (program != nullptr) {
    program->forward->Run(stream);
  } else {
    Forward(stream, shape, model, policy);
  }
  if (timed) stream.Record(*marks.forward_done);

  if (plan.sample_count > 0) {
    if (SLUICE_FAILPOINT(kEngineLogits)) {
      // fills with NaN
      stream.Fill(logits_.data(), 0xFF, static_cast<size_t>(vocab_) * sizeof(float));
    }
    if (program != nullptr) {
      program->sample->Run(stream);
    } else {
      Sample(stream, shape);
    }
  }
  // Rows of a prompt that choose nothing have entries in the draft layer's caches too.
  if (program == nullptr || plan.sample_count == 0) Draft(stream, shape, model);
  draft_stride_[b] = shape.samples;
  if (timed) stream.Record(*marks.sampled);
  if (plan.sample_count > 0) {
    stream.Copy(host_results_[b].data(), (ranks_ != nullptr ? all_results_ : results_).data(),
                host_results_[b].bytes());
  }
  stream.Record(*marks.end);
}

}  // namespace sluice
