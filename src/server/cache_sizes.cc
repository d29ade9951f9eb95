#include "src/server/cache_sizes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "src/config/setting.h"
#include "src/config/units.h"

namespace sluice {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

// CUDA takes this for itself: recorded steps, and memory that its libraries keep.
constexpr int64_t kCudaBytes = 512 * kMiB;

// A pool aligns the pages of each kind to this.
constexpr int64_t kAlignment = 4096;

constexpr char kConfigured[] = "as configured";

int64_t NineTenths(int64_t bytes) { return bytes / 10 * 9; }

// Rounds down to whole MiB, which read well in logs. Smaller sizes stay as they are.
uint64_t Rounded(int64_t bytes) {
  return static_cast<uint64_t>(bytes < kMiB ? std::max<int64_t>(bytes, 0) : bytes / kMiB * kMiB);
}

std::string HostMemory(const MachineMemory& host) {
  return absl::StrCat("the ", ApproximateBytes(host.total_bytes), " of memory ",
                      host.limit_file.empty() ? "that the machine has"
                                              : absl::StrCat("that ", host.limit_file, " allows"));
}

// A share of the host's memory with an upper limit.
struct Share {
  int64_t divisor;
  const char* text;
  int64_t limit;
};

// Returns `on_gpu` or `on_cpu` of the host's memory. A GPU node also keeps to what is available.
CacheSize ShareOfHost(const MemoryFound& found, const Share& on_gpu, const Share& on_cpu) {
  const MachineMemory& host = found.host;
  const Share& share = found.gpu ? on_gpu : on_cpu;
  const int64_t wanted = std::min(host.total_bytes / share.divisor, share.limit);
  const int64_t available = NineTenths(host.available_bytes);
  if (found.gpu && wanted > available) {
    return {Rounded(available),
            absl::StrCat("auto: 90 % of the ", ApproximateBytes(host.available_bytes),
                         " of memory that are available")};
  }
  return {Rounded(wanted),
          absl::StrCat("auto: ", share.text, " of ", HostMemory(host), ", ",
                       FormatBytes(static_cast<uint64_t>(share.limit)), " at most")};
}

CacheSize HbmOnCpu(const MemoryFound& found) {
  constexpr Share kEighth = {8, "an eighth", kGiB};
  return ShareOfHost(found, kEighth, kEighth);
}

}  // namespace

int64_t LargestHbmBytes(const MemoryFound& found, int64_t beside_bytes) {
  return found.gpu_free_bytes - kCudaBytes - beside_bytes;
}

CacheSize DecodeHbmSize(uint64_t configured, const MemoryFound& found, int64_t beside_bytes) {
  if (configured != kAutoBytes) return {configured, kConfigured};
  if (!found.gpu) return HbmOnCpu(found);
  const int64_t wanted = NineTenths(found.gpu_free_bytes);
  const int64_t largest = LargestHbmBytes(found, beside_bytes);
  const std::string free = absl::StrCat("the ", ApproximateBytes(found.gpu_free_bytes),
                                        " of HBM that are free after the weights");
  if (wanted <= largest) return {Rounded(wanted), absl::StrCat("auto: 90 % of ", free)};
  return {Rounded(largest),
          absl::StrCat("auto: ", free, ", less ", ApproximateBytes(beside_bytes + kCudaBytes),
                       " for the batch, the policy and CUDA")};
}

CacheSize DecodeDramSize(uint64_t configured, const MemoryFound& found) {
  if (configured != kAutoBytes) return {configured, kConfigured};
  const CacheSize size = ShareOfHost(found, {2, "half", 128 * kGiB}, {4, "a quarter", 4 * kGiB});
  if (!found.shared_bytes.has_value()) return size;
  const int64_t shared = NineTenths(*found.shared_bytes);
  if (static_cast<int64_t>(size.bytes) <= shared) return size;
  return {Rounded(shared), absl::StrCat("auto: 90 % of the ", ApproximateBytes(*found.shared_bytes),
                                        " of /dev/shm that are free for each rank")};
}

CacheSize PrefillHbmSize(uint64_t configured, const MemoryFound& found, const CacheLayout& layout,
                         int64_t max_context) {
  if (configured != kAutoBytes) return {configured, kConfigured};
  const CacheSize most =
      found.gpu
          ? CacheSize{Rounded(NineTenths(found.gpu_free_bytes)),
                      absl::StrCat("auto: 90 % of the ", ApproximateBytes(found.gpu_free_bytes),
                                   " of HBM that are free after the weights")}
          : HbmOnCpu(found);
  // One block more than the prompt takes, since a pool rounds the share of each kind down.
  const int64_t tokens = max_context + layout.kinds.front().block_tokens;
  const auto prompt = static_cast<uint64_t>(layout.BytesFor(tokens) +
                                            kAlignment * static_cast<int64_t>(layout.kinds.size()));
  if (most.bytes < prompt) return most;
  return {prompt, absl::StrCat("auto: one prompt of max_context, ", max_context, " tokens")};
}

CacheSize HoldSize(uint64_t configured, const MemoryFound& found) {
  if (configured != kAutoBytes) return {configured, kConfigured};
  return ShareOfHost(found, {4, "a quarter", 64 * kGiB}, {8, "an eighth", 2 * kGiB});
}

absl::Status CheckCacheSizes(const MemoryFound& found, int64_t beside_bytes, uint64_t hbm_bytes,
                             uint64_t dram_bytes) {
  if (found.shared_bytes.has_value() && dram_bytes > static_cast<uint64_t>(*found.shared_bytes)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("dram_bytes: ", ApproximateBytes(static_cast<int64_t>(dram_bytes)),
                     " for each rank do not fit: of /dev/shm, where the DRAM of ranks lies, ",
                     ApproximateBytes(*found.shared_bytes),
                     " are free for each; give it more room, or lower --dram-bytes to ",
                     FormatBytes(Rounded(NineTenths(*found.shared_bytes)))));
  }
  if (!found.gpu) return absl::OkStatus();
  const int64_t largest = LargestHbmBytes(found, beside_bytes);
  if (largest <= 0) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "hbm_bytes: no HBM is left for KV caches: ", ApproximateBytes(found.gpu_free_bytes),
        " are free after the weights, and the batch, the policy and CUDA take ",
        ApproximateBytes(beside_bytes + kCudaBytes),
        "; lower --max-sequences, --max-context or "
        "--chunk-tokens until they take ",
        ApproximateBytes(-largest + 1),
        " less, or end what else "
        "uses the GPU"));
  }
  // CUDA may need less than is set aside for it: only what cannot fit is refused.
  const auto fits = static_cast<uint64_t>(largest + kCudaBytes);
  if (hbm_bytes > fits) {
    return absl::ResourceExhaustedError(
        absl::StrCat("hbm_bytes: ", ApproximateBytes(static_cast<int64_t>(hbm_bytes)),
                     " do not fit: ", ApproximateBytes(found.gpu_free_bytes),
                     " of HBM are free after the weights, and the batch and "
                     "the policy take ",
                     ApproximateBytes(beside_bytes), "; lower --hbm-bytes by ",
                     ApproximateBytes(static_cast<int64_t>(hbm_bytes) - largest), " to ",
                     FormatBytes(Rounded(largest)), ", or leave it at auto"));
  }
  const auto available = static_cast<uint64_t>(found.host.available_bytes);
  if (dram_bytes > available) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "dram_bytes: ", ApproximateBytes(static_cast<int64_t>(dram_bytes)), " do not fit: of ",
        HostMemory(found.host), " ", ApproximateBytes(found.host.available_bytes),
        " are available; lower --dram-bytes by ",
        ApproximateBytes(static_cast<int64_t>(dram_bytes) - NineTenths(found.host.available_bytes)),
        " to ", FormatBytes(Rounded(NineTenths(found.host.available_bytes))),
        ", or leave it at auto"));
  }
  return absl::OkStatus();
}

}  // namespace sluice
