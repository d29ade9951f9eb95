#include "src/server/ranks.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/device/cpu_topology.h"
#include "src/device/kernel_set.h"
#include "src/engine/rank_follower.h"
#include "src/engine/rank_heads.h"
#include "src/server/auto_policy.h"
#include "src/server/follower_port.h"
#include "src/server/model_setup.h"
#include "src/server/policy_totals.h"
#include "src/server/rank_ingest_port.h"
#include "src/server/security.h"
#include "src/server/speculation.h"
#include "src/service/wire/host_port.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

// Ranks wait this long for one another: to start, and to load their weights.
constexpr absl::Duration kStartTime = absl::Minutes(2);
constexpr absl::Duration kLoadTime = absl::Minutes(30);
// A rank on a GPU that keeps the others waiting for so long hangs. All have recorded their steps
// before they serve, so that no step is the first to load or to compile something.
constexpr absl::Duration kGpuDeadline = absl::Seconds(4);
// This is the port in the leader's name where LeaderWorkerSet gives only its host.
constexpr char kWorkerSetPort[] = ":7900";

absl::Status Refused(const Config& config, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(
      DividesExperts(config) ? "expert_parallel: " : "tensor_parallel: ", RanksOf(config),
      " ranks ", what));
}

// Returns the name under which the ranks meet, from the leader's address and this user.
std::string MeetingName(const Config& config, const char* what) {
  std::string name = absl::StrCat("sluice-", getuid(), "-", config.leader(), "-", what);
  std::replace_if(
      name.begin(), name.end(),
      [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '_'; }, '_');
  return name;
}

bool LeaderIsLoopback(const Config& config) {
  const auto leader = ParseHostPort(config.leader());
  return leader.ok() && IsLoopback(leader->host);
}

// Checks where a rank takes caches itself.
absl::Status CheckRankIngest(const Config& config) {
  const bool advertises = !config.rank_ingest_advertise().empty();
  if (config.rank_ingest_listen().empty()) {
    if (!advertises) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "rank_ingest_advertise: needs rank_ingest_listen, the address at which the rank listens");
  }
  if (!MeetByGrpc(config)) {
    return absl::InvalidArgumentError(
        "rank_ingest_listen: ranks that share memory take their caches from rank 0: leave it out, "
        "or set rank_transport to grpc");
  }
  const auto listen = ParseHostPort(config.rank_ingest_listen());
  if (!listen.ok()) return WithMessagePrefix(listen.status(), "rank_ingest_listen");
  if (config.rank() == 0 || advertises || !IsLoopback(listen->host) || LeaderIsLoopback(config)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "rank_ingest_listen: is a loopback address, which senders on other hosts do not reach: give "
      "0.0.0.0 as its host, or rank_ingest_advertise");
}

}  // namespace

int RanksOf(const Config& config) {
  return static_cast<int>(std::max({1u, config.tensor_parallel(), config.expert_parallel()}));
}

bool DividesExperts(const Config& config) { return config.expert_parallel() > 1; }

bool MeetByGrpc(const Config& config) {
  if (RanksOf(config) == 1) return false;
  if (config.rank_transport() != "auto") return config.rank_transport() == "grpc";
  return !LeaderIsLoopback(config);
}

int RanksOfHost(const Config& config) {
  return MeetByGrpc(config) && !LeaderIsLoopback(config) ? 1 : RanksOf(config);
}

absl::StatusOr<std::string> AddressOfRank(const Config& config, const std::string& address) {
  SLUICE_ASSIGN_OR_RETURN(HostPort at, ParseHostPort(address));
  if (at.port != 0 && RanksOfHost(config) > 1) {
    at.port = static_cast<uint16_t>(at.port + config.rank());
  }
  return at.ToString();
}

absl::Status ApplyWorkerSet(Config* config) {
  if (RanksOf(*config) == 1 || !config->leader().empty()) return absl::OkStatus();
  const char* leader = std::getenv("LWS_LEADER_ADDRESS");
  if (leader == nullptr) return absl::OkStatus();
  config->set_leader(absl::StrCat(leader, kWorkerSetPort));
  const char* index = std::getenv("LWS_WORKER_INDEX");
  if (index == nullptr || config->rank() != 0) return absl::OkStatus();
  uint32_t rank = 0;
  if (!absl::SimpleAtoi(index, &rank)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank: LWS_WORKER_INDEX must be a whole number, but is '", index, "'"));
  }
  config->set_rank(rank);
  return absl::OkStatus();
}

absl::Status CheckRanks(Config* config) {
  const int ranks = RanksOf(*config);
  if (static_cast<int>(config->rank()) >= ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank: must be below tensor_parallel or expert_parallel, which is ", ranks,
                     ", but is ", config->rank()));
  }
  for (const auto& [name, set] : {std::pair{"expert_redundancy", config->expert_redundancy() > 0},
                                  {"expert_load", !config->expert_load().empty()},
                                  {"expert_load_out", !config->expert_load_out().empty()}}) {
    if (!set || DividesExperts(*config)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        name,
        ": it is for ranks that divide the experts of a model: set expert_parallel to their "
        "number, or leave it out"));
  }
  if (ranks == 1) return absl::OkStatus();
  if (DividesExperts(*config) && config->tensor_parallel() > 1) {
    return Refused(*config, "divide the experts alone: set tensor_parallel to 1");
  }
  if (config->leader().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("leader: ", ranks,
                     " ranks need a name to meet under: give each the same "
                     "host and port"));
  }
  SLUICE_RETURN_IF_ERROR(CheckRankIngest(*config));
  const std::string& policy = config->policy();
  using Names = std::vector<std::string>;
  const Names served = DividesExperts(*config)
                           ? Names{"full", "ess"}
                           : Names{"full", "scout", "recall", "hgca", "clo", "fluxion"};
  if (std::find(served.begin(), served.end(), policy) == served.end()) {
    return Refused(*config, absl::StrCat("run the policies ", absl::StrJoin(served, ", "),
                                         ", and policy is ", policy));
  }
  // A link writes to memory of every rank, which rank 0 sees on its own host alone.
  if (config->kv_transport() != "grpc" && MeetByGrpc(*config)) {
    return Refused(*config,
                   "have no links to prefill nodes where they meet by gRPC: set kv_transport to "
                   "grpc, or rank_transport to shm where the ranks share a host");
  }
  if (config->speculation() == "auto") config->set_speculation("none");
  if (DraftTokensOf(*config) > 0)
    return Refused(*config, "make no drafts: set speculation to none");
  return absl::OkStatus();
}

std::vector<int> CpusOfRank(std::vector<Cpu> cpus, int rank, int ranks) {
  const auto n = std::ssize(cpus);
  if (n < ranks) return {};
  std::sort(cpus.begin(), cpus.end(), [](const Cpu& a, const Cpu& b) {
    return std::tuple(a.node, a.core, a.id) < std::tuple(b.node, b.core, b.id);
  });
  // Shares end where a core does, unless there are fewer cores than ranks.
  const auto end_of = [&](int64_t share) {
    int64_t at = n * share / ranks;
    int64_t whole = at;
    while (whole > 0 && whole < n && cpus[size_t(whole)].core == cpus[size_t(whole) - 1].core &&
           cpus[size_t(whole)].node == cpus[size_t(whole) - 1].node) {
      --whole;
    }
    return whole > n * (share - 1) / ranks || at == 0 ? whole : at;
  };
  std::vector<int> own;
  for (int64_t i = end_of(rank); i < end_of(rank + 1); ++i) own.push_back(cpus[size_t(i)].id);
  std::sort(own.begin(), own.end());
  return own;
}

void DivideCpus(Config* config) {
  if (RanksOfHost(*config) == 1) return;
  const std::vector<int> own =
      CpusOfRank(UsableCpus(), static_cast<int>(config->rank()), RanksOfHost(*config));
  if (own.empty()) {
    if (config->threads() == 0) config->set_threads(1);
    return;
  }
  if (const absl::Status pinned = PinThisThread(own); !pinned.ok()) {
    Log(LogLevel::kWarn, "ranks share the cpus", {{"error", std::string(pinned.message())}});
    return;
  }
  Log(LogLevel::kInfo, "cpus of this rank",
      {{"rank", config->rank()}, {"cpus", FormatCpuList(own)}});
}

void DivideMemory(const Config& config, MemoryFound* found) {
  found->host.total_bytes /= RanksOfHost(config);
  found->host.available_bytes /= RanksOfHost(config);
  struct statvfs shared {};
  if (RanksOf(config) == 1 || MeetByGrpc(config)) return;
  if (statvfs("/dev/shm", &shared) != 0) return;
  found->shared_bytes = static_cast<int64_t>(shared.f_bavail) *
                        static_cast<int64_t>(shared.f_frsize) / RanksOf(config);
}

absl::Status ShareSettings(RankChannel& channel, Config* config) {
  if (channel.rank() == 0) {
    const std::string text = config->SerializeAsString();
    return channel.Send({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  }
  SLUICE_ASSIGN_OR_RETURN(const absl::Span<const uint8_t> text, channel.Receive());
  Config leaders;
  if (!leaders.ParseFromArray(text.data(), static_cast<int>(text.size()))) {
    return absl::InternalError("rank 0 sent no settings: start every rank from one build");
  }
  const auto check = [config](const char* name, uint32_t leads, uint32_t own) -> absl::Status {
    if (leads == own) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": rank 0 has ", leads, ", and rank ", config->rank(), " has ", own));
  };
  SLUICE_RETURN_IF_ERROR(
      check("tensor_parallel", leaders.tensor_parallel(), config->tensor_parallel()));
  SLUICE_RETURN_IF_ERROR(
      check("expert_parallel", leaders.expert_parallel(), config->expert_parallel()));
  leaders.set_rank(config->rank());
  leaders.set_model(config->model());
  leaders.set_device(config->device());
  leaders.set_kernels(config->kernels());
  leaders.set_threads(config->threads());
  leaders.set_admin_listen(config->admin_listen());
  leaders.set_rank_ingest_listen(config->rank_ingest_listen());
  leaders.set_rank_ingest_advertise(config->rank_ingest_advertise());
  // Hosts have certificates of their own. A rank that has none takes rank 0's files.
  if (!config->tls_cert().empty()) {
    leaders.set_tls_cert(config->tls_cert());
    leaders.set_tls_key(config->tls_key());
    leaders.set_tls_ca(config->tls_ca());
    leaders.set_access_file(config->access_file());
  }
  *config = std::move(leaders);
  return absl::OkStatus();
}

absl::Status CompareModels(RankChannel& channel, const Model& model) {
  const std::string& fingerprint = model.fingerprint();
  const std::string own = absl::StrCat(fingerprint, " ", model.expert_digest());
  if (channel.rank() == 0) {
    return channel.Send({reinterpret_cast<const uint8_t*>(own.data()), own.size()});
  }
  SLUICE_ASSIGN_OR_RETURN(const absl::Span<const uint8_t> bytes, channel.Receive());
  const std::string leads(bytes.begin(), bytes.end());
  if (leads == own) return absl::OkStatus();
  const std::string leads_model = leads.substr(0, leads.find(' '));
  if (leads_model == fingerprint) {
    return absl::InvalidArgumentError(
        absl::StrCat("expert_load: rank ", channel.rank(),
                     " has other experts than rank 0 expects: give every rank the same files"));
  }
  return absl::InvalidArgumentError(absl::StrCat("model: rank 0 has the fingerprint ", leads_model,
                                                 ", and rank ", channel.rank(), " ", fingerprint,
                                                 ": give every rank the same checkpoint"));
}

absl::StatusOr<NodeRanks> JoinNodeRanks(Config* config, Device* device, const RankPort& port) {
  NodeRanks ranks;
  RankGroupOptions group;
  group.name = MeetingName(*config, "group");
  group.rank = static_cast<int>(config->rank());
  group.size = RanksOf(*config);
  group.join_timeout = kStartTime;
  if (device->name() == "cuda") group.deadline = kGpuDeadline;
  if (MeetByGrpc(*config)) {
    RankLink::Options link;
    link.leader = config->leader();
    link.rank = group.rank;
    link.size = group.size;
    link.version = Version();
    link.join_timeout = kStartTime;
    link.tls = port.tls;
    link.access = port.access;
    link.access_log = port.access_log;
    SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<RankLink> joined, RankLink::Join(link));
    ranks.link = joined.get();
    ranks.channel = std::move(joined);
    group.members = ranks.link;
  } else {
    HostChannelOptions channel;
    channel.name = MeetingName(*config, "plans");
    channel.rank = group.rank;
    channel.size = group.size;
    channel.join_timeout = kStartTime;
    SLUICE_ASSIGN_OR_RETURN(ranks.channel, JoinHostChannel(channel));
  }
  SLUICE_RETURN_IF_ERROR(ShareSettings(*ranks.channel, config));
  SLUICE_ASSIGN_OR_RETURN(ranks.group, device->JoinRanks(group));
  ranks.channel->EndWith(ranks.group.get());
  if (DividesExperts(*config)) {
    ranks.rows =
        std::make_unique<RankRows>(ranks.group.get(), static_cast<int>(config->max_sequences()));
  }
  Log(LogLevel::kInfo, "ranks joined",
      {{"rank", config->rank()},
       {"ranks", group.size},
       {"transport", ranks.link == nullptr ? "shm" : "grpc"}});
  return ranks;
}

absl::StatusOr<std::unique_ptr<SharedArenas>> MakeArenas(RankChannel& channel,
                                                         const Config& config) {
  return SharedArenas::Make(channel, MeetingName(config, "dram"), config.dram_bytes(), kLoadTime);
}

absl::Status AwaitRanks(RankChannel& channel) { return channel.Meet(kLoadTime); }

void LeaveExpertLoad(const Config& config, const Model& model) {
  if (config.expert_load_out().empty()) return;
  const std::string path = ExpertLoadPath(config);
  const absl::StatusOr<ExpertLoad> load = model.CountedExpertLoad();
  const absl::Status status = load.ok() ? WriteExpertLoad(*load, path) : load.status();
  Log(status.ok() ? LogLevel::kInfo : LogLevel::kError, "expert load",
      {{"path", path}, {"status", std::string(status.message())}});
}

absl::Status RunFollower(Config config, Signals& signals) {
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, NewDevice(config));
  const TlsFiles tls = TlsFilesOf(config);
  if (tls.enabled()) SLUICE_RETURN_IF_ERROR(CheckTlsFiles(tls));
  SLUICE_ASSIGN_OR_RETURN(NodeRanks ranks, JoinNodeRanks(&config, device.get(), {tls}));
  const StepRows step = StepRowsOf(config);
  SLUICE_ASSIGN_OR_RETURN(
      const std::unique_ptr<Model> model,
      LoadModel(config, step.rows, step.logits, device.get(), ranks.group.get()));
  // The sizes of the KV caches are rank 0's.
  SLUICE_RETURN_IF_ERROR(ShareSettings(*ranks.channel, &config));
  SLUICE_RETURN_IF_ERROR(CompareModels(*ranks.channel, *model));
  if (ranks.link == nullptr) {
    SLUICE_ASSIGN_OR_RETURN(ranks.arenas, MakeArenas(*ranks.channel, config));
  }
  SLUICE_ASSIGN_OR_RETURN(const NodeMemory memory,
                          NewNodeMemory(config, *model, device.get(), ranks.arenas.get()));
  memory.dram->FollowRankZero();
  Security security;
  if (!config.admin_listen().empty() || !config.rank_ingest_listen().empty()) {
    SLUICE_ASSIGN_OR_RETURN(security, SetUpSecurity(config));
  }
  std::unique_ptr<RankIngestPort> ingest;
  std::unique_ptr<RankLink::Landing> landing;
  if (ranks.link != nullptr) {
    SLUICE_ASSIGN_OR_RETURN(ingest,
                            RankIngestPort::Open(config, security, ranks.link, memory.dram.get()));
    SLUICE_ASSIGN_OR_RETURN(
        landing, ranks.link->LandIn(*memory.dram, ingest == nullptr ? "" : ingest->advertised()));
  }
  SLUICE_RETURN_IF_ERROR(AwaitRanks(*ranks.channel));
  RankFollower::Options options;
  SLUICE_ASSIGN_OR_RETURN(
      options.part,
      HintPartOf(model->whole_config(), static_cast<int>(config.rank()), RanksOf(config)));
  options.slots = static_cast<int>(config.max_sequences());
  options.max_context = model->max_context();
  options.halves_from = static_cast<int>(config.expert_overlap());
  SLUICE_ASSIGN_OR_RETURN(
      const std::unique_ptr<RankFollower> follower,
      RankFollower::Create(options,
                           {device.get(), model.get(), memory.policy.get(), ranks.channel.get(),
                            ranks.group.get(), memory.dram.get(), ranks.rows.get()}));
  SLUICE_RETURN_IF_ERROR(AwaitRanks(*ranks.channel));
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<FollowerPort> port,
                          FollowerPort::Open(config, {device.get(), model.get(), &memory,
                                                      ranks.group.get(), &security}));
  const TotalsReporter reporter(memory.policy.get(), memory.hbm.get(), ranks.channel.get());
  Log(LogLevel::kInfo, "following",
      {{"rank", config.rank()},
       {"admin_listen", port->address()},
       {"device", device->name()},
       {"kernels", device->kernels().name()},
       {"policy", memory.policy->name()},
       {"weight_bytes", model->weight_bytes()}});
  signals.Serving();
  absl::Status status = follower->Run();
  if (status.ok()) LeaveExpertLoad(config, *model);
  Log(status.ok() ? LogLevel::kInfo : LogLevel::kError, "stopped",
      {{"rank", config.rank()}, {"status", std::string(status.message())}});
  return status;
}

}  // namespace sluice
