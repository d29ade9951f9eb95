// A message has a slot of a ring in HBM at either end. The sending end fills it on its copy stream,
// unless the message is one piece of HBM, and sends it on the stream of the communicator. The
// receiving end receives into its slot, or straight into a single piece. Then it copies to the
// pieces on its copy stream, which waits for the message on the GPU. Either end computes the
// checksum on a third stream, beside that copy and while the next message moves.
//
// NCCL's kernels wait on the GPU for the other end, so nothing on the host waits but the caller,
// who looks at events until the deadline, and then aborts the communicator. That ends the kernels;
// what is behind them on the streams then runs, with bytes that nobody counts.
#include "src/device/cuda/nccl_peer_link.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/cuda/common/crc32c.h"
#include "src/base/status_macros.h"
#include "src/device/cuda/cuda_stream.h"
#include "src/device/cuda/nccl.h"

namespace sluice {
namespace {

constexpr int kReceiver = 0, kSender = 1;
constexpr absl::Duration kLook = absl::Microseconds(20);
// NCCL takes a call in tens of microseconds, and a sleep lasts longer than kLook by the system's
// own slack of some 50. At 50 GB/s a message of 8 MiB takes 170.
constexpr absl::Duration kSpin = absl::Microseconds(100);
// A batch of so many pieces is copied by a kernel.
constexpr size_t kManyPieces = 16;
// Lists of pieces (CudaStream::ReserveLists) that messages under way may have: two for each of four
// messages, of 8,192 pieces then.
constexpr size_t kLists = 8;
constexpr char kIdFront[] = "nccl:";

absl::StatusOr<ncclUniqueId> Parse(const std::string& id) {
  absl::string_view rest = id;
  if (!absl::ConsumePrefix(&rest, kIdFront)) {
    return absl::FailedPreconditionError(
        "the other end's device has links of another kind than NCCL's: run both nodes on GPUs, or "
        "with kv_transport grpc");
  }
  ncclUniqueId parsed{};
  const auto is_digit = [](unsigned char c) { return std::isxdigit(c) != 0; };
  if (rest.size() != 2 * sizeof parsed.internal ||
      !std::all_of(rest.begin(), rest.end(), is_digit)) {
    return absl::FailedPreconditionError("the link's id is no id of NCCL's");
  }
  const std::string bytes = absl::HexStringToBytes(rest);
  std::memcpy(parsed.internal, bytes.data(), bytes.size());
  return parsed;
}

class NcclPeerLink : public PeerLink {
 public:
  NcclPeerLink(const PeerLinkOptions& options, const Nccl* nccl, Device* device)
      : PeerLink(options.message_bytes, options.depth),
        options_(options),
        nccl_(*nccl),
        device_(device) {
    stream_ = NewStream(device, Device::StreamKind::kCompute);
    copies_ = NewStream(device, Device::StreamKind::kCopy);
    // A checksum is short and somebody waits for it, so that it has the priority of copies.
    checks_ = NewStream(device, Device::StreamKind::kCopy);
  }
  ~NcclPeerLink() override { Abort("it was given up"); }

  // Allocates the ring.
  absl::Status Prepare() {
    const auto depth = static_cast<size_t>(options_.depth);
    const std::string what = "messages of a link to another node";
    // The checksums lie behind the messages.
    const size_t ring = depth * SlotBytes();
    SLUICE_ASSIGN_OR_RETURN(
        hbm_, device_->Allocate(MemoryKind::kDevice, ring + depth * sizeof(uint32_t), what));
    SLUICE_ASSIGN_OR_RETURN(pinned_,
                            device_->Allocate(MemoryKind::kPinned, depth * sizeof(uint32_t), what));
    slots_.resize(depth);
    for (size_t i = 0; i < depth; ++i) {
      Slot& slot = slots_[i];
      slot.hbm = hbm_.as<uint8_t>() + i * SlotBytes();
      slot.crc = reinterpret_cast<uint32_t*>(hbm_.as<uint8_t>() + ring) + i;
      slot.host_crc = pinned_.as<uint32_t>() + i;
      for (std::unique_ptr<Event>* event : {&slot.moved, &slot.done, &slot.checked}) {
        *event = device_->NewEvent();
        // A link may wait for the other node longer than a group of ranks waits for a rank.
        static_cast<CudaEvent&>(**event).AllowStalls();
      }
    }
    SLUICE_RETURN_IF_ERROR(copies_->ReserveLists(kLists));
    return RunOnce();
  }

  absl::Status Connect(const ncclUniqueId& id) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    absl::MutexLock lock(&mutex_);
    const ncclResult_t result =
        nccl_.init(&comm_, 2, id, options_.sends ? kSender : kReceiver, &config);
    return Settle("a communicator", result, options_.join_timeout);
  }

  absl::Status Flush() override {
    for (; ended_ != begun_; ++ended_) {
      SLUICE_RETURN_IF_ERROR(AwaitSlot(SlotOf(ended_)));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<uint32_t> Sent() override { return ChecksumOfOldest(); }
  absl::StatusOr<uint32_t> Await() override { return ChecksumOfOldest(); }

  void Abort(const std::string& why) override {
    stop_.store(true);
    absl::MutexLock lock(&mutex_);
    Fail(absl::UnavailableError(absl::StrCat("the link has failed: ", why))).IgnoreError();
  }

 private:
  // Enqueues each operator that a message takes, and waits for them. CUDA loads a kernel and takes
  // memory for it when it first runs, and waits for the GPU then: if one of NCCL's kernels waited
  // there for the other end, this thread would not come to look at the deadline.
  absl::Status RunOnce() {
    std::vector<Stream::CopyOp> ops;
    for (size_t i = 0; i < kManyPieces; ++i) {
      ops.push_back({hbm_.as<uint8_t>() + 4 * i, pinned_.data(), 4});
    }
    copies_->CopyBatch(ops.data(), ops.size());
    Slot& slot = slots_.front();
    checks_->Fill(slot.crc, 0, sizeof(uint32_t));
    if (checks_->usable()) {
      checks_->Check(kernels::cuda::LaunchCrc32c(slot.hbm, 4, slot.crc, checks_->handle()),
                     "a checksum");
    }
    checks_->Copy(slot.host_crc, slot.crc, sizeof(uint32_t));
    for (CudaStream* stream : {copies_.get(), checks_.get()}) {
      stream->Record(*slot.done);
      slot.done->Wait();
    }
    return device_->Health();
  }

  struct Slot {
    uint8_t* hbm = nullptr;
    uint32_t* crc = nullptr;         // in HBM
    uint32_t* host_crc = nullptr;    // pinned
    std::unique_ptr<Event> checked;  // host_crc is there
    std::unique_ptr<Event> moved;    // the slot is filled, or the message has arrived
    std::unique_ptr<Event> done;     // the message is sent, or has landed
    std::vector<Stream::CopyOp> ops;
    bool lands = true;  // the copy to the pieces is enqueued
  };

  static std::unique_ptr<CudaStream> NewStream(Device* device, Device::StreamKind kind) {
    return std::unique_ptr<CudaStream>(static_cast<CudaStream*>(device->NewStream(kind).release()));
  }
  size_t SlotBytes() const { return (options_.message_bytes + 255) / 256 * 256; }
  Slot& SlotOf(uint64_t message) { return slots_[message % slots_.size()]; }

  // Computes the checksum of a message that `slot.moved` says is at `data`.
  void Check(Slot& slot, const uint8_t* data, size_t bytes) {
    checks_->WaitFor(*slot.moved);
    checks_->Fill(slot.crc, 0, sizeof(uint32_t));
    if (checks_->usable()) {
      checks_->Check(kernels::cuda::LaunchCrc32c(data, static_cast<int64_t>(bytes), slot.crc,
                                                 checks_->handle()),
                     "a checksum");
    }
    checks_->Copy(slot.host_crc, slot.crc, sizeof(uint32_t));
    checks_->Record(*slot.checked);
  }

  absl::StatusOr<uint32_t> ChecksumOfOldest() {
    SLUICE_CHECK(ended_ != begun_, "no message is under way");
    Slot& slot = SlotOf(ended_);
    if (!slot.lands) {
      SLUICE_RETURN_IF_ERROR(AwaitEvents(*slot.moved, *slot.checked));
      absl::MutexLock lock(&mutex_);
      SLUICE_RETURN_IF_ERROR(failure_);
      Land(slot);  // all that is on the stream of copies belongs to messages that have arrived
    }
    SLUICE_RETURN_IF_ERROR(AwaitSlot(slot));
    ++ended_;
    return *slot.host_crc;
  }

  absl::Status SendMessage(absl::Span<const Piece> pieces, size_t bytes, bool checksum) override {
    SLUICE_CHECK(options_.sends, "only the sending end of a link sends");
    SLUICE_CHECK(!checksum || begun_ - ended_ < slots_.size(),
                 "nobody asked for the last checksums");
    Slot& slot = SlotOf(begun_);
    if (begun_ - ended_ == slots_.size()) {
      SLUICE_RETURN_IF_ERROR(AwaitSlot(slot));
      ++ended_;
    }
    const uint8_t* source = slot.hbm;
    if (pieces.size() == 1 && InHbm(pieces[0].data)) {
      source = static_cast<const uint8_t*>(pieces[0].data);
    } else {
      slot.ops.clear();
      uint8_t* to = slot.hbm;
      for (const Piece& piece : pieces) {
        slot.ops.push_back({to, piece.data, piece.bytes});
        to += piece.bytes;
      }
      copies_->CopyBatch(slot.ops.data(), slot.ops.size());
    }
    copies_->Record(*slot.moved);
    stream_->WaitFor(*slot.moved);
    absl::MutexLock lock(&mutex_);
    SLUICE_RETURN_IF_ERROR(failure_);
    SLUICE_RETURN_IF_ERROR(
        Settle("sending a message",
               nccl_.send(source, bytes, ncclUint8, kReceiver, comm_, stream_->handle()),
               options_.deadline));
    stream_->Record(*slot.done);
    if (checksum) Check(slot, source, bytes);
    Begun();
    return absl::OkStatus();
  }

  absl::Status ReceiveMessage(absl::Span<const Piece> pieces, size_t bytes) override {
    SLUICE_CHECK(!options_.sends, "only the receiving end of a link receives");
    SLUICE_CHECK(begun_ - ended_ < slots_.size(), "too many messages are asked for");
    Slot& slot = SlotOf(begun_);
    const bool straight = pieces.size() == 1 && pieces[0].data != nullptr && InHbm(pieces[0].data);
    auto* const target = straight ? static_cast<uint8_t*>(pieces[0].data) : slot.hbm;
    absl::MutexLock lock(&mutex_);
    SLUICE_RETURN_IF_ERROR(failure_);
    SLUICE_RETURN_IF_ERROR(
        Settle("receiving a message",
               nccl_.receive(target, bytes, ncclUint8, kSender, comm_, stream_->handle()),
               options_.deadline));
    stream_->Record(*slot.moved);
    slot.ops.clear();
    const uint8_t* from = slot.hbm;
    for (const Piece& piece : pieces) {
      if (piece.data != nullptr && !straight) slot.ops.push_back({piece.data, from, piece.bytes});
      from += piece.bytes;
    }
    Check(slot, target, bytes);
    // CopyBatch waits for a list of an earlier message that has not arrived, as long as that takes.
    // So without a free list, or behind a message that lacks one, the copy waits for Await.
    slot.lands = false;
    if (HasLists(slot)) Land(slot);
    Begun();
    return absl::OkStatus();
  }

  static size_t ListsOf(const Slot& slot) {
    return (slot.ops.size() + CudaStream::kListPieces - 1) / CudaStream::kListPieces;
  }
  // Returns whether the copies of the messages under way are enqueued, and leave lists for
  // `slot`'s.
  bool HasLists(const Slot& slot) {
    size_t lists = ListsOf(slot);
    for (uint64_t message = ended_; message != begun_; ++message) {
      if (!SlotOf(message).lands) return false;
      lists += ListsOf(SlotOf(message));
    }
    return lists <= kLists;
  }
  // Enqueues the copy of a message that has been asked for to its pieces.
  void Land(Slot& slot) {
    copies_->WaitFor(*slot.moved);
    if (!slot.ops.empty()) copies_->CopyBatch(slot.ops.data(), slot.ops.size());
    copies_->Record(*slot.done);
    slot.lands = true;
  }

  // Counts a message. The time that it may wait begins now if nothing else is under way.
  void Begun() {
    if (begun_++ == ended_) progress_ = absl::Now();
  }

  static bool InHbm(const void* data) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
      cudaGetLastError();  // or the next launch would report it
      return false;
    }
    return attributes.type == cudaMemoryTypeDevice;
  }

  // Waits for the slot's message.
  absl::Status AwaitSlot(const Slot& slot) { return AwaitEvents(*slot.done, *slot.checked); }
  // Waits for both. The deadline counts from the last message that was done.
  absl::Status AwaitEvents(const Event& one, const Event& other) {
    while (!one.Ready() || !other.Ready()) {
      {
        absl::MutexLock lock(&mutex_);
        SLUICE_RETURN_IF_ERROR(failure_);
        ncclResult_t result = ncclSuccess;
        if (nccl_.async_error(comm_, &result) != ncclSuccess) result = ncclInternalError;
        if (result != ncclSuccess && result != ncclInProgress) {
          return Fail(Text("a message", result));
        }
        if (absl::Now() - progress_ > options_.deadline) {
          return Fail(absl::UnavailableError(
              absl::StrCat("the link failed: the other end left a message waiting for ",
                           absl::FormatDuration(options_.deadline))));
        }
      }
      absl::SleepFor(kLook);
    }
    progress_ = absl::Now();
    absl::MutexLock lock(&mutex_);
    // A message that an abort has ended is ready too, and so is everything on a GPU that has
    // failed.
    SLUICE_RETURN_IF_ERROR(failure_);
    const absl::Status health = device_->Health();
    return health.ok() ? health : Fail(absl::UnavailableError(health.message()));
  }

  absl::Status Text(const char* what, ncclResult_t result) const {
    return absl::UnavailableError(
        absl::StrCat("the link failed: NCCL: ", what, ": ", nccl_.error_string(result)));
  }

  // Waits until a call that NCCL goes on with by itself is over.
  absl::Status Settle(const char* what, ncclResult_t result, absl::Duration deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const absl::Time begin = absl::Now(), give_up = begin + deadline;
    while (result == ncclInProgress) {
      if (nccl_.async_error(comm_, &result) != ncclSuccess) result = ncclInternalError;
      if (result != ncclInProgress) break;
      if (stop_.load()) return Fail(absl::UnavailableError("the link was given up"));
      if (absl::Now() > give_up) {
        return Fail(absl::UnavailableError(absl::StrCat("the link failed: waited ",
                                                        absl::FormatDuration(deadline),
                                                        " for the other end: ", what)));
      }
      if (absl::Now() - begin > kSpin) absl::SleepFor(kLook);
    }
    return result == ncclSuccess ? absl::OkStatus() : Fail(Text(what, result));
  }

  // Aborts the communicator, and waits until nothing of the link runs. Returns the first failure.
  absl::Status Fail(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (failure_.ok()) failure_ = why;
    if (comm_ == nullptr) return failure_;
    // It is not ncclCommDestroy, which waits for the other end.
    nccl_.abort(std::exchange(comm_, nullptr));
    cudaStreamSynchronize(stream_->handle());
    cudaStreamSynchronize(copies_->handle());
    cudaStreamSynchronize(checks_->handle());
    return failure_;
  }

  const PeerLinkOptions options_;
  const Nccl& nccl_;
  Device* const device_;
  Buffer hbm_, pinned_;
  std::vector<Slot> slots_;
  std::unique_ptr<CudaStream> stream_, copies_, checks_;  // after the memory that they use
  uint64_t begun_ = 0, ended_ = 0;                        // messages so far
  absl::Time progress_;                                   // when a message was done last
  std::atomic<bool> stop_ = false;
  // Guards the communicator: NCCL takes one call at a time.
  absl::Mutex mutex_;
  ncclComm_t comm_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

class NcclPeerLinks : public PeerLinks {
 public:
  NcclPeerLinks(const Nccl* nccl, Device* device) : nccl_(nccl), device_(device) {}
  const char* transport() const override { return "nccl"; }
  absl::StatusOr<std::string> NewId() override {
    ncclUniqueId id;
    const ncclResult_t result = nccl_->get_unique_id(&id);
    if (result != ncclSuccess) {
      return absl::InternalError(absl::StrCat("NCCL: an id: ", nccl_->error_string(result)));
    }
    return absl::StrCat(kIdFront,
                        absl::BytesToHexString(absl::string_view(id.internal, sizeof id.internal)));
  }
  absl::Status CheckId(const std::string& id) const override { return Parse(id).status(); }
  absl::StatusOr<std::unique_ptr<PeerLink>> Join(const PeerLinkOptions& options) override {
    SLUICE_RETURN_IF_ERROR(CheckPeerLinkOptions(options));
    SLUICE_ASSIGN_OR_RETURN(const ncclUniqueId id, Parse(options.id));
    auto link = std::make_unique<NcclPeerLink>(options, nccl_, device_);
    SLUICE_RETURN_IF_ERROR(link->Prepare());
    SLUICE_RETURN_IF_ERROR(link->Connect(id));
    return link;
  }

 private:
  const Nccl* const nccl_;
  Device* const device_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PeerLinks>> NewNcclPeerLinks(Device* device) {
  SLUICE_ASSIGN_OR_RETURN(const Nccl* nccl, LoadNccl());
  return std::make_unique<NcclPeerLinks>(nccl, device);
}

}  // namespace sluice
