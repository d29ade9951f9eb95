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
  // `timed`: Since() may be asked.
  CudaEvent(DeviceHealth* health, bool timed);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  // Also once it has been pending for two minutes: then the GPU hangs, and the device has failed.
  bool Ready() const override;
  void Wait() const override;
  absl::Duration Since(const TimedEvent& earlier) const override;

 private:
  friend class CudaStream;
  DeviceHealth* const health_;
  cudaEvent_t event_ = nullptr;
  std::atomic<int64_t> recorded_at_{0};  // nanoseconds of a steady clock
};

// Once a call has failed, or the device is not healthy, nothing more is enqueued.
class CudaStream : public Stream {
 public:
  CudaStream(DeviceHealth* health, Device::StreamKind kind);
  ~CudaStream() override;  // waits for what is queued
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void Copy(void* target, const void* source, size_t bytes) override;
  void CopyBatch(const CopyOp* ops, size_t count) override;
  void Fill(void* target, uint8_t value, size_t bytes) override;
  void Record(Event& event) override;
  void WaitFor(Event& event) override;

  cudaStream_t handle() const { return stream_; }
  // Whether work may be enqueued.
  bool usable() const { return !health_->failed() && capture_error_.ok(); }
  // Takes the result of a call that enqueued `what`: a failure is the device's, or, while a program
  // is recorded, the recording's.
  void Check(cudaError_t error, const char* what);

  // What `enqueue` puts here goes into a graph instead of being run. The graph is the caller's.
  absl::StatusOr<cudaGraph_t> Capture(const std::function<void(Stream&)>& enqueue);

 private:
  // Pieces of a batch, where the kernel that copies them reads them.
  struct Pieces;
  void CopyRun(const CopyOp* ops, size_t count);
  void CopyByEngine(const CopyOp* ops, size_t count);
  void CopyByKernel(const CopyOp* ops, size_t count);
  // The older of the two lists, once it is free; null: it could not be had, and the device has
  // failed.
  Pieces* NextPieces();

  DeviceHealth* const health_;
  cudaStream_t stream_ = nullptr;
  bool capturing_ = false;
  absl::Status capture_error_;
  std::unique_ptr<Pieces> pieces_[2];  // from the first batch on
  size_t next_pieces_ = 0;
  // The arguments of one batch of the copy engine.
  std::vector<void*> targets_;
  std::vector<const void*> sources_;
  std::vector<size_t> sizes_;
};

}  // namespace sluice
