#include "src/device/latest_bytes.h"

#include <algorithm>
#include <cstring>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr int kAttempts = 16;

}  // namespace

// Words are stored with release and loaded with acquire, instead of fences, which ThreadSanitizer
// does not know. A reader that has a word of a write therefore sees the write's odd version too.
void LatestBytes::Post(absl::Span<const uint8_t> bytes) {
  SLUICE_CHECK(bytes.size() <= kMostBytes, "more than LatestBytes has room for");
  const uint32_t version = version_.load(std::memory_order_relaxed);
  version_.store(version + 1, std::memory_order_relaxed);
  bytes_.store(static_cast<uint32_t>(bytes.size()), std::memory_order_release);
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, std::min(sizeof(word), bytes.size() - at));
    words_[at / sizeof(word)].store(word, std::memory_order_release);
  }
  version_.store(version + 2, std::memory_order_release);
}

std::optional<std::vector<uint8_t>> LatestBytes::Read() const {
  std::vector<uint8_t> out;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const uint32_t version = version_.load(std::memory_order_acquire);
    if (version == 0) return std::nullopt;
    const size_t bytes = bytes_.load(std::memory_order_acquire);
    out.resize(bytes);
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
      const uint64_t word = words_[at / sizeof(word)].load(std::memory_order_acquire);
      std::memcpy(out.data() + at, &word, std::min(sizeof(word), bytes - at));
    }
    if (version % 2 == 0 && version_.load(std::memory_order_relaxed) == version) return out;
  }
  return std::nullopt;
}

}  // namespace sluice
