// Timing, memory and a spinning crew of threads for the benches.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace sluice::bench {

// Zeroed memory on huge pages where the system has them; 2 MiB aligned.
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

// `count` threads, the caller among them, that run one job at a time and spin in between: what the
// kernels cost, without what waking threads costs.
class Crew {
 public:
  explicit Crew(int count);
  ~Crew();
  int count() const { return count_; }
  // Calls job(index) for every index in [0, count()), and returns when all are done.
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

// Seconds of one call.
struct Timing {
  double median = 0;
  double low = 0;   // 10th percentile
  double high = 0;  // 90th percentile
  int samples = 0;
};

// Of values that were measured, which are seconds unless the caller says otherwise. REQUIRES: some.
Timing TimingOf(std::vector<double> values);

// Times `call` for about `seconds`, at least 5 times, after one call that does not count. Calls
// shorter than 50 us are timed in batches.
Timing Measure(double seconds, const std::function<void()>& call);

// Seconds in which the crew reads the first `bytes` bytes of `buffer` once, each thread its own
// part.
Timing MeasureRead(Crew& crew, const HugeBuffer& buffer, size_t bytes, double seconds);

}  // namespace sluice::bench
