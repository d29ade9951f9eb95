// Copies weights from a mapped checkpoint into HBM: several threads read into pinned staging
// memory, each with two pieces in turn, so that reading and copying overlap.
//
// Measured (H100, 16 cores, matrices of 256 MiB out of the page cache, six rounds on a host whose
// plain reads swung between 33 and 48 GB/s on 16 threads): 23-32 GB/s, 62-90 % of those reads, 66 %
// at the median. Pieces of 512 KiB and 256 KiB were slower there (24-28 and 13-20 GB/s).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "src/device/cuda/cuda_stream.h"
#include "src/device/device.h"

namespace sluice {

class WeightUploader {
 public:
  // Number of threads that read; one reads 4-5 GB/s out of the page cache, the link takes 55.
  static constexpr int kReaders = 16;
  static constexpr size_t kPieceBytes = size_t{1} << 20;

  static absl::StatusOr<std::unique_ptr<WeightUploader>> Create(DeviceHealth* health);
  ~WeightUploader();

  // Copies `bytes` from pageable memory to HBM, and returns when the copy is done. One caller at a
  // time.
  void Upload(void* target, const void* source, size_t bytes);

 private:
  // The stream and the staging memory of one reader.
  struct Lane {
    Lane(DeviceHealth* health, uint8_t* memory);
    CudaStream stream;
    uint8_t* staging[2];
    CudaEvent copied[2];
  };
  struct Job {
    uint8_t* target = nullptr;
    const uint8_t* source = nullptr;
    size_t bytes = 0;
  };
  WeightUploader(DeviceHealth* health, Buffer staging);
  void Read(Lane& lane);
  void CopyShare(Lane& lane, const Job& job);

  const Buffer staging_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  absl::Mutex mutex_;
  Job job_ ABSL_GUARDED_BY(mutex_);
  uint64_t jobs_ ABSL_GUARDED_BY(mutex_) = 0;  // number of jobs so far
  int busy_ ABSL_GUARDED_BY(mutex_) = 0;       // readers that have not finished the newest job
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<size_t> next_{0};  // first piece of the newest job that nobody has taken
  std::vector<std::thread> readers_;
};

}  // namespace sluice
