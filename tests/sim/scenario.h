// What a seed means: the node's sizes and times, and the requests that meet it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "src/attention/policy_options.h"
#include "src/base/rng.h"
#include "src/device/sim/sim_device.h"
#include "src/engine/engine.h"
#include "tests/sim/oracle.h"

namespace sluice::sim {

// A fault planted on purpose, which some seed must report: how the simulation is itself tested.
enum class Plant {
  kNone,
  kEarlyEvents,      // an event is ready before what it marks is done
  kLostCopies,       // a copy never happens
  kChecksumSkipped,  // a corrupted chunk passes its check
  kTokenTwice,       // a token is delivered twice
  kTokenLost,        // a token is not delivered
  kEndLost,          // a stream's end is not delivered
  kEndTwice,         // or twice
  kWakeLost,         // the engine is not told that a reader made room
  kDeadlineForgotten,
  kPageLeaked,  // a page that nobody gives back
  kStrayWrite,  // a write to a page after it was given back
};

struct NodeSpec {
  Engine::Options engine;
  int64_t hbm_pages = 0;
  int64_t dram_pages = 0;
  double overcommit = 1;  // of HBM
  PolicyOptions policy;   // but for what is the node's own
  // Whether what a decode row attends to is everything, wherever it lies: then the tokens are those
  // of policy full.
  bool selects_all = true;
  // > 0: the model has latent caches, and an indexer that selects so many.
  int top_k = 0;
  int64_t longest = 0;  // tokens of the longest sequence
  absl::Duration lease;
  SimDeviceOptions device;
  absl::Duration host_time;  // most that the host takes between two turns
};

// Where the two legs of a request meet.
enum class Meeting { kById, kByKey, kLocal };

enum class Reading {
  kAtOnce,  // whenever there is something
  kNowAndThen,
  kPausing,  // at once, but for one long pause
  kNever,    // until the stream has ended
};

struct RequestSpec {
  int index = 0;
  uint64_t seed = 0;  // of its own draws
  Meeting meeting = Meeting::kById;
  std::vector<int32_t> prompt;
  uint32_t context = 0;  // handed over; 0 with kLocal
  uint32_t max_new_tokens = 0;
  std::vector<OutputToken> first;  // handed over
  SamplingParams sampling;
  Expected expected;

  absl::Duration
      generate_at;  // after the start (kByKey, kLocal), the Reserve or the Commit (kById)
  bool generate_after_commit = false;
  bool never_generates = false;
  bool generates_twice = false;
  std::optional<absl::Duration> deadline;  // after Generate
  std::optional<absl::Duration> cancel;    // after Generate
  Reading reading = Reading::kAtOnce;
  absl::Duration pause;  // kNowAndThen: between two reads
  size_t stream_capacity = 0;

  absl::Duration reserve_at;
};

struct Scenario {
  uint64_t seed = 0;
  Plant plant = Plant::kNone;
  NodeSpec node;
  std::vector<RequestSpec> requests;
  std::vector<absl::Duration> leaps_at;
  // Drains, each with the time that what runs then has left; the later sets the earlier's anew.
  struct DrainSpec {
    absl::Duration at, time;
    std::optional<absl::Duration> resume_at;
  };
  std::vector<DrainSpec> drains;
  std::optional<absl::Duration> cancel_all_at;
};

// `policy`: that of the node; empty: any.
Scenario DrawScenario(uint64_t seed, Plant plant, const std::string& policy);

// A duration in [0, most).
absl::Duration DrawDuration(SplitMix64& random, absl::Duration most);
// True once in `n`.
bool OneIn(SplitMix64& random, uint64_t n);

}  // namespace sluice::sim
