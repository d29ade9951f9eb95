#include "src/device/cuda/weight_uploader.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/cuda/cuda_memory.h"

namespace sluice {
namespace {

// Maps the pages of a file in one go: else each 64 KiB of it is a fault of its own. Errors are
// ignored: the pages then come as they are read.
void Populate(const uint8_t* data, size_t bytes) {
#ifdef MADV_POPULATE_READ
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data) / page * page;
  const auto end = reinterpret_cast<uintptr_t>(data) + bytes;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ);
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}

}  // namespace

WeightUploader::Lane::Lane(DeviceHealth* health, uint8_t* memory)
    : stream(health, Device::StreamKind::kCopy),
      staging{memory, memory + kPieceBytes},
      copied{{health, false}, {health, false}} {}

absl::StatusOr<std::unique_ptr<WeightUploader>> WeightUploader::Create(DeviceHealth* health) {
  SLUICE_ASSIGN_OR_RETURN(Buffer staging,
                          AllocatePinned(2 * kReaders * kPieceBytes, "staging of weights"));
  return std::unique_ptr<WeightUploader>(new WeightUploader(health, std::move(staging)));
}

WeightUploader::WeightUploader(DeviceHealth* health, Buffer staging)
    : staging_(std::move(staging)) {
  for (int i = 0; i < kReaders; ++i) {
    lanes_.push_back(
        std::make_unique<Lane>(health, staging_.as<uint8_t>() + 2 * kPieceBytes * size_t(i)));
  }
  for (const auto& lane : lanes_) readers_.emplace_back([this, &lane] { Read(*lane); });
}

WeightUploader::~WeightUploader() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  for (std::thread& reader : readers_) reader.join();
}

void WeightUploader::Upload(void* target, const void* source, size_t bytes) {
  absl::MutexLock lock(&mutex_);
  job_ = {static_cast<uint8_t*>(target), static_cast<const uint8_t*>(source), bytes};
  next_ = 0;
  busy_ = kReaders;
  ++jobs_;
  mutex_.Await(absl::Condition(
      +[](int* busy) { return *busy == 0; }, &busy_));
}

void WeightUploader::Read(Lane& lane) {
  for (uint64_t done = 0;;) {
    Job job;
    {
      absl::MutexLock lock(&mutex_);
      const auto work = [this, done] {
        mutex_.AssertHeld();
        return ending_ || jobs_ > done;
      };
      mutex_.Await(absl::Condition(&work));
      if (ending_) return;
      done = jobs_;
      job = job_;
    }
    CopyShare(lane, job);
    absl::MutexLock lock(&mutex_);
    --busy_;
  }
}

void WeightUploader::CopyShare(Lane& lane, const Job& job) {
  for (int turn = 0;; turn ^= 1) {
    const size_t at = next_.fetch_add(1) * kPieceBytes;
    if (at >= job.bytes) break;
    const size_t size = std::min(kPieceBytes, job.bytes - at);
    lane.copied[turn].Wait();
    Populate(job.source + at, size);
    std::memcpy(lane.staging[turn], job.source + at, size);
    lane.stream.Copy(job.target + at, lane.staging[turn], size);
    lane.stream.Record(lane.copied[turn]);
  }
  for (const CudaEvent& copied : lane.copied) copied.Wait();
}

}  // namespace sluice
