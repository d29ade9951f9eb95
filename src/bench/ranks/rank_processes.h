// Runs the ranks of a group as processes of this host, each of which may use a GPU.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice::bench {

// A word that the first rank tells all of them while they run, in memory that they share.
class RankSwitch {
 public:
  // RESOURCE_EXHAUSTED: there is no memory for it.
  static absl::StatusOr<std::unique_ptr<RankSwitch>> Create();
  ~RankSwitch();
  RankSwitch(const RankSwitch&) = delete;
  RankSwitch& operator=(const RankSwitch&) = delete;
  void Set(bool on);
  bool on() const;

 private:
  struct Shared;
  explicit RankSwitch(Shared* shared) : shared_(shared) {}
  Shared* const shared_;
};

// Returns the number of GPUs that a process of this one's environment sees; 0 in a build without
// CUDA. A process of its own asks, because one that has used CUDA cannot fork.
int CountGpus();

// How the ranks have their GPUs.
enum class RankGpus {
  kNone,    // they use none
  kOwn,     // each sees one alone
  kShared,  // all have the same one; they exchange through the loopback interface, which is slow
};

// A rank's work. `say` sends a line, which has no newline in it, to the parent.
using RankWork =
    std::function<absl::Status(int rank, const std::function<void(const std::string&)>& say)>;

// Runs `work` of every rank in a process of its own, and calls `on_line` with each line as it
// comes. The processes end with this one. Returns the errors of the ranks, by their numbers; one
// that ended in another way is UNAVAILABLE. REQUIRES: this process has no other thread and has not
// used CUDA.
absl::Status RunRanks(int size, RankGpus gpus, const RankWork& work,
                      const std::function<void(const std::string&)>& on_line);

}  // namespace sluice::bench
