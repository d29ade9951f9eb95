// A sequence as the engine keeps it, from Submit to its one Finish. Only the engine's thread may
// use it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "src/base/strong_id.h"
#include "src/engine/drafter.h"
#include "src/kv/transfer_table.h"
#include "src/request/request.h"
#include "src/request/stop_conditions.h"

namespace sluice {

struct Sequence {
  enum class State {
    kAwaitingTransfer,  // its Generate has arrived, its transfer is not ready
    kWaiting,           // ready, but without a slot: not admitted yet, or preempted
    kRunning,           // has a slot (its working set may still be warming)
    kPreempting,        // has a slot, but gets no rows: its caches are on their way to DRAM
    kFinished,  // the sink has had its Finish; the slot goes back when no step has it any more
  };

  Sequence(Request r, StopConditions conditions)
      : request(std::move(r)), stops(std::move(conditions)) {}

  SequenceId id;
  Request request;
  StopConditions stops;
  State state = State::kWaiting;
  absl::Time arrival;
  absl::Time ready;                             // when its transfer was complete
  absl::Time give_up = absl::InfiniteFuture();  // deadline of kAwaitingTransfer

  // Handoff.
  std::optional<TransferTable::AttachId> attached;
  std::string transfer_id;
  std::string tenant;  // to whom its caches belong

  SelectionHints hints;  // kept until its working set is made

  // The host cache while it waits: the caches of tokens [0, home_tokens), or null.
  std::unique_ptr<SequenceCache> home;
  int64_t home_tokens = 0;
  std::shared_ptr<const void> place;  // as in ReadySequence, until it is admitted

  // Tokens. [0, prompt_length) are the prompt, then comes output. Tokens that a launched step is to
  // choose count in `length`, although the host learns them a step later.
  std::vector<int32_t> tokens;  // as far as the host knows them
  int64_t prompt_length = 0;
  int64_t context_length = 0;  // tokens handed over, kept, or found in the prefix cache
  int64_t reused_tokens = 0;   // those of them that were found in the prefix cache
  int64_t max_tokens = 0;
  int64_t length = 0;
  int64_t cached = 0;   // tokens [0, cached) have their KV, or a launched step computes it
  int64_t emitted = 0;  // output tokens given to the sink
  // The first tokens of those emitted, as long as every row had attended to everything.
  int64_t exact = 0;
  bool approximate = false;  // a row of an earlier turn did not

  // Speculation; null: the node does not speculate.
  std::unique_ptr<SequenceDrafter> drafter;
  // The drafts that a launched step verifies. `cached` and `length` do not count them: they are
  // what they would be if only the first row of the step were planned.
  std::vector<int32_t> drafts;
  int64_t drafted = 0;   // drafts that were verified
  int64_t accepted = 0;  // those of them that became tokens

  // Batch.
  uint64_t ticket = 0;  // order in which sequences became ready, which is the order of admission
  std::optional<uint64_t> seed;  // set at its first admission
  int slot = -1;
  bool prompt_ended = false;  // SequencePlacement::EndPrompt was called, or is not needed
  bool soft = false;          // its promise of HBM is soft
  bool evicted = false;       // in kPreempting and with keep_id: the copy to DRAM is enqueued
  // In kFinished: the caches of tokens [0, keep_tokens) are to be kept under this name.
  std::string keep_id;
  int64_t keep_tokens = 0;
  bool unproven = false;  // it has published blocks that wait for its first token
  // In kFinished, without keep_id: as many of its first tokens are to be shared when its slot is at
  // rest; 0: none.
  int64_t share_tokens = 0;
  int preemptions = 0;
  absl::Time preempted_at;     // when it was last preempted
  absl::Duration preempted;    // total wait of earlier preemptions
  int in_flight = 0;           // launched steps whose result is not read
  uint64_t last_step = 0;      // newest launched step that has a row of it
  int32_t rehearsed = 0;       // rehearsals of its first decode row that were launched
  absl::Duration queued;       // from ready to its slot
  absl::Duration first_token;  // from its arrival; zero: there is none yet
  StageTimes stages;
  absl::Time last_emit;
  std::optional<absl::Time> parked_since;

  bool in_batch() const { return state == State::kRunning || state == State::kPreempting; }
  int64_t total() const { return prompt_length + max_tokens; }
  bool wants_token() const { return length < total(); }
};

}  // namespace sluice
