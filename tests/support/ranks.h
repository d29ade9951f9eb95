// This runs the ranks of a group for a test: as threads of this process or as processes of their
// own, on the CPU device or on a GPU that they share.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "src/device/device.h"
#include "src/device/rank_group.h"

namespace sluice::testing {

// Returns options with a name that no other test of this machine has.
RankGroupOptions RankOptions(int size);

// A rank does this; it returns "", or what was wrong. It may not use the test's assertions.
using RankBody = std::function<std::string(RankGroupOptions options)>;

// Runs every rank in a thread. Returns what was wrong with each.
std::vector<std::string> RunRankThreads(const RankGroupOptions& options, const RankBody& body);

// Runs every rank in a process of its own, and kills those that are still there after 100 seconds.
// Returns what was wrong with each: "died" if it ended otherwise than by returning. With `on_gpus`,
// rank r sees GPU r of those that this process sees, or of fewer, r modulo their number. Then each
// takes part in NCCL as if it had a host of its own, so that several may have one GPU. REQUIRES:
// this process has no other thread.
std::vector<std::string> RunRankProcesses(const RankGroupOptions& options, const RankBody& body,
                                          bool on_gpus = false);

// Returns why ranks cannot share a GPU here; empty if they can. The device is tried in a process of
// its own, since a process that has used CUDA cannot fork.
std::string WhyNoSharedGpu();

// Returns the errors that are not empty, as one text.
std::string Joined(const std::vector<std::string>& errors);

}  // namespace sluice::testing
