// The server's pinned pool, for benchmarks in CUDA, which cannot include Abseil.
#pragma once

#include <cstddef>
#include <memory>

namespace sluice::bench {

class PinnedPool {
 public:
  // Ends the program on an error.
  explicit PinnedPool(size_t bytes);

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  double seconds() const { return seconds_; }  // Returns the seconds that the pool took to make.

 private:
  const size_t bytes_;
  char* data_ = nullptr;
  double seconds_ = 0;
  std::shared_ptr<void> memory_;  // a Buffer
};

}  // namespace sluice::bench
