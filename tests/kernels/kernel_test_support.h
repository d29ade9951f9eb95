// Buffers with sentinels, random inputs, comparisons and the running of a path, for kernel tests.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/kernel_table.h"
#include "kernels/scalar.h"
#include "tests/kernels/cuda/cuda_path.h"
#include "tests/test_main.h"

namespace sluice::kernels {

// Holds `size` elements, 64-byte aligned, between two guards whose bytes must stay as they are.
// They start as all-ones bytes: NaN as float32 and as bf16, -1 as an integer.
template <typename T>
class Guarded {
 public:
  explicit Guarded(int64_t size)
      : size_(static_cast<size_t>(size)),
        bytes_((size_ * sizeof(T) + 63) / 64 * 64 + 2 * kGuard),
        memory_(static_cast<unsigned char*>(AllocateForPaths(bytes_))) {
    std::memset(memory_.get(), kSentinel, bytes_);
    std::memset(data(), 0xFF, size_ * sizeof(T));
  }
  Guarded(Guarded&&) = default;
  Guarded& operator=(Guarded&&) = default;

  T* data() { return reinterpret_cast<T*>(memory_.get() + kGuard); }
  const T* data() const { return reinterpret_cast<const T*>(memory_.get() + kGuard); }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  int64_t size() const { return static_cast<int64_t>(size_); }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  std::span<const T> span() const { return {data(), size_}; }

  // Returns the first byte offset, relative to the data, that was written outside it; or an empty
  // string.
  std::string Damage() const {
    const size_t end = kGuard + size_ * sizeof(T);
    for (size_t i = 0; i < bytes_; i = i + 1 == kGuard ? end : i + 1) {
      if (memory_.get()[i] == kSentinel) continue;
      return "byte " + std::to_string(static_cast<int64_t>(i) - static_cast<int64_t>(kGuard)) +
             " of a buffer of " + std::to_string(size_ * sizeof(T)) + " was written";
    }
    return "";
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr unsigned char kSentinel = 0xA5;
  struct Free {
    void operator()(unsigned char* p) const { FreeForPaths(p); }
  };
  size_t size_;
  size_t bytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

using Random = std::mt19937_64;

// Returns a value of mean 0 and deviation 1, nearly normal and within 3.47: the sum of four uniform
// numbers of 16 bits. std::normal_distribution took most of the time of many tests.
inline float NearlyNormal(Random& random) {
  const uint64_t bits = random();
  const auto sum = static_cast<int32_t>((bits & 0xFFFF) + (bits >> 16 & 0xFFFF) +
                                        (bits >> 32 & 0xFFFF) + (bits >> 48));
  return static_cast<float>(sum - 2 * 0xFFFF) * (1.7320508f / 0x1p16f);
}

inline void FillNormal(std::span<float> out, Random& random, float scale = 1.0f) {
  for (float& v : out) v = scale * NearlyNormal(random);
}

inline void FillNormal(std::span<uint16_t> out, Random& random, float scale = 1.0f) {
  for (uint16_t& v : out) v = FloatToBf16(scale * NearlyNormal(random));
}

template <typename T>
Guarded<T> NormalBuffer(int64_t size, Random& random, float scale = 1.0f) {
  Guarded<T> buffer(size);
  FillNormal(std::span<T>(buffer.data(), static_cast<size_t>(size)), random, scale);
  return buffer;
}

// Holds the given values in memory that every path reads.
template <typename T>
Guarded<T> BufferOf(std::initializer_list<T> values) {
  Guarded<T> buffer(static_cast<int64_t>(values.size()));
  std::copy(values.begin(), values.end(), buffer.data());
  return buffer;
}

inline double Value(float v) { return v; }
inline double Value(int32_t v) { return v; }
inline double Value(uint16_t v) { return Bf16ToFloat(v); }
inline double Value(uint8_t v) { return v; }

// Returns an empty string where `got` is within `relative` of `want` in L2 and no element is
// further off than 20 * relative of the largest; else the first coordinate that is off, in rows of
// `width`. `typical` is the size of elements that do not happen to cancel: a floor under both
// norms.
template <typename T>
std::string Difference(std::span<const T> got, std::span<const T> want, double relative,
                       int64_t width, double typical = 0) {
  double error2 = 0, norm2 = 0, largest = typical;
  for (size_t i = 0; i < want.size(); ++i) {
    const double w = Value(want[i]), d = Value(got[i]) - w;
    if (!std::isfinite(w)) continue;
    error2 += d * d;
    norm2 += std::max(w * w, typical * typical);
    largest = std::max(largest, std::fabs(w));
  }
  const bool l2_bad = !(std::sqrt(error2) <= relative * std::sqrt(norm2));
  const double allowed = 20 * relative * largest;
  for (size_t i = 0; i < want.size(); ++i) {
    const double w = Value(want[i]), g = Value(got[i]);
    const bool same = g == w || (std::isnan(g) && std::isnan(w));
    const double limit = l2_bad ? relative * largest : allowed;
    if (same || std::fabs(g - w) <= limit) continue;
    const int64_t at = static_cast<int64_t>(i);
    return "row " + std::to_string(at / width) + " column " + std::to_string(at % width) +
           ": got " + std::to_string(g) + ", want " + std::to_string(w) + "; relative L2 of all " +
           std::to_string(std::sqrt(error2 / (norm2 + 1e-300)));
  }
  return l2_bad ? "relative L2 " + std::to_string(std::sqrt(error2 / (norm2 + 1e-300))) : "";
}

// Returns an empty string where the bits are equal, else the first coordinate where they are not.
template <typename T>
std::string BitDifference(std::span<const T> a, std::span<const T> b, int64_t width) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) {
      const int64_t at = static_cast<int64_t>(i);
      return "row " + std::to_string(at / width) + " column " + std::to_string(at % width) +
             ": bits of " + std::to_string(Value(a[i])) + " and " + std::to_string(Value(b[i]));
    }
  }
  return "";
}

// Calls an operator for every worker, the last first: workers may come in any order.
template <typename Params>
void RunWorkers(void (*kernel)(const Params&, Worker), const Params& p, int count) {
  for (int i = count - 1; i >= 0; --i) kernel(p, {i, count});
}

// Calls an operator on one thread per worker.
template <typename Params>
void RunThreads(void (*kernel)(const Params&, Worker), const Params& p, int count) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&, i] { kernel(p, {i, count}); });
  for (std::thread& t : threads) t.join();
}

// Runs `test` with the path of that name, or marks the test as skipped.
inline void OnPath(const char* name, void (*test)(const KernelTable&, Random&)) {
  std::string why = std::string("this processor lacks the kernel path ") + name;
  const KernelTable* table =
      std::string_view(name) == "cuda" ? CudaPath(&why) : FindKernelTable(name);
  if (table == nullptr) {
    SkipTest(why);
    return;
  }
  Random random(TestSeed());
  test(*table, random);
}

// Makes one test case per path, so that paths that a machine lacks are counted one by one.
#define SLUICE_TEST_ON_EVERY_PATH(claim, test)                                  \
  TEST_CASE(claim " (portable)", "[kernels]") { OnPath("portable", test); }     \
  TEST_CASE(claim " (avx2)", "[kernels]") { OnPath("avx2", test); }             \
  TEST_CASE(claim " (avx512bf16)", "[kernels]") { OnPath("avx512bf16", test); } \
  TEST_CASE(claim " (amx)", "[kernels]") { OnPath("amx", test); }               \
  TEST_CASE(claim " (cuda)", "[kernels][cuda]") { OnPath("cuda", test); }

}  // namespace sluice::kernels
