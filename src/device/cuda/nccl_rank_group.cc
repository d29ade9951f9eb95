#include "src/device/cuda/nccl_rank_group.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/cuda/ranks/peers.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/device/cuda/cuda_memory.h"
#include "src/device/cuda/cuda_stream.h"
#include "src/device/cuda/nccl.h"
#include "src/device/cuda/peer_memory.h"
#include "src/device/host_ranks.h"

namespace sluice {
namespace {

// The watching thread looks this often.
constexpr absl::Duration kLook = absl::Milliseconds(20);
// After an error of NCCL's a rank that has ended is looked for during this time. NCCL sees a closed
// connection before the kernel has taken the process, and what it had on the GPU, apart.
constexpr absl::Duration kEnding = absl::Seconds(2);
// A rank that leaves waits this long for the others, whose last operations may still use it.
constexpr absl::Duration kLeave = absl::Seconds(2);
// A call of NCCL's may take so long until it has connected the ranks, which it does at the first
// operation of a kind.
constexpr absl::Duration kConnect = absl::Seconds(30);
// At the start NCCL moves this many times what peer memory takes, and once: it may choose another
// way for each.
constexpr size_t kAhead = 16;

static_assert(sizeof(ncclUniqueId) <= RankMembers::kMaxSharedBytes);

ncclDataType_t TypeOf(DType type) { return type == DType::kFloat32 ? ncclFloat32 : ncclBfloat16; }

class NcclRankGroup : public RankGroup {
 public:
  // `host` is null where the options have members.
  NcclRankGroup(const RankGroupOptions& options, std::unique_ptr<HostRanks> host, const Nccl* nccl,
                DeviceHealth* health)
      : RankGroup(options.rank, options.size),
        options_(options),
        two_stage_bytes_(options.two_stage_bytes.value_or(
            options.size > 2 ? kTwoStageBytes : std::numeric_limits<size_t>::max())),
        host_(std::move(host)),
        members_(host_ != nullptr ? *host_ : *options.members),
        nccl_(*nccl),
        health_(health) {}

  ~NcclRankGroup() override {
    if (peers_ != nullptr) {
      if (health_->failed()) peers_->Stop();
      peers_->Unmap();  // before the others free it
    }
    if (watch_.joinable()) {
      members_.Part(health_->failed() ? absl::ZeroDuration() : kLeave);
      {
        absl::MutexLock lock(&mutex_);
        stop_ = true;
      }
      watch_.join();
    }
    if (abort_.joinable()) abort_.join();
    absl::MutexLock lock(&mutex_);
    if (comm_ == nullptr) return;
    for (void* handle : registered_) nccl_.deregister_buffer(comm_, handle);
    // It is not ncclCommDestroy, which waits for the other ranks.
    nccl_.abort(comm_);
  }

  // Makes the communicator, and maps the memory of the other ranks if that can be done.
  absl::Status Connect() {
    SLUICE_RETURN_IF_ERROR(ConnectNccl());
    if (options_.peer_bytes == 0 || size() == 1) return absl::OkStatus();
    SLUICE_RETURN_IF_ERROR(ConnectAhead());
    if (host_ == nullptr) {
      Log(LogLevel::kInfo, "ranks that meet by gRPC exchange by NCCL alone",
          {{"group", options_.name}});
      return absl::OkStatus();
    }
    auto peers =
        PeerMemory::Make(host_.get(), reinterpret_cast<PeerMemory::Meeting*>(host_->data()),
                         static_cast<int64_t>(options_.peer_bytes) / (size() - 1));
    SLUICE_RETURN_IF_ERROR(status());
    if (!peers.ok()) {
      Log(LogLevel::kWarn, "ranks exchange by NCCL alone",
          {{"group", options_.name}, {"why", std::string(peers.status().message())}});
      return absl::OkStatus();
    }
    absl::MutexLock lock(&mutex_);
    peers_ = *std::move(peers);
    if (comm_ == nullptr) peers_->Stop();
    Log(LogLevel::kInfo, "ranks write into one another's memory", {{"group", options_.name}});
    return absl::OkStatus();
  }

  absl::Status Register(void* data, size_t bytes) override {
    PeerMemory* peers = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      if (comm_ == nullptr) return status();
      void* handle = nullptr;
      SLUICE_RETURN_IF_ERROR(Settle("a registered buffer",
                                    nccl_.register_buffer(comm_, data, bytes, &handle), kConnect));
      if (handle != nullptr) registered_.push_back(handle);
      peers = peers_.get();
    }
    if (peers == nullptr) return absl::OkStatus();
    // Other ranks may come much later, and the watching thread needs the lock meanwhile.
    const absl::Status mapped = peers->Map(data, bytes);
    SLUICE_RETURN_IF_ERROR(status());
    if (!mapped.ok()) {
      Log(LogLevel::kWarn, "ranks exchange a buffer by NCCL",
          {{"group", options_.name}, {"why", std::string(mapped.message())}});
    }
    return absl::OkStatus();
  }

  void Abort(const std::string& why) override {
    health_->FailWith(members_.Fail(RankLost(rank(), "gave up: " + why)));
  }
  absl::Status status() const override {
    SLUICE_RETURN_IF_ERROR(members_.failure());
    return health_->status();  // The watching thread tells the others a little later.
  }
  int alive() const override { return members_.Alive(); }

 private:
  absl::Status ConnectNccl() {
    ncclUniqueId id = {};
    if (rank() == 0) {
      const ncclResult_t result = nccl_.get_unique_id(&id);
      if (result != ncclSuccess) return members_.Fail(absl::InternalError(Text("an id", result)));
    }
    SLUICE_RETURN_IF_ERROR(members_.Share(
        absl::MakeSpan(reinterpret_cast<uint8_t*>(&id), sizeof(id)), options_.join_timeout));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    absl::MutexLock lock(&mutex_);
    const ncclResult_t result = nccl_.init(&comm_, size(), id, rank(), &config);
    SLUICE_RETURN_IF_ERROR(Settle("a communicator", result, options_.join_timeout));
    watch_ = std::thread([this] { Watch(); });
    return absl::OkStatus();
  }

  // Has NCCL connect the ranks for sums and gathers of prompts, which are larger than those of a
  // recorded step: it would else do so in the first prompt, for which a step's deadline is short.
  absl::Status ConnectAhead() {
    const size_t most = kAhead * options_.peer_bytes, own = static_cast<size_t>(rank());
    SLUICE_ASSIGN_OR_RETURN(const Buffer memory,
                            AllocateHbm(most * static_cast<size_t>(size()), "NCCL's first calls"));
    CudaStream stream(health_, Device::StreamKind::kCompute);
    CudaEvent done(health_, /*timed=*/false);
    {
      absl::MutexLock lock(&mutex_);
      for (const size_t bytes : {options_.peer_bytes, most}) {
        for (const Collective kind : {Collective::kAllReduce, Collective::kAllGather}) {
          if (comm_ == nullptr) return status();
          Operation op;
          op.kind = kind;
          op.in = memory.as<uint8_t>() + (kind == Collective::kAllGather ? bytes * own : 0);
          op.out = memory.data();
          op.count = static_cast<int64_t>(kind == Collective::kAllReduce ? bytes / 4 : bytes);
          if (op.count == 0) continue;
          SLUICE_RETURN_IF_ERROR(Settle(CollectiveName(kind), Call(stream.handle(), op), kConnect));
        }
      }
    }
    stream.Record(done);
    done.Wait();
    return health_->status();
  }

  std::string Text(const char* what, ncclResult_t result) const {
    return absl::StrCat("NCCL: ", what, " of '", options_.name, "': ", nccl_.error_string(result));
  }
  // Returns why the group cannot go on, or OK.
  absl::Status Trouble() const {
    SLUICE_RETURN_IF_ERROR(members_.failure());
    SLUICE_RETURN_IF_ERROR(health_->status());
    return members_.Look(options_.still_limit);
  }

  // Returns why NCCL failed: with the rank that has ended, if one has, else in NCCL's words.
  absl::Status Cause(const char* what, ncclResult_t result) const {
    for (const absl::Time end = absl::Now() + kEnding; absl::Now() < end; absl::SleepFor(kLook)) {
      SLUICE_RETURN_IF_ERROR(Trouble());
    }
    return absl::UnavailableError(Text(what, result));
  }

  // Waits until a call that NCCL goes on with by itself is over. A failure is the group's.
  absl::Status Settle(const char* what, ncclResult_t result, absl::Duration deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const absl::Time give_up = absl::Now() + deadline;
    absl::Status status;
    while (status.ok() && result == ncclInProgress) {
      if (nccl_.async_error(comm_, &result) != ncclSuccess) result = ncclInternalError;
      if (result != ncclInProgress) break;
      status = Trouble();
      if (status.ok() && absl::Now() > give_up) {
        status = RankLost(
            rank(), absl::StrCat("of '", options_.name, "' waited ", absl::FormatDuration(deadline),
                                 " for the others: ", what));
      }
      std::this_thread::yield();
    }
    if (status.ok() && result != ncclSuccess) status = Cause(what, result);
    if (!status.ok()) Fail(status);
    return status;
  }

  // Aborts the communicator, on a thread of its own: the call ends what runs on the GPU at once,
  // but does not return while there are programs with the group's operations.
  void Fail(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    health_->FailWith(members_.Fail(why));
    if (peers_ != nullptr) peers_->Stop();
    if (comm_ == nullptr) return;
    abort_ = std::thread([this, comm = std::exchange(comm_, nullptr)] { nccl_.abort(comm); });
  }

  void Watch() {
    for (;;) {
      absl::SleepFor(kLook);
      absl::MutexLock lock(&mutex_);
      if (stop_ || comm_ == nullptr) return;
      absl::Status status = Trouble();
      ncclResult_t result = ncclSuccess;
      if (status.ok() && (nccl_.async_error(comm_, &result) != ncclSuccess ||
                          (result != ncclSuccess && result != ncclInProgress))) {
        status = Cause("an operation", result);
      }
      if (!status.ok()) Fail(status);
    }
  }

  void Enqueue(Stream& stream, const Operation& operation) override {
    auto& cuda = static_cast<CudaStream&>(stream);
    if (!cuda.usable()) return;
    absl::MutexLock lock(&mutex_);
    if (comm_ == nullptr) return;
    if (std::optional<cudaError_t> launched = CallPeers(cuda.handle(), operation)) {
      return cuda.Check(*launched, CollectiveName(operation.kind));
    }
    Settle(CollectiveName(operation.kind), Call(cuda.handle(), operation), kConnect).IgnoreError();
  }

  // Enqueues an operation that goes by the ranks' memory; nothing: it goes by NCCL. Every rank
  // decides the same, since only what the contract makes equal counts.
  std::optional<cudaError_t> CallPeers(cudaStream_t stream, const Operation& op)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (peers_ == nullptr) return std::nullopt;
    if (op.kind == Collective::kAllReduce && peers_->Takes(op.count * SizeOf(op.type))) {
      kernels::PeerAllReduceParams p{};
      p.group = peers_->group();
      p.in = op.in;
      p.out = op.out;
      p.count = op.count;
      p.type = op.type;
      const int64_t bytes = op.count * SizeOf(op.type);
      const bool staged = static_cast<size_t>(bytes) >= two_stage_bytes_ &&
                          bytes >= kernels::LeastStagedPacks(size()) * kernels::kPackDataBytes;
      p.stages = staged ? 2 : 1;
      return kernels::cuda::LaunchPeerAllReduce(p, stream);
    }
    if (op.kind == Collective::kAllGather && peers_->Takes(op.count)) {
      kernels::PeerAllGatherParams p{};
      p.group = peers_->group();
      p.in = op.in;
      p.out = op.out;
      p.bytes = op.count;
      return kernels::cuda::LaunchPeerAllGather(p, stream);
    }
    if (op.kind != Collective::kAllToAll) return std::nullopt;
    const AllToAllParams& move = op.exchange;
    const int64_t block = int64_t{move.capacity} * move.unit_bytes;
    kernels::PeerAllToAllParams p{};
    if (block % 16 != 0 ||
        !peers_->Find(move.receive, static_cast<size_t>(block * size()), p.receives)) {
      return std::nullopt;
    }
    p.group = peers_->group();
    p.send = move.send;
    p.send_counts = move.send_counts;
    p.receive_counts = move.receive_counts;
    p.capacity = move.capacity;
    p.unit_bytes = move.unit_bytes;
    return kernels::cuda::LaunchPeerAllToAll(p, stream);
  }

  ncclResult_t Call(cudaStream_t stream, const Operation& op)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto count = static_cast<size_t>(op.count);
    switch (op.kind) {
      case Collective::kAllReduce:
        return nccl_.all_reduce(op.in, op.out, count, TypeOf(op.type), ncclSum, comm_, stream);
      case Collective::kAllGather:
        return nccl_.all_gather(op.in, op.out, count, ncclUint8, comm_, stream);
      case Collective::kReduceScatter:
        return nccl_.reduce_scatter(op.in, op.out, count, TypeOf(op.type), ncclSum, comm_, stream);
      case Collective::kAllToAll:
        return Exchange(stream, op.exchange);
      case Collective::kBroadcast:
        return nccl_.broadcast(op.in, op.out, count, ncclUint8, op.peer, comm_, stream);
      case Collective::kSend:
        return nccl_.send(op.in, count, ncclUint8, op.peer, comm_, stream);
      case Collective::kReceive:
        return nccl_.receive(op.out, count, ncclUint8, op.peer, comm_, stream);
    }
    return ncclInvalidArgument;
  }
  // NCCL's calls take their sizes from the host, which does not know the counts: whole blocks go.
  ncclResult_t Exchange(cudaStream_t stream, const AllToAllParams& p)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const size_t block = static_cast<size_t>(p.capacity) * static_cast<size_t>(p.unit_bytes);
    const auto* send = static_cast<const uint8_t*>(p.send);
    auto* receive = static_cast<uint8_t*>(p.receive);
    ncclResult_t result = nccl_.group_start();
    const auto also = [&result](ncclResult_t next) {
      if (result == ncclSuccess || result == ncclInProgress) result = next;
    };
    for (int other = 0; other < size(); ++other) {
      const size_t at = static_cast<size_t>(other) * block;
      also(nccl_.send(p.send_counts + other, 1, ncclInt32, other, comm_, stream));
      also(nccl_.receive(p.receive_counts + other, 1, ncclInt32, other, comm_, stream));
      also(nccl_.send(send + at, block, ncclUint8, other, comm_, stream));
      also(nccl_.receive(receive + at, block, ncclUint8, other, comm_, stream));
    }
    const ncclResult_t end = nccl_.group_end();
    also(end);
    return result;
  }

  const RankGroupOptions options_;
  const size_t two_stage_bytes_;           // of the smallest all-reduce that goes in two stages
  const std::unique_ptr<HostRanks> host_;  // null: the ranks have met elsewhere
  RankMembers& members_;
  const Nccl& nccl_;
  DeviceHealth* const health_;

  // Guards the communicator: NCCL takes one call at a time.
  absl::Mutex mutex_;
  ncclComm_t comm_ ABSL_GUARDED_BY(mutex_) = nullptr;  // null: there is none yet, or it was aborted
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<void*> registered_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<PeerMemory> peers_ ABSL_GUARDED_BY(mutex_);  // null: everything goes by NCCL
  std::thread watch_;
  std::thread abort_;  // made at most once; read by the destructor when nothing else runs
};

}  // namespace

absl::StatusOr<std::unique_ptr<RankGroup>> JoinNcclRanks(const RankGroupOptions& options,
                                                         DeviceHealth* health) {
  SLUICE_RETURN_IF_ERROR(CheckRankGroupOptions(options));
  SLUICE_ASSIGN_OR_RETURN(const Nccl* nccl, LoadNccl());
  std::unique_ptr<HostRanks> host;
  if (options.members == nullptr) {
    SLUICE_ASSIGN_OR_RETURN(host,
                            HostRanks::Join({options.name, options.rank, options.size,
                                             sizeof(PeerMemory::Meeting), options.join_timeout}));
  }
  const auto limit_stalls = [&](absl::Duration limit) {
    health->SetStall(
        limit, RankLost(options.rank,
                        absl::StrCat("of '", options.name, "' waited ", absl::FormatDuration(limit),
                                     " for the others, in an operation that does not end")));
  };
  limit_stalls(std::max(kConnect, options.deadline));
  auto group = std::make_unique<NcclRankGroup>(options, std::move(host), nccl, health);
  SLUICE_RETURN_IF_ERROR(group->Connect());
  limit_stalls(options.deadline);
  return group;
}

}  // namespace sluice
