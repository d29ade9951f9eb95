// The flags of sluice-link-bench, its two processes, and the caches that go from one to the other.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/device/device.h"
#include "src/device/rank_group.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"

namespace sluice::bench {

// The ranks of the two processes.
inline constexpr int kReader = 0, kSource = 1;
inline constexpr int kHeads = 8;
inline constexpr size_t kChunkBytes = size_t{8} << 20;

struct Flags {
  std::string device = "cpu";
  int tokens = 2048;
  int message_mib = 8;
  std::vector<std::string> devices;
  int rounds = 3;
  std::string part;  // empty: all
  int ranks = 1;     // that divide the reader's caches
};

// Returns the fingerprint of the caches' model.
const std::string& Fingerprint();
// Returns the layout of Llama-3-8B's caches in bf16, or of one of several ranks' part of them.
CacheLayout Layout(int ranks = 1);

// Prints the median and the spread of a transfer of `bytes` bytes.
void Print(const char* what, size_t bytes, std::vector<absl::Duration> times);

// The processes tell each other this, in memory that both see.
struct Box {
  std::atomic<int> step[2];
  char text[2048];
};

// One of the two processes.
class Process {
 public:
  // All that is pointed to outlives the process object. `options` are those of two ranks.
  Process(const Flags* flags, RankGroupOptions options, Device* device, Box* box);

  const Flags& flags() const { return flags_; }
  const RankGroupOptions& options() const { return options_; }
  Device& device() const { return device_; }
  bool sends() const { return options_.rank == kSource; }

  // Both processes come here.
  void Meet();
  // Leaves a text, which both can read after they have met. REQUIRES: it has less than 2 KiB.
  void Leave(const std::string& text);
  std::string Left() const { return box_.text; }

  // Times `once` between two meetings, in the process that receives.
  absl::Status Time(const char* what, size_t bytes, const std::function<absl::Status()>& once);

 private:
  const Flags& flags_;
  const RankGroupOptions options_;
  Device& device_;
  Box& box_;
};

// The host cache of the reader: a pool for each rank, with room for one prompt.
using Home = std::vector<std::unique_ptr<PagePool>>;
absl::StatusOr<Home> NewHome(const Flags& flags, Device& device);
// Returns options of a table whose transfers lie in `home`, which outlives it.
TransferTable::Options TableOptions(const Flags& flags, const Home& home);

// The parts of the bench. Both processes run each, and the one that reads prints the figures.
absl::Status TimeLink(Process& process);
absl::Status TimePulls(Process& process);
absl::Status TimePushes(Process& process);

}  // namespace sluice::bench
