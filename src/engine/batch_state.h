// The running batch as the device sees it: token histories, sampling state, the rows of the step
// and its results, all at fixed addresses. The host changes tables when a sequence joins, and
// uploads the rows of each step; token values never pass through it.
//
// So nearly all of a step of decode rows can be recorded once: one pair of programs (forward pass,
// sampling) for every row bucket of the device, whose missing rows are padded. Such a step is then
// one copy in, two programs and one copy out, whoever joined or left since. Steps with rows of
// prompts, and all steps of a device without buckets, are enqueued operator by operator.
//
// Engine's thread only.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "src/device/device.h"
#include "src/model/model.h"
#include "src/request/token.h"
#include "src/sampling/sampling_params.h"
#include "src/scheduler/planner.h"

namespace sluice {

class BatchState {
 public:
  // Steps that may be launched and not yet read.
  static constexpr int kDepth = 2;

  struct Options {
    int slots = 0;
    int max_context = 0;
  };
  static absl::StatusOr<std::unique_ptr<BatchState>> Create(const Options& options, Device* device,
                                                            const Model& model);

  // Records the programs for steps of up to `slots` decode rows, so that no later step has to; runs
  // nothing. From then on Launch has to be called with streams of the kind of `stream`, and with
  // `model` and `policy`, which outlive this. The device's errors.
  absl::Status RecordPrograms(Stream& stream, Model& model, AttentionPolicy& policy);

  // Puts a sequence's tokens and sampling state into `slot`. REQUIRES: no step that has the slot is
  // under way; tokens.size() <= max_context.
  void Join(Stream& stream, int slot, absl::Span<const int32_t> tokens,
            const SamplingParams& params, uint64_t seed, int32_t prompt_length,
            absl::Span<const int32_t> stop_ids);

  // Ready when what Join enqueued for the slot is done; before, the slot must not be joined again.
  Event& joined(int slot) { return *joined_[static_cast<size_t>(slot)]; }

  // Notes on the stream where a step begins, for TimesOf(buffer): call before anything of the step
  // is enqueued, Grow included. Without it the step is not timed.
  void Begin(Stream& stream, int buffer);

  // Enqueues what the policy has for the device, rows, forward pass, sampling and the way back of
  // the results; `buffer` < kDepth is free again once event(buffer) is ready and its results were
  // read.
  void Launch(Stream& stream, int buffer, const StepPlan& plan, Model& model,
              AttentionPolicy& policy);
  Event& event(int buffer) { return *marks_[static_cast<size_t>(buffer)].end; }

  // Where the device's time went in a step. REQUIRES: Begin was called for the step, and
  // event(buffer) is ready.
  struct Times {
    absl::Duration copy;     // tables and rows in, results out
    absl::Duration compute;  // the model
    absl::Duration sample;
  };
  Times TimesOf(int buffer) const;

  // Result of the plan's sample number `index` (in the order of its sampling rows); an id of -1:
  // the logits were not finite. `logprobs`: alternatives wanted, none if absent.
  OutputToken Result(int buffer, int index, std::optional<uint32_t> logprobs) const;

 private:
  // How large a step is on the device, padded rows included.
  struct Shape {
    int32_t rows = 0;
    int32_t decode_rows = 0;
    int32_t samples = 0;
  };
  // A step of decode rows, recorded. In two parts, so that the time of each is known.
  struct StepProgram {
    Shape shape;
    std::unique_ptr<Program> forward, sample;
  };

  BatchState(const Options& options, Device* device, const Model& model);
  // Rows that a step of `rows` decode rows is padded to; 0: it is not.
  int32_t BucketOf(int32_t rows) const;
  // The program that serves a plan, or null.
  StepProgram* ProgramFor(const StepPlan& plan);
  absl::StatusOr<std::unique_ptr<Program>> RecordForward(Stream& stream, const Shape& shape,
                                                         Model& model, AttentionPolicy& policy);
  // Of a size for which the policy enqueues something else now. One that is under way runs to its
  // end; where there is no new one, the old goes on to serve: its results are the same.
  void RecordAgain(Stream& stream, StepProgram& program, Model& model, AttentionPolicy& policy);
  // Writes the plan's rows and samples to `buffer`'s inputs on the host, padded to `shape`.
  void FillInputs(int buffer, const StepPlan& plan, const Shape& shape);
  void Forward(Stream& stream, const Shape& shape, Model& model, AttentionPolicy& policy) const;
  void Sample(Stream& stream, const Shape& shape) const;
  absl::Status Allocate(Buffer* buffer, MemoryKind kind, int64_t bytes, const char* what);
  absl::Status AllocateAll();

  // Step inputs, int32, one after the other in one buffer: a step uploads as many bytes as its
  // shape has, and their addresses are the same in every step of that shape.
  struct Inputs {
    int32_t *slots, *positions;                             // [rows]
    int32_t *logit_rows, *sample_slots, *sample_positions;  // [samples]
  };
  static Inputs InputsAt(const Buffer& buffer, const Shape& shape);
  static int64_t InputBytes(const Shape& shape) {
    return (2 * int64_t{shape.rows} + 3 * int64_t{shape.samples}) * 4;
  }
  // Step results, one after the other in one buffer.
  struct Results {
    int32_t* tokens;      // [max_samples]
    float* logprobs;      // [max_samples]
    int32_t* top_ids;     // [max_samples][kMaxTopLogprobs]
    float* top_logprobs;  // [max_samples][kMaxTopLogprobs]
  };
  Results ResultsAt(const Buffer& buffer) const;
  int64_t result_bytes() const {
    return int64_t{max_samples_} * (2 + 2 * kernels::kMaxTopLogprobs) * 4;
  }

  // What Join uploads, per slot, and where it is sent from: the host copy of a slot is rewritten
  // only after every step of the sequence before is done.
  struct Tables {
    Buffer tokens;       // int32 [slots][max_context]
    Buffer sampling;     // SamplingSlot [slots]
    Buffer stop_ids;     // int32 [slots][kMaxStopIds]
    Buffer bias_ids;     // int32 [slots][kMaxLogitBias]
    Buffer bias_values;  // float [slots][kMaxLogitBias]
  };

  Device* const device_;
  const int slots_;
  const int max_context_;
  const int vocab_;
  const int max_rows_;
  const int max_samples_;
  Tables device_tables_, host_tables_;
  Buffer inputs_;                            // device
  std::array<Buffer, kDepth> host_inputs_;   // pinned
  Buffer results_;                           // device
  std::array<Buffer, kDepth> host_results_;  // pinned
  Buffer logits_;                            // float32 [max_samples][vocab]
  Buffer sample_scratch_;
  // Points of a step on its stream.
  struct Marks {
    std::unique_ptr<TimedEvent> begin, rows_in, forward_done, sampled, end;
    bool timed = false;  // Begin was called
  };
  std::array<Marks, kDepth> marks_;
  std::vector<StepProgram> programs_;           // by rows, ascending
  std::vector<std::unique_ptr<Event>> joined_;  // per slot
};

}  // namespace sluice
