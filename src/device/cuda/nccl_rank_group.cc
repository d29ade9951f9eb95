#include "src/device/cuda/nccl_rank_group.h"

#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "src/base/status_macros.h"
#include "src/device/cuda/cuda_stream.h"
#include "src/device/cuda/nccl.h"
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

static_assert(sizeof(ncclUniqueId) <= RankMembers::kMaxSharedBytes);

ncclDataType_t TypeOf(DType type) { return type == DType::kFloat32 ? ncclFloat32 : ncclBfloat16; }

class NcclRankGroup : public RankGroup {
 public:
  // `host` is null where the options have members.
  NcclRankGroup(const RankGroupOptions& options, std::unique_ptr<HostRanks> host, const Nccl* nccl,
                DeviceHealth* health)
      : RankGroup(options.rank, options.size),
        options_(options),
        host_(std::move(host)),
        members_(host_ != nullptr ? *host_ : *options.members),
        nccl_(*nccl),
        health_(health) {}

  ~NcclRankGroup() override {
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

  // Makes the communicator.
  absl::Status Connect() {
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

  absl::Status Register(void* data, size_t bytes) override {
    absl::MutexLock lock(&mutex_);
    if (comm_ == nullptr) return status();
    void* handle = nullptr;
    SLUICE_RETURN_IF_ERROR(Settle("a registered buffer",
                                  nccl_.register_buffer(comm_, data, bytes, &handle),
                                  options_.deadline));
    if (handle != nullptr) registered_.push_back(handle);
    return absl::OkStatus();
  }

  void Abort(const std::string& why) override {
    health_->FailWith(members_.Fail(RankLost(rank(), "gave up: " + why)));
  }
  absl::Status status() const override { return members_.failure(); }
  int alive() const override { return members_.Alive(); }

 private:
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
    Settle(CollectiveName(operation.kind), Call(cuda.handle(), operation), options_.deadline)
        .IgnoreError();
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
  const std::unique_ptr<HostRanks> host_;  // null: the ranks have met elsewhere
  RankMembers& members_;
  const Nccl& nccl_;
  DeviceHealth* const health_;

  // Guards the communicator: NCCL takes one call at a time.
  absl::Mutex mutex_;
  ncclComm_t comm_ ABSL_GUARDED_BY(mutex_) = nullptr;  // null: there is none yet, or it was aborted
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<void*> registered_ ABSL_GUARDED_BY(mutex_);
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
    SLUICE_ASSIGN_OR_RETURN(
        host, HostRanks::Join({options.name, options.rank, options.size, 0, options.join_timeout}));
  }
  health->SetStall(
      options.deadline,
      RankLost(options.rank, absl::StrCat("of '", options.name, "' waited ",
                                          absl::FormatDuration(options.deadline),
                                          " for the others, in an operation that does not end")));
  auto group = std::make_unique<NcclRankGroup>(options, std::move(host), nccl, health);
  SLUICE_RETURN_IF_ERROR(group->Connect());
  return group;
}

}  // namespace sluice
