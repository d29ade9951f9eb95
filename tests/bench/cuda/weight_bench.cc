// Measures how long weights take to reach the GPU.
//
//   sluice-weight-bench [FILE [GIB [PARAMETERS]]]
//
// It writes a file of GIB GiB (4), loads it as a checkpoint's matrices are loaded, beside plain
// reads of the same file by as many threads, and makes PARAMETERS (8.2) 10^9 weights by formula.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "src/device/cuda/cuda_device.h"
#include "src/device/kernel_set.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int32_t kColumns = 8192;
constexpr int32_t kRows = 16384;  // rows of a matrix: 256 MiB
constexpr size_t kMatrixBytes = size_t{2} * kColumns * kRows;
constexpr size_t kPiece = size_t{4} << 20;
constexpr int kReaders = 16;

double Since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

[[noreturn]] void Fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

// Returns the seconds to read the file once by read(2), into memory of each thread's own.
double PlainRead(int file, size_t bytes) {
  std::atomic<size_t> next{0};
  const auto start = Clock::now();
  {
    std::vector<std::jthread> readers;
    for (int i = 0; i < kReaders; ++i) {
      readers.emplace_back([&] {
        std::vector<char> buffer(kPiece);
        for (size_t at; (at = next.fetch_add(kPiece)) < bytes;) {
          if (pread(file, buffer.data(), kPiece, static_cast<off_t>(at)) < 0) Fail("pread");
        }
      });
    }
  }
  return Since(start);
}

}  // namespace

int main(int argc, char** argv) {
  const char* path = argc > 1 ? argv[1] : "weight_bench.tmp";
  const int gib = argc > 2 ? std::atoi(argv[2]) : 4;
  const double parameters = (argc > 3 ? std::atof(argv[3]) : 8.2) * 1e9;
  auto device = sluice::NewCudaDevice();
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", std::string(device.status().message()).c_str());
    return 1;
  }
  sluice::KernelSet& kernels = (*device)->kernels();
  const size_t matrices = static_cast<size_t>(gib) * 4;
  const size_t bytes = matrices * kMatrixBytes;
  const int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
  if (file < 0) Fail(path);
  const std::vector<char> pattern(kPiece, 0x3C);
  for (size_t at = 0; at < bytes; at += kPiece) {
    if (pwrite(file, pattern.data(), kPiece, static_cast<off_t>(at)) < 0) Fail("pwrite");
  }
  for (int round = 0; round < 3; ++round) {
    const double plain = PlainRead(file, bytes);
    void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) Fail("mmap");
    const auto start = Clock::now();
    std::vector<sluice::Weight> loaded;
    for (size_t m = 0; m < matrices; ++m) {
      const auto* data = static_cast<const uint16_t*>(mapped) + m * (kMatrixBytes / 2);
      const sluice::MatrixPart part = {data, kRows};
      loaded.push_back(*kernels.Prepare({&part, 1}, kColumns));
    }
    const double load = Since(start);
    loaded.clear();
    munmap(mapped, bytes);
    std::printf("%.1f GB: loaded in %.2f s, %.1f GB/s; read by %d threads at %.1f GB/s: %.0f %%\n",
                double(bytes) * 1e-9, load, double(bytes) * 1e-9 / load, kReaders,
                double(bytes) * 1e-9 / plain, 100 * plain / load);
  }
  unlink(path);
  const auto start = Clock::now();
  std::vector<sluice::Weight> made;
  for (double have = 0; have < parameters; have += double(kRows) * kColumns) {
    const sluice::MatrixPart part = {nullptr, kRows, {made.size(), 0.01f, 0.0f}};
    made.push_back(*kernels.Prepare({&part, 1}, kColumns));
  }
  const double seconds = Since(start);
  std::printf("%.2f 10^9 weights by formula in %.2f s\n", parameters * 1e-9, seconds);
  return 0;
}
