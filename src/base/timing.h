// Timing, huge-page memory and a crew of spinning threads, for benches and for the calibration at a
// node's start.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace sluice {

// Zeroed memory, aligned to 2 MiB, on huge pages where the system has them.
class HugeBuffer {
 public:
  explicit HugeBuffer(size_t bytes);
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  size_t bytes_;
  void* data_;
};

// A crew of `count` threads, including the caller, that run one job at a time and spin between
// jobs. It measures the cost of kernels without the cost of waking threads.
class Crew {
 public:
  explicit Crew(int count);
  ~Crew();
  int count() const { return count_; }
  // Calls job(index) for every index in [0, count()) and returns when all calls have returned.
  void Run(const std::function<void(int)>& job);

 private:
  void Work(int index);

  const int count_;
  std::atomic<const std::function<void(int)>*> job_{nullptr};
  std::atomic<uint64_t> round_{0};
  std::atomic<int> running_{0};
  std::atomic<bool> ending_{false};
  std::vector<std::thread> threads_;
};

// Seconds that one call takes.
struct Timing {
  double median = 0;
  double low = 0;   // 10th percentile
  double high = 0;  // 90th percentile
  int samples = 0;
};

// Returns the median and percentiles of measured values, which are seconds unless the caller says
// otherwise. REQUIRES: `values` is not empty.
Timing TimingOf(std::vector<double> values);

// Times `call` for about `seconds` and at least 5 times, after one call that does not count. Calls
// shorter than 50 us are timed in batches.
Timing Measure(double seconds, const std::function<void()>& call);

// Returns the seconds in which the crew reads the first `bytes` bytes of `buffer` once; each thread
// reads its own part.
Timing MeasureRead(Crew& crew, const HugeBuffer& buffer, size_t bytes, double seconds);

}  // namespace sluice
