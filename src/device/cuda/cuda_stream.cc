#include "src/device/cuda/cuda_stream.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/launch.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/spin_wait.h"
#include "src/device/cuda/cuda_memory.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

// The interval at which an event is asked for after the spin; a step is far longer.
constexpr std::chrono::microseconds kPoll{20};
constexpr size_t kLists = 2;  // of a stream that reserves none
// Pieces of this size and above go by the copy engine, which then fills the link by itself (128 KiB
// each: 53 GB/s either way, also beside a step, whose reads keep 93 %), where a kernel takes
// multiprocessors and bandwidth from the step. For smaller pieces a batch is bound by the cost of a
// piece (656 B: 0.7 GB/s against a kernel's 40).
constexpr size_t kLargePiece = size_t{64} << 10;
// Up to this many pieces are enqueued one by one, which is as fast.
constexpr size_t kFewPieces = 4;
// Thread blocks of that kernel, one to a multiprocessor. They fill the link beside a step that has
// the other multiprocessors.
constexpr int kCopyBlocks = 8;

std::string ErrorText(const char* what, cudaError_t error) {
  return absl::StrCat(what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
}

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

void Report(DeviceHealth* health, cudaError_t error, const char* what) {
  if (error != cudaSuccess) health->Fail(ErrorText(what, error));
}

}  // namespace

CudaEvent::CudaEvent(DeviceHealth* health, bool timed) : health_(health) {
  Report(health_, cudaEventCreateWithFlags(&event_, timed ? 0 : cudaEventDisableTiming),
         "a new event");
}

CudaEvent::~CudaEvent() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

bool CudaEvent::Ready() const {
  if (health_->failed()) return true;
  const cudaError_t error = cudaEventQuery(event_);
  if (error != cudaErrorNotReady) {
    Report(health_, error, "the work before an event");
    return true;
  }
  if (may_stall_) return false;
  const int64_t waited = Now() - recorded_at_.load(std::memory_order_relaxed);
  if (absl::Nanoseconds(waited) < health_->stall_limit()) return false;
  health_->FailStalled();
  return true;
}

void CudaEvent::Wait() const {
  const Clock::time_point start = Clock::now();
  while (!Ready()) {
    if (Clock::now() - start < kSpin) {
      CpuRelax();
    } else {
      std::this_thread::sleep_for(kPoll);
    }
  }
}

absl::Duration CudaEvent::Since(const TimedEvent& earlier) const {
  if (health_->failed()) return absl::ZeroDuration();
  float milliseconds = 0;
  Report(health_,
         cudaEventElapsedTime(&milliseconds, static_cast<const CudaEvent&>(earlier).event_, event_),
         "the time between two events");
  return absl::Milliseconds(static_cast<double>(milliseconds));
}

CudaStream::CudaStream(DeviceHealth* health, Device::StreamKind kind)
    : health_(health), trunk_(this) {
  int least = 0, greatest = 0;
  cudaDeviceGetStreamPriorityRange(&least, &greatest);
  // Copies are short and somebody waits for them; kernels fill the GPU whenever they run.
  Create(kind == Device::StreamKind::kCopy ? greatest : least);
}

CudaStream::CudaStream(CudaStream* trunk) : health_(trunk->health_), trunk_(trunk) {
  int least = 0, greatest = 0;
  cudaDeviceGetStreamPriorityRange(&least, &greatest);
  Create(greatest);
}

void CudaStream::Create(int priority) {
  Report(health_, cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority),
         "a new stream");
  Report(health_, cudaEventCreateWithFlags(&mark_, cudaEventDisableTiming), "a new event");
}

CudaStream::~CudaStream() {
  if (stream_ != nullptr) {
    if (!health_->failed()) cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  if (mark_ != nullptr) cudaEventDestroy(mark_);
}

bool CudaStream::usable() {
  if (health_->failed() || !trunk_->capture_error_.ok()) return false;
  if (!trunk_->capturing_ || trunk_ == this || takes_part_) return true;
  trunk_->capture_error_ = absl::InternalError(
      "a program's recording: a branch was used before it came after anything recorded");
  return false;
}

void CudaStream::Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  if (trunk_->capturing_) {
    if (trunk_->capture_error_.ok()) {
      trunk_->capture_error_ = absl::InternalError(ErrorText(what, error));
    }
  } else {
    Report(health_, error, what);
  }
}

Stream& CudaStream::Branch(int number) {
  SLUICE_CHECK(number >= 0 && number < kBranches);
  std::unique_ptr<CudaStream>& branch = trunk_->branches_[number];
  if (branch == nullptr) branch.reset(new CudaStream(trunk_));
  return *branch;
}

void CudaStream::After(Stream& other) {
  auto& first = static_cast<CudaStream&>(other);
  SLUICE_CHECK(first.trunk_ == trunk_, "only branches of one stream come after one another");
  if (&first == this || health_->failed() || !trunk_->capture_error_.ok()) return;
  if (trunk_->capturing_) {
    // A stream's work outside the recording is not part of the program, which runs behind all of
    // that work or beside it.
    if (&first != trunk_ && !first.takes_part_) return;
    takes_part_ = true;
  }
  Check(cudaEventRecord(first.mark_, first.stream_), "marking a branch");
  Check(cudaStreamWaitEvent(stream_, first.mark_), "waiting for a branch");
}

void CudaStream::Copy(void* target, const void* source, size_t bytes) {
  if (bytes == 0 || !usable()) return;
  Check(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream_), "a copy");
}

void CudaStream::CopyBatch(const CopyOp* ops, size_t count) {
  SLUICE_FAILPOINT_PAUSE(kKvCopy);
  for (size_t at = 0; at < count && usable(); at += kListPieces) {
    CopyRun(ops + at, std::min(kListPieces, count - at));
  }
}

struct CudaStream::Pieces {
  Pieces(DeviceHealth* health, Buffer pinned) : list(std::move(pinned)), read(health, false) {}
  static absl::StatusOr<std::unique_ptr<Pieces>> Make(DeviceHealth* health) {
    SLUICE_ASSIGN_OR_RETURN(
        Buffer list,
        AllocatePinned(kListPieces * sizeof(kernels::cuda::CopyPiece), "a batch of copies"));
    return std::make_unique<Pieces>(health, std::move(list));
  }
  Buffer list;     // kListPieces CopyPieces
  CudaEvent read;  // ready once the kernel has read the list
};

absl::Status CudaStream::ReserveLists(size_t lists) {
  pieces_.resize(lists);
  for (std::unique_ptr<Pieces>& pieces : pieces_) {
    SLUICE_ASSIGN_OR_RETURN(pieces, Pieces::Make(health_));
  }
  next_pieces_ = 0;
  return absl::OkStatus();
}

CudaStream::Pieces* CudaStream::NextPieces() {
  if (pieces_.empty()) pieces_.resize(kLists);
  std::unique_ptr<Pieces>& pieces = pieces_[next_pieces_];
  next_pieces_ = (next_pieces_ + 1) % pieces_.size();
  if (pieces == nullptr) {
    absl::StatusOr<std::unique_ptr<Pieces>> made = Pieces::Make(health_);
    if (!made.ok()) {
      health_->Fail(std::string(made.status().message()));
      return nullptr;
    }
    pieces = *std::move(made);
  }
  pieces->read.Wait();
  return pieces.get();
}

void CudaStream::CopyRun(const CopyOp* ops, size_t count) {
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += ops[i].bytes;
  // A batch cannot be captured, and a program would read the kernel's list again.
  if (trunk_->capturing_ || count <= kFewPieces) {
    for (size_t i = 0; i < count; ++i) Copy(ops[i].target, ops[i].source, ops[i].bytes);
  } else if (bytes / count >= kLargePiece) {
    CopyByEngine(ops, count);
  } else {
    CopyByKernel(ops, count);
  }
}

void CudaStream::CopyByEngine(const CopyOp* ops, size_t count) {
  targets_.clear();
  sources_.clear();
  sizes_.clear();
  for (size_t i = 0; i < count; ++i) {
    if (ops[i].bytes == 0) continue;  // the driver refuses empty pieces
    targets_.push_back(ops[i].target);
    sources_.push_back(ops[i].source);
    sizes_.push_back(ops[i].bytes);
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
  Check(cudaMemcpyBatchAsync(targets_.data(), sources_.data(), sizes_.data(), targets_.size(),
                             &attributes, &first, 1, stream_),
        "a batch of copies");
}

void CudaStream::CopyByKernel(const CopyOp* ops, size_t count) {
  Pieces* const pieces = NextPieces();
  if (pieces == nullptr) return;
  auto* list = pieces->list.as<kernels::cuda::CopyPiece>();
  int64_t used = 0;
  for (size_t i = 0; i < count; ++i) {
    if (ops[i].bytes > 0) list[used++] = {ops[i].target, ops[i].source, ops[i].bytes};
  }
  Check(kernels::cuda::LaunchCopyBatch(list, used, kCopyBlocks, stream_), "a batch of copies");
  Record(pieces->read);
}

void CudaStream::Fill(void* target, uint8_t value, size_t bytes) {
  if (bytes == 0 || !usable()) return;
  Check(cudaMemsetAsync(target, value, bytes, stream_), "a fill");
}

void CudaStream::Record(Event& event) {
  if (!usable()) return;
  auto& mark = static_cast<CudaEvent&>(event);
  mark.recorded_at_.store(Now(), std::memory_order_relaxed);
  Check(cudaEventRecord(mark.event_, stream_), "recording an event");
}

void CudaStream::WaitFor(Event& event) {
  if (!usable()) return;
  Check(cudaStreamWaitEvent(stream_, static_cast<CudaEvent&>(event).event_),
        "waiting for an event");
}

absl::StatusOr<cudaGraph_t> CudaStream::Capture(const std::function<void(Stream&)>& enqueue) {
  SLUICE_CHECK(trunk_ == this && !capturing_,
               "one program at a time, of a stream and its branches");
  // The mode is relaxed: a library may load a kernel or ask for memory on the first call.
  if (const cudaError_t error = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed);
      error != cudaSuccess) {
    return absl::InternalError(ErrorText("a program's recording", error));
  }
  capturing_ = true;
  enqueue(*this);
  capturing_ = false;
  for (const std::unique_ptr<CudaStream>& branch : branches_) {
    if (branch != nullptr) branch->takes_part_ = false;
  }
  cudaGraph_t graph = nullptr;
  const cudaError_t error = cudaStreamEndCapture(stream_, &graph);
  absl::Status status = std::exchange(capture_error_, absl::OkStatus());
  if (status.ok() && error == cudaErrorStreamCaptureUnjoined) {
    status = absl::InternalError("a program's recording: it does not end After() all its branches");
  }
  if (status.ok() && error != cudaSuccess) {
    status = absl::InternalError(ErrorText("a program's recording", error));
  }
  if (status.ok()) return graph;
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();  // clears the error, which the status holds
  return status;
}

}  // namespace sluice
