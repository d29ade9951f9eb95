// A scenario is what a seed means: the node's sizes and times, and the requests that it gets.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "src/attention/policy_options.h"
#include "src/base/rng.h"
#include "src/device/sim/sim_device.h"
#include "src/engine/engine.h"
#include "src/kv/selection_hints.h"
#include "tests/sim/oracle.h"

namespace sluice::sim {

// A fault planted on purpose, which some seed must report: this tests the simulation itself.
enum class Plant {
  kNone,
  kEarlyEvents,      // an event is ready before what it marks is done
  kLostCopies,       // a copy never happens
  kChecksumSkipped,  // a corrupted chunk passes its check
  kTokenTwice,       // a token is delivered twice
  kTokenLost,        // a token is not delivered
  kEndLost,          // a stream's end is not delivered
  kEndTwice,         // a stream's end is delivered twice
  kWakeLost,         // the engine is not told that a reader freed space
  kDeadlineForgotten,
  kPageLeaked,  // a page is never given back
  kStrayWrite,  // a write to a page after it was given back
};

// Tokens of a block, but for policy fluxion.
inline constexpr int kBlockTokens = 4;

struct NodeSpec {
  Engine::Options engine;
  int block_tokens = kBlockTokens;
  int64_t hbm_pages = 0;
  int64_t dram_pages = 0;
  double overcommit = 1;  // promises per capacity of HBM
  PolicyOptions policy;   // except the options that depend on the node
  // True: a decode row attends to everything, wherever it lies. Then the tokens are those of
  // policy full.
  bool selects_all = true;
  // > 0: the model has latent caches and an indexer that selects this many entries.
  int top_k = 0;
  int64_t longest = 0;  // length of the longest sequence, in tokens
  int64_t exact = 0;    // AttentionPolicy::exact_tokens, of a sparse policy
  // AttentionPolicy::hint_tokens and hint_queries, of a sparse policy
  int64_t hint_tokens = 0, hint_queries = 0;
  // The drafter, where engine.draft_tokens > 0: one that knows `known`, the sequences of the
  // scenario, and is often right; or the drafter of a server, which is right by chance.
  bool ngram = false;
  // Whether the model's next-token layer drafts too. Its drafts are compared with what they must
  // be, and those of the drafter are verified.
  bool device_drafts = false;
  std::vector<std::vector<int32_t>> known;
  absl::Duration lease;
  SimDeviceOptions device;
  absl::Duration host_time;  // maximum time of the host between two turns
};

// How the two legs of a request find each other.
enum class Meeting { kById, kByKey, kLocal };

enum class Reading {
  kAtOnce,  // whenever something is there
  kNowAndThen,
  kPausing,  // at once, except for one long pause
  kNever,    // not before the stream has ended
};

struct RequestSpec {
  int index = 0;
  uint64_t seed = 0;  // seed of the request's own draws
  Meeting meeting = Meeting::kById;
  std::vector<int32_t> prompt;
  uint32_t context = 0;  // tokens handed over; 0 with kLocal
  uint32_t max_new_tokens = 0;
  std::vector<OutputToken> first;  // first tokens handed over
  // Hints that change tokens, and so come with the request when it is alone, too. None: the sender
  // draws hints that change nothing.
  std::optional<SelectionHints> hints;
  SamplingParams sampling;
  Expected expected;
  // What the request gives where its rows attend to everything.
  std::vector<OutputToken> exact;

  absl::Duration
      generate_at;  // time after the start (kByKey, kLocal), the Reserve or the Commit (kById)
  bool generate_after_commit = false;
  bool never_generates = false;
  bool generates_twice = false;
  std::optional<absl::Duration> deadline;  // time after Generate
  std::optional<absl::Duration> cancel;    // time after Generate
  Reading reading = Reading::kAtOnce;
  absl::Duration pause;  // in kNowAndThen: time between two reads
  size_t stream_capacity = 0;

  absl::Duration reserve_at;
};

struct Scenario {
  uint64_t seed = 0;
  Plant plant = Plant::kNone;
  NodeSpec node;
  std::vector<RequestSpec> requests;
  std::vector<absl::Duration> leaps_at;
  // A drain, with the time that running requests then have left. A later drain replaces the time of
  // an earlier one.
  struct DrainSpec {
    absl::Duration at, time;
    std::optional<absl::Duration> resume_at;
  };
  std::vector<DrainSpec> drains;
  std::optional<absl::Duration> cancel_all_at;
};

// Draws a seed's scenario. `policy` is that of the node; empty: any.
Scenario DrawScenario(uint64_t seed, Plant plant, const std::string& policy);

// Returns a number from `low` to `high`.
int64_t Between(SplitMix64& random, int64_t low, int64_t high);
// Returns a duration in [0, most).
absl::Duration DrawDuration(SplitMix64& random, absl::Duration most);
// Returns true once in `n`.
bool OneIn(SplitMix64& random, uint64_t n);

}  // namespace sluice::sim
