// The real engine over a device, a model and a policy, without gRPC, for the runs of a bench: hands
// over caches, of random values, zeros or computed contexts, and passes requests on. One thread
// makes and ends it; any thread may hand over.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/attention/attention_policy.h"
#include "src/bench/harness/engine_run.h"
#include "src/bench/workload/context.h"
#include "src/device/device.h"
#include "src/engine/engine.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/model/model.h"
#include "src/request/token_sink.h"

namespace sluice::bench {

// Counts tokens. Until `open` is true it has room for the first one alone: the row that chooses it
// is the prompt's last, behind which a policy makes the sequence's working set. `open` is read, and
// `on_token`, if not null, is called with each token and their count, on the engine's thread.
class CountingSink : public TokenSink {
 public:
  using OnToken = std::function<void(const OutputToken& token, int64_t count)>;
  CountingSink(const bool* open, OnToken on_token) : open_(open), on_token_(std::move(on_token)) {}
  bool HasRoom(size_t count) const override {
    return *open_ || tokens_ + static_cast<int64_t>(count) <= 1;
  }
  void Emit(OutputToken token) override {
    ++tokens_;
    if (on_token_ != nullptr) on_token_(token, tokens_);
  }
  void Finish(FinishInfo info) override {
    status_ = std::move(info.status);
    finished_.Notify();
  }
  bool ended() const { return finished_.HasBeenNotified(); }
  // REQUIRES: ended().
  const absl::Status& status() const { return status_; }
  void WaitForEnd() const { finished_.WaitForNotification(); }

 private:
  const bool* const open_;
  const OnToken on_token_;
  int64_t tokens_ = 0;
  absl::Status status_;  // Owned by the engine's thread until finished_.
  absl::Notification finished_;
};

// Tells whether a count has not changed for longer than `patience`.
class StallWatch {
 public:
  explicit StallWatch(absl::Duration patience) : patience_(patience) {}
  bool Stalled(int64_t count) {
    const absl::Time now = absl::Now();
    if (count != last_) since_ = now;
    last_ = count;
    return now - since_ > patience_;
  }

 private:
  const absl::Duration patience_;
  int64_t last_ = -1;
  absl::Time since_;
};

class EngineSession {
 public:
  // Uses the contexts, pools, patience and trace of `options`; options.context is the number of
  // tokens of the longest context. REQUIRES: as RunEngine.
  static absl::StatusOr<std::unique_ptr<EngineSession>> Create(const EngineRunOptions& options,
                                                               int slots, Device* device,
                                                               Model* model, PagePool* hbm,
                                                               AttentionPolicy* policy);

  // Hands over a context, or one of options.context tokens without computed caches if `given` is
  // null, that will grow by `new_tokens`; commits it and returns its id. `last` is the last token
  // of a prompt that is not given. RESOURCE_EXHAUSTED: DRAM has no room for it now.
  absl::StatusOr<std::string> HandOver(const Context* given, int new_tokens, ContextReader& reader,
                                       int32_t last = 1);
  // Calls hand_over(0) to hand_over(count - 1) on several threads, as peers would: contexts of
  // gigabytes then arrive in seconds. Returns the first error.
  absl::Status HandOverAll(size_t count,
                           const std::function<absl::Status(size_t, ContextReader&)>& hand_over);
  // Landed chunks of all sequences so far.
  int64_t landed() const { return landed_.load(std::memory_order_relaxed); }

  // The sequences that have a slot, those of them whose prompts are computed, and the slots whose
  // caches are warm. The engine's thread is asked, because it alone may ask the policy.
  struct Admitted {
    int running = 0, prompts_ended = 0, warm = 0;

    // Returns whether `sequences` sequences can decode at once. A slot is warm before its prompt
    // has ended too, and is not while the working set is made behind that.
    bool Decode(int sequences, int slots) const {
      return prompts_ended >= sequences && warm >= slots;
    }
    // Rises with every sequence that comes nearer to decoding.
    int progress() const { return running + prompts_ended + warm; }
  };
  Admitted AdmittedNow();

  // The flag that sinks of this session's requests take. It is false until Open().
  const bool* open() const { return &open_; }
  // Lets all sequences decode, from the same step on: the engine's thread sets the flag between two
  // steps, so that no step sees it false for one sequence and true for the next.
  void Open();

  Engine& engine() { return *engine_; }
  // Ends the engine's thread.
  void Stop() { thread_.reset(); }

 private:
  EngineSession(const EngineRunOptions& options, int slots, Device* device, Model* model,
                AttentionPolicy* policy)
      : options_(options), slots_(slots), device_(device), model_(model), policy_(policy) {}
  absl::Status Start(PagePool* hbm);

  // The payload of one kind, the same for every layer and sequence.
  struct Payload {
    std::vector<uint16_t> values;
    uint32_t crc32c = 0;
    absl::Span<const uint8_t> bytes() const {
      return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(uint16_t)};
    }
  };
  Payload PayloadOf(const CacheKind& kind) const;

  const EngineRunOptions options_;
  const int slots_;
  Device* const device_;
  Model* const model_;
  AttentionPolicy* const policy_;
  std::atomic<int64_t> landed_{0};
  bool open_ = false;              // Owned by the engine's thread.
  std::vector<Payload> payloads_;  // By kind; empty if contexts are given.
  Metrics metrics_;
  std::unique_ptr<PagePool> dram_;
  std::unique_ptr<TransferTable> transfers_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<EngineThread> thread_;
};

}  // namespace sluice::bench
