// Streams and events of the CUDA device.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "src/device/device.h"
#include "src/device/device_health.h"

namespace sluice {

class CudaEvent : public TimedEvent {
 public:
  // Since() may be called only on `timed` events.
  CudaEvent(DeviceHealth* health, bool timed);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  // Also returns true once the event has been pending for DeviceHealth::stall_limit: then the GPU
  // hangs, or another rank does, and the device has failed.
  bool Ready() const override;
  void Wait() const override;
  absl::Duration Since(const TimedEvent& earlier) const override;
  // From now on the event may be pending for any time. Somebody else then gives up the work before
  // it, which waits for another node. Comes before the event is first recorded.
  void AllowStalls() { may_stall_ = true; }

 private:
  friend class CudaStream;
  DeviceHealth* const health_;
  bool may_stall_ = false;
  cudaEvent_t event_ = nullptr;
  std::atomic<int64_t> recorded_at_{0};  // nanoseconds of a steady clock
};

// Once a call has failed, or the device is not healthy, nothing more is enqueued.
//
// A branch is a CUDA stream of its own, made at its first use. While its trunk is captured, a
// branch takes part from the first After() that orders it behind the trunk. Work that is put on it
// earlier would run at once, and so fails the recording. Branches have the higher priority, because
// their work is little and somebody waits for it. A program runs without priorities: with them a
// step of policy scout was no faster (policies/scout/README.md).
class CudaStream : public Stream {
 public:
  CudaStream(DeviceHealth* health, Device::StreamKind kind);
  ~CudaStream() override;  // waits for what is queued, also on its branches
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void Copy(void* target, const void* source, size_t bytes) override;
  void CopyBatch(const CopyOp* ops, size_t count) override;
  void Fill(void* target, uint8_t value, size_t bytes) override;
  void Record(Event& event) override;
  void WaitFor(Event& event) override;
  // A branch's branches are its trunk's.
  Stream& Branch(int number) override;
  void After(Stream& other) override;

  cudaStream_t handle() const { return stream_; }
  // A batch of small pieces is copied by a kernel that reads a list of them, kListPieces at most to
  // a list. A stream has two lists, made when they are first used, and CopyBatch waits until the
  // oldest has been read. ReserveLists makes `lists`, for a caller that must not wait for what the
  // stream waits for; none is in use then. Returns the error of the allocation.
  static constexpr size_t kListPieces = 4096;
  absl::Status ReserveLists(size_t lists);
  // Returns whether work may be enqueued.
  bool usable();
  // Takes the result of a call that enqueued `what`. A failure fails the device, or, while a
  // program is recorded, the recording.
  void Check(cudaError_t error, const char* what);

  // Puts what `enqueue` enqueues here into a graph instead of running it. The graph is the
  // caller's. INTERNAL: an operator that cannot be recorded, or a branch that was not joined.
  // REQUIRES: this stream is no branch.
  absl::StatusOr<cudaGraph_t> Capture(const std::function<void(Stream&)>& enqueue);

 private:
  // A list of pieces of a batch, in memory that the copying kernel reads.
  struct Pieces;
  explicit CudaStream(CudaStream* trunk);  // makes a branch
  void Create(int priority);
  void CopyRun(const CopyOp* ops, size_t count);
  void CopyByEngine(const CopyOp* ops, size_t count);
  void CopyByKernel(const CopyOp* ops, size_t count);
  // Returns the oldest list once it is free. Null: there was no memory for it, and the device has
  // failed.
  Pieces* NextPieces();

  DeviceHealth* const health_;
  CudaStream* const trunk_;  // the stream that this is a branch of, or this
  cudaStream_t stream_ = nullptr;
  cudaEvent_t mark_ = nullptr;  // where a stream that comes After() this one begins
  std::unique_ptr<CudaStream> branches_[kBranches];
  // A trunk's fields, which also hold for its branches.
  bool capturing_ = false;
  absl::Status capture_error_;
  bool takes_part_ = false;  // whether a branch is part of the recording under way
  std::vector<std::unique_ptr<Pieces>> pieces_;
  size_t next_pieces_ = 0;
  // The arguments of one batch of the copy engine.
  std::vector<void*> targets_;
  std::vector<const void*> sources_;
  std::vector<size_t> sizes_;
};

}  // namespace sluice
