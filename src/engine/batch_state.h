// The running batch as the device sees it: token histories, sampling state, the rows of the step
// and its results, all at fixed addresses. The host changes tables when a sequence joins, and
// uploads the rows of each step; token values never pass through the host, except drafts
// (src/engine/drafter.h) and the tokens that follow them. A step writes those to the histories
// before its forward pass. Rows with drafts store no choice there, because each would write where
// the next one reads.
//
// So nearly all of a step of decode rows can be recorded once: one pair of programs (forward pass,
// sampling) for every row bucket of the device. Missing rows of a bucket are padded. Such a step is
// then one copy in, two programs and one copy out, whichever sequences joined or left since. Steps
// with prompt rows, and all steps of a device without buckets, are enqueued operator by operator.
//
// Only the engine's thread may call it.
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
#include "src/engine/device_drafts.h"
#include "src/engine/rank_rows.h"
#include "src/model/model.h"
#include "src/request/token.h"
#include "src/sampling/sampling_params.h"
#include "src/scheduler/planner.h"

namespace sluice {

class BatchLog;

class BatchState {
 public:
  // Maximum steps that are launched and not yet read.
  static constexpr int kDepth = 2;

  struct Options {
    int slots = 0;
    int max_context = 0;
    int draft_tokens = 0;  // maximum drafts of a sequence in a step
    // Whether the model's draft layer makes them, behind the sampling of every step.
    bool device_drafts = false;
    BatchLog* log = nullptr;  // told of every Join and Launch before it is enqueued; may be null
    // Not null: each rank runs the rows of its own sequences, and has the results of all. Plans,
    // and the numbers of their samples, are those of all ranks. It outlives the batch.
    RankRows* ranks = nullptr;
    // With `ranks`: a step of decode rows, of which some rank has so many, runs as two halves
    // (StepInputs::halves); 0: none does.
    int halves_from = 0;
  };
  static absl::StatusOr<std::unique_ptr<BatchState>> Create(const Options& options, Device* device,
                                                            const Model& model);

  // Records the programs for steps of up to `slots` decode rows, and of as many more as they may
  // have drafts, so that no later step has to; runs
  // nothing. From then on Launch must be called with streams of the kind of `stream`, and with
  // `model` and `policy`, which outlive this. Returns the device's errors.
  absl::Status RecordPrograms(Stream& stream, Model& model, AttentionPolicy& policy);

  // A sequence brings this to its slot.
  struct Joining {
    struct LogitBias {
      uint32_t id;
      float value;
    };
    absl::Span<const int32_t> tokens;
    kernels::SamplingSlot sampling{};
    absl::Span<const int32_t> stop_ids;
    absl::Span<const LogitBias> logit_bias;
  };
  void Join(Stream& stream, int slot, const Joining& joining);

  // Puts a sequence's tokens and sampling state into `slot`. REQUIRES: no step that has the slot is
  // under way; tokens.size() <= max_context.
  void Join(Stream& stream, int slot, absl::Span<const int32_t> tokens,
            const SamplingParams& params, uint64_t seed, int32_t prompt_length,
            absl::Span<const int32_t> stop_ids);

  // Makes the draft layer's caches of `slot` begin with the row at `first`, if there is one. Call
  // it before Join, under the same conditions.
  void BeginDrafts(Stream& stream, int slot, int64_t first);

  // Returns an event that is ready when what Join enqueued for the slot is done. Until then the
  // slot must not be joined again.
  Event& joined(int slot) { return *joined_[static_cast<size_t>(slot)]; }

  // Marks on the stream where a step begins, for TimesOf(buffer). Call it before anything of the
  // step is enqueued, Grow included. A step without it is not timed.
  void Begin(Stream& stream, int buffer);

  // Enqueues a step: what the policy has for the device, the rows, the forward pass, sampling, the
  // draft layer, if there is one, and the copy of the results. `buffer` < kDepth is free again once
  // event(buffer) is ready and its results were read. `tokens` are the tokens of the plan's rows,
  // as far as the host knows them; -1: the device has it. Empty: the device has all of them.
  // REQUIRES: it is empty if draft_tokens is 0, and has all drafts, and the token after a step of
  // its sequence with drafts, which that step did not store.
  void Launch(Stream& stream, int buffer, const StepPlan& plan, Model& model,
              AttentionPolicy& policy, absl::Span<const int32_t> tokens = {});
  Event& event(int buffer) { return *marks_[static_cast<size_t>(buffer)].end; }

  // The device's time in a step, by part.
  struct Times {
    absl::Duration copy;     // tables and rows in, results out
    absl::Duration compute;  // the model
    absl::Duration sample;   // with the draft layer, if there is one
  };
  Times TimesOf(int buffer) const;

  // Returns the result of the plan's sample number `index` (in the order of its sampling rows). An
  // id of -1 means that the logits were not finite. `logprobs` is the number of alternatives
  // wanted; absent: none. REQUIRES: event(buffer) is ready.
  OutputToken Result(int buffer, int index, std::optional<uint32_t> logprobs) const;

  // Returns whether the device makes drafts.
  bool has_device_drafts() const { return device_drafts_ != nullptr; }
  // Returns draft number `draft` behind the plan's sample number `index`, which is the last one of
  // its sequence that was accepted: a token, kernels::kNoDraft, or -1 if the draft layer's logits
  // were not finite. REQUIRES: has_device_drafts() and what Result requires.
  int32_t DraftAfter(int buffer, int index, int draft) const;

 private:
  // The size of a step on the device, including padded rows.
  struct Shape {
    int32_t rows = 0;
    int32_t decode_rows = 0;
    int32_t samples = 0;
    int32_t most_rows = 0;  // StepInputs::most_rows
    bool halves = false;    // StepInputs::halves
  };
  // A recorded step of decode rows. It has two parts, so that the time of each is known. The second
  // one has the drafts of the device too.
  struct StepProgram {
    Shape shape;
    std::unique_ptr<Program> forward, sample;
  };

  BatchState(const Options& options, Device* device, const Model& model);
  // Returns the rows to which a step of `rows` decode rows is padded; 0: it is not padded.
  int32_t BucketOf(int32_t rows) const;
  // Returns the program that serves a plan, of which a rank has `rows` rows at most, or null.
  StepProgram* ProgramFor(const StepPlan& plan, int32_t rows);
  // Returns the size of a step that no program serves.
  Shape ShapeOf(const StepPlan& own, int32_t most_rows, bool halves) const;
  // Returns whether a step runs as two halves whose decode rows are all its rows.
  bool Halves(int32_t most_rows) const { return halves_from_ > 0 && most_rows >= halves_from_; }
  absl::StatusOr<std::unique_ptr<Program>> RecordForward(Stream& stream, const Shape& shape,
                                                         Model& model, AttentionPolicy& policy);
  // Records a size of step again for which the policy now enqueues something else. A program that
  // is under way runs to its end. If recording fails, the old program goes on to serve: its results
  // are the same.
  void RecordAgain(Stream& stream, StepProgram& program, Model& model, AttentionPolicy& policy);
  // Writes the plan's rows and samples to `buffer`'s inputs on the host, padded to `shape`.
  void FillInputs(int buffer, const StepPlan& plan, const Shape& shape);
  // Writes what a step with drafts needs beside them: the rows' tokens, and which samples store
  // theirs.
  void FillDraftInputs(int buffer, const StepPlan& plan, const Shape& shape,
                       absl::Span<const int32_t> tokens);
  // Enqueues the writing of the rows' tokens to the histories.
  void PutTokens(Stream& stream, const Shape& shape) const;
  void Forward(Stream& stream, const Shape& shape, Model& model, AttentionPolicy& policy) const;
  void Sample(Stream& stream, const Shape& shape) const;
  // Enqueues the drafts of the device, if it makes any.
  void Draft(Stream& stream, const Shape& shape, Model& model) const;
  absl::Status Allocate(Buffer* buffer, MemoryKind kind, int64_t bytes, const char* what);
  absl::Status AllocateAll();

  // Step inputs, int32, one after the other in one buffer. A step uploads only the bytes of its
  // shape, and the addresses are the same in every step of that shape.
  struct Inputs {
    int32_t *slots, *positions, *numbers;                   // [rows]
    int32_t *logit_rows, *sample_slots, *sample_positions;  // [samples]
    // Only where there may be drafts. A row's token goes to entry `token_places` of the histories,
    // counted over all slots; -1: it is there. `stores` is that of SampleParams.
    int32_t *tokens, *token_places, *token_count;  // [rows], [rows], [1]
    int32_t* stores;                               // [samples]
    int32_t* token_slots;                          // [rows], DraftInputs::token_slots
  };
  static Inputs InputsAt(const Buffer& buffer, const Shape& shape);
  int64_t InputBytes(const Shape& shape) const {
    const int64_t plain = 3 * int64_t{shape.rows} + 3 * int64_t{shape.samples};
    const int64_t drafts = 3 * int64_t{shape.rows} + 1 + int64_t{shape.samples};
    return (plain + (draft_tokens_ > 0 ? drafts : 0)) * 4;
  }
  // Step results, one after the other in one buffer.
  struct Results {
    int32_t* tokens;      // [max_samples]
    float* logprobs;      // [max_samples]
    int32_t* top_ids;     // [max_samples][kMaxTopLogprobs]
    float* top_logprobs;  // [max_samples][kMaxTopLogprobs]
    int32_t* drafts;      // [draft_tokens][samples of the step], where the device drafts
  };
  // `rank`: whose results, in a buffer that has those of all.
  Results ResultsAt(const Buffer& buffer, int rank = 0) const;
  int64_t result_bytes() const {
    const int64_t drafts = has_device_drafts_ ? draft_tokens_ : 0;
    return int64_t{max_samples_} * (2 + 2 * kernels::kMaxTopLogprobs + drafts) * 4;
  }

  // The tables that Join uploads, by slot. The host's copy of a slot is rewritten only after every
  // step of the sequence before is done.
  struct Tables {
    Buffer tokens;       // int32 [slots][max_context]
    Buffer sampling;     // SamplingSlot [slots]
    Buffer stop_ids;     // int32 [slots][kMaxStopIds]
    Buffer bias_ids;     // int32 [slots][kMaxLogitBias]
    Buffer bias_values;  // float [slots][kMaxLogitBias]
  };

  Device* const device_;
  BatchLog* const log_;
  RankRows* const ranks_;  // null: this rank runs all rows
  const int halves_from_;
  const int slots_;
  const int max_context_;
  const int draft_tokens_;
  const bool has_device_drafts_;
  const int vocab_;
  const int max_rows_;
  const int max_samples_;
  Tables device_tables_, host_tables_;
  Buffer inputs_;                            // device
  std::array<Buffer, kDepth> host_inputs_;   // pinned
  Buffer results_;                           // device
  Buffer all_results_;                       // [ranks] of all ranks, device; only with ranks_
  std::array<Buffer, kDepth> host_results_;  // pinned: results_, or all_results_
  std::array<std::vector<RankRows::Place>, kDepth> places_;  // of samples; only with ranks_
  Buffer logits_;                                            // float32 [max_samples][vocab]
  Buffer sample_scratch_;
  // Events at the points of a step on its stream.
  struct Marks {
    std::unique_ptr<TimedEvent> begin, rows_in, forward_done, sampled, end;
    bool timed = false;  // whether Begin was called
  };
  std::array<Marks, kDepth> marks_;
  std::unique_ptr<DeviceDrafts> device_drafts_;  // null: the device makes none
  std::array<int32_t, kDepth> draft_stride_{};   // samples of the step in each buffer
  std::vector<StepProgram> programs_;            // by rows, ascending
  std::vector<std::unique_ptr<Event>> joined_;   // by slot
};

// BatchLog is told what joins the batch and which steps are launched, in order.
class BatchLog {
 public:
  virtual ~BatchLog() = default;
  virtual void Joined(int slot, const BatchState::Joining& joining) = 0;
  virtual void Launching(int buffer, const StepPlan& plan) = 0;
};

}  // namespace sluice
