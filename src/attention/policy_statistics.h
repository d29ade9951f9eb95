// Statistics of a sparse policy since it was made, for running sequences and for those that have
// ended. Benchmarks, profiles and metrics read it; the difference between two moments is what
// happened between them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace sluice {

struct PolicyStatistics {
  // Sums over sequences. A token counts once for each KV head that selected it.
  struct Layer {
    int64_t steps = 0;     // decode rows
    int64_t selected = 0;  // tokens x KV heads that were selected, wherever they lay
    // selected tokens with no slot in HBM: the CPU attends to them, or they are fetched
    int64_t missing = 0;
    int64_t recalled = 0;  // tokens x KV heads that were given a slot in HBM
    int64_t recalls = 0;   // decode rows with a recall
    int64_t lookups = 0;  // KV heads of decode rows that asked whether an earlier selection will do
    int64_t misses = 0;   // those for which it did not
    // tokens x KV heads that heads selected whose whole cache lies in HBM; they are not in
    // `selected`
    int64_t resident_selected = 0;
    // bytes of K and V of decode rows over the link: recalled or fetched, attended to from there,
    // and written through; warm-up is not counted
    int64_t link_bytes = 0;

    // Returns the share of a budget of `budget_tokens` tokens that the CPU attends to (or that the
    // link brings).
    double Share(int64_t budget_tokens, int kv_heads) const {
      const int64_t budget = steps * budget_tokens * kv_heads;
      return budget == 0 ? 0 : static_cast<double>(missing) / static_cast<double>(budget);
    }
    // Returns the share of the selected tokens that had a slot in HBM.
    double HitRate() const {
      return selected == 0 ? 1 : 1 - static_cast<double>(missing) / static_cast<double>(selected);
    }
  };
  std::vector<Layer> layers;  // empty: the policy selects nothing; dense layers have zeros

  // Returns what came since `before`, which is of the same policy.
  PolicyStatistics Since(const PolicyStatistics& before) const {
    PolicyStatistics out = *this;
    for (size_t i = 0; i < before.layers.size(); ++i) {
      out.layers[i].steps -= before.layers[i].steps;
      out.layers[i].selected -= before.layers[i].selected;
      out.layers[i].missing -= before.layers[i].missing;
      out.layers[i].recalled -= before.layers[i].recalled;
      out.layers[i].recalls -= before.layers[i].recalls;
      out.layers[i].lookups -= before.layers[i].lookups;
      out.layers[i].misses -= before.layers[i].misses;
      out.layers[i].resident_selected -= before.layers[i].resident_selected;
      out.layers[i].link_bytes -= before.layers[i].link_bytes;
    }
    return out;
  }
};

// The schedules that a policy has chosen for its transfers and a step's compute, if it chooses any
// (policies/ess).
struct ScheduleStatistics {
  static constexpr size_t kSchedules = 3;
  static constexpr const char* kNames[kSchedules] = {"none", "da", "dba"};
  // number of layers with each schedule, in steps of the size that was last decided
  std::array<int, kSchedules> layers{};
  int64_t changes = 0;  // how often steps of a size were given other schedules
};

// How a policy's units come over the link (src/attention/offload/mover_choice.h).
struct LinkStatistics {
  static constexpr size_t kMovers = 2;
  static constexpr const char* kNames[kMovers] = {"uva", "cpu"};
  int mover = -1;  // its number; -1: the policy has no choice
  // payload of each mover, measured when the policy was made; 0: it was not measured
  std::array<double, kMovers> bytes_per_s{};
};

enum class WorkerDuty {
  kAttend,  // workers attend to tokens that are not in HBM
  kGather,  // workers gather K and V, or latent entries, that the device then fetches
};

// Statistics of the CPU workers of a policy since it was made.
struct WorkerStatistics {
  WorkerDuty duty = WorkerDuty::kAttend;
  int workers = 0;      // workers that are still alive
  absl::Duration busy;  // time spent on their duty, all workers together
  int64_t tokens = 0;   // tokens x KV heads attended to, or gathered
  // Number of times that a worker failed, died, or missed its deadline.
  int64_t failed = 0;
  int64_t left = 0;
  int64_t late = 0;
};

// The source of what a policy did and what it has chosen to do. A policy that counts nothing, has
// no workers or chooses no schedules reports empty values.
class PolicyStatisticsSource {
 public:
  virtual ~PolicyStatisticsSource() = default;

  // Returns what was selected and where it lay. REQUIRES: no step is under way, because the device
  // owns the counters until a step is done.
  virtual PolicyStatistics Statistics() const { return {}; }
  // Returns the same sums as they were some steps ago; empty if none are kept. Any thread, at any
  // time.
  virtual PolicyStatistics Recent() const { return {}; }
  // Returns what the policy's CPU workers did. Any thread, at any time.
  virtual WorkerStatistics Workers() const { return {}; }
  // Returns which schedules the policy has chosen. Any thread, at any time.
  virtual ScheduleStatistics Schedules() const { return {}; }
  // Returns how units come over the link. Any thread, at any time.
  virtual LinkStatistics Link() const { return {}; }
  // Describes, for people, the schedules of steps of `decode_rows` decode rows; empty if the policy
  // chooses none. Engine's thread, or before the engine runs.
  virtual std::string DescribeSteps(int32_t /*decode_rows*/) { return ""; }

  // Returns the bytes of policy metadata in HBM (digests, partial keys, averages) that a decode row
  // of a sequence of `tokens` tokens reads and writes in a layer that selects. Any thread.
  virtual int64_t MetadataBytes(int64_t /*tokens*/) const { return 0; }
  // Returns the same of metadata in DRAM, which CPU workers read.
  virtual int64_t HostMetadataBytes(int64_t /*tokens*/) const { return 0; }
};

}  // namespace sluice
