// This is about the ranks of a node (tensor_parallel or expert_parallel above 1): their settings,
// how they meet, and the ranks that follow the first.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/device/cpu_topology.h"
#include "src/device/device.h"
#include "src/device/rank_channel.h"
#include "src/device/rank_group.h"
#include "src/device/shared_arenas.h"
#include "src/engine/rank_rows.h"
#include "src/model/model.h"
#include "src/server/cache_sizes.h"
#include "src/server/signals.h"
#include "src/service/access/tls_files.h"
#include "src/service/ranks/rank_link.h"

namespace sluice {

// Returns how many ranks divide the model; 1: the node has one.
int RanksOf(const Config& config);
// Returns whether ranks divide the experts, and each has sequences of its own.
bool DividesExperts(const Config& config);
// Returns whether the ranks meet by gRPC, and not in /dev/shm (rank_transport).
bool MeetByGrpc(const Config& config);
// Returns how many ranks divide what a process finds on its host: all, or this one alone. Ranks
// that meet by gRPC at another address than a loopback one are taken to have a machine, or a
// container, each.
int RanksOfHost(const Config& config);

// Returns where a rank other than 0 listens whose setting says `address`: R ports higher where
// ranks share a host, so that they may share their settings; port 0 takes a free one.
// INVALID_ARGUMENT: it is no address.
absl::StatusOr<std::string> AddressOfRank(const Config& config, const std::string& address);

// Fills in what LeaderWorkerSet tells a pod (LWS_LEADER_ADDRESS, LWS_WORKER_INDEX), where the node
// has several ranks and the settings say nothing. INVALID_ARGUMENT: a variable is no number.
absl::Status ApplyWorkerSet(Config* config);

// Returns INVALID_ARGUMENT, naming the setting, where several ranks cannot run so. Turns
// speculation auto into none.
absl::Status CheckRanks(Config* config);

// Returns the ids of the rank's share of `cpus`, ascending; neighbours among ranks share a NUMA
// node, and no core is divided where there are enough. Returns nothing where there are fewer cpus
// than ranks.
std::vector<int> CpusOfRank(std::vector<Cpu> cpus, int rank, int ranks);
// Leaves this thread, and those that it starts, the rank's share of the cpus, so that ranks of a
// host do not compute on each other's. Where there are fewer cpus than ranks, a rank computes with
// one thread unless `threads` says otherwise.
void DivideCpus(Config* config);
// Leaves a rank its share of the host's memory, as of its cpus, and of /dev/shm where DRAM lies
// there.
void DivideMemory(const Config& config, MemoryFound* found);

// A rank has these beside what a node has that is alone.
struct NodeRanks {
  std::unique_ptr<RankChannel> channel;
  RankLink* link = nullptr;              // the channel, where ranks meet by gRPC
  std::unique_ptr<SharedArenas> arenas;  // else their DRAM, once its size is known
  std::unique_ptr<RankGroup> group;
  std::unique_ptr<RankRows> rows;  // null: every rank has a part of every sequence
};
// These guard the port at which ranks meet by gRPC. All outlive the ranks.
struct RankPort {
  TlsFiles tls;
  const Access* access = nullptr;
  AccessLog* access_log = nullptr;
};
// Waits for the other ranks, and has rank 0 tell them its settings: on the others `config` is then
// rank 0's, but for what is a rank's own. Returns the errors of HostRanks::Join or RankLink::Join,
// and of Device::JoinRanks.
absl::StatusOr<NodeRanks> JoinNodeRanks(Config* config, Device* device, const RankPort& port);
// Has rank 0 tell the others its settings, or takes them over.
absl::Status ShareSettings(RankChannel& channel, Config* config);
// Writes the rank's file of expert_load_out, if that is set. A failure is logged. REQUIRES: no step
// is under way.
void LeaveExpertLoad(const Config& config, const Model& model);
// Has every rank compare its model, and where that has experts, with rank 0's. INVALID_ARGUMENT: it
// has another one.
absl::Status CompareModels(RankChannel& channel, const Model& model);
// Makes the DRAM of all ranks, which have to call it at the same time. REQUIRES: dram_bytes is a
// number, the same on every rank.
absl::StatusOr<std::unique_ptr<SharedArenas>> MakeArenas(RankChannel& channel,
                                                         const Config& config);
// Waits until all ranks have come so far: once with their caches, and once with their recorded
// steps, since recording may take longer than a rank may keep the others waiting in a step.
absl::Status AwaitRanks(RankChannel& channel);

// Runs a rank other than 0 until rank 0 stops, which is the good end. Once it follows, signals do
// not end it: rank 0 has sequences to finish, which need every rank.
absl::Status RunFollower(Config config, Signals& signals);

}  // namespace sluice
