// The CRC-32C of a stretch of memory, for caches that arrive in HBM.
//
// A checksum is a sum (exclusive or) over words: the word that has n words behind it counts times
// x^(32 (n + 1)), modulo the polynomial. Zeros in front change nothing, so the bytes are taken as
// the end of whole segments. In a segment thread t of T sums words t, t + T, ..., which it reads
// beside its neighbours, and multiplies by x^(32 T) from one to the next: four lookups in tables of
// shared memory. The segment's sum counts times a power for the segments behind it. What the
// initial value of the register adds is a term of its own.
//
// Floor: the bytes, read once. Not measured yet on a GPU.
#include "kernels/cuda/common/crc32c.h"
#include "kernels/cuda/common/launch.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWordsOfThread = 32;
constexpr int64_t kSegmentWords = int64_t{kThreads} * kWordsOfThread;
constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected: bit 31 is x^0
constexpr uint32_t kOne = uint32_t{1} << 31;

// Returns a * b modulo the polynomial.
__host__ __device__ constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit) {
    product ^= b & (0u - ((a >> bit) & 1));
    b = (b >> 1) ^ (kPolynomial & (0u - (b & 1)));
  }
  return product;
}

// Returns x^(8 bytes) modulo the polynomial.
__host__ __device__ constexpr uint32_t PowerOf(int64_t bytes) {
  uint32_t power = kOne >> 8, result = kOne;
  for (; bytes > 0; bytes >>= 1) {
    if ((bytes & 1) != 0) result = Multiply(power, result);
    power = Multiply(power, power);
  }
  return result;
}

// x^(32 n), 1 <= n <= kThreads
struct WordPowers {
  uint32_t of[kThreads + 1];
};
constexpr WordPowers MakeWordPowers() {
  WordPowers powers{};
  powers.of[0] = kOne;
  // A step is a multiplication by x^32, bit by bit.
  for (int n = 1; n <= kThreads; ++n) {
    uint32_t value = powers.of[n - 1];
    for (int bit = 0; bit < 32; ++bit) value = (value >> 1) ^ (kPolynomial & (0u - (value & 1)));
    powers.of[n] = value;
  }
  return powers;
}
__constant__ const WordPowers kWordPowers = MakeWordPowers();

// Returns word `index` of the bytes; the zeros before them have negative addresses.
template <bool kAligned>
__device__ __forceinline__ uint32_t WordAt(const uint8_t* data, int64_t at) {
  if (at <= -4) return 0;
  if (kAligned && at >= 0) return *reinterpret_cast<const uint32_t*>(data + at);
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    if (at + i >= 0) word |= uint32_t{data[at + i]} << (8 * i);
  }
  return word;
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    Crc32cKernel(const uint8_t* data, int64_t bytes, uint32_t* crc) {
  __shared__ uint32_t times[4][256];  // [byte of the word][its value]: times x^(32 kThreads)
  __shared__ uint32_t sum;
  WaitForPriorKernels();
  LetNextKernelStart();
  const int t = static_cast<int>(threadIdx.x);
  const uint32_t step = kWordPowers.of[kThreads];
  for (int i = 0; i < 4; ++i) times[i][t] = Multiply(static_cast<uint32_t>(t) << (8 * i), step);
  if (t == 0) sum = 0;
  __syncthreads();
  const int64_t behind = int64_t{gridDim.x} - 1 - int64_t{blockIdx.x};  // segments
  int64_t at = bytes - 4 * ((behind + 1) * kSegmentWords - t);
  uint32_t mine = 0;
#pragma unroll 8
  for (int i = 0; i < kWordsOfThread; ++i, at += 4 * kThreads) {
    mine = times[0][mine & 0xFF] ^ times[1][(mine >> 8) & 0xFF] ^ times[2][(mine >> 16) & 0xFF] ^
           times[3][mine >> 24] ^ WordAt<kAligned>(data, at);
  }
  mine = Multiply(mine, kWordPowers.of[kThreads - t]);
  mine = __reduce_xor_sync(0xFFFFFFFFu, mine);
  if (t % 32 == 0) atomicXor(&sum, mine);
  __syncthreads();
  if (t != 0) return;
  uint32_t part = Multiply(sum, PowerOf(4 * kSegmentWords * behind));
  if (blockIdx.x == 0) part ^= ~Multiply(0xFFFFFFFFu, PowerOf(bytes));
  atomicXor(crc, part);
}

}  // namespace

cudaError_t LaunchCrc32c(const void* data, int64_t bytes, uint32_t* crc, cudaStream_t stream) {
  if (bytes < 0 || bytes > (int64_t{1} << 40)) return cudaErrorInvalidValue;
  if (bytes == 0) return cudaSuccess;  // the checksum of nothing is 0
  const int64_t segments = (bytes + 4 * kSegmentWords - 1) / (4 * kSegmentWords);
  const auto* const from = static_cast<const uint8_t*>(data);
  const bool aligned = (reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(bytes)) % 4 == 0;
  return LaunchKernel(aligned ? Crc32cKernel<true> : Crc32cKernel<false>,
                      dim3(static_cast<unsigned>(segments)), dim3(kThreads), 0, stream, from, bytes,
                      crc);
}

}  // namespace sluice::kernels::cuda
