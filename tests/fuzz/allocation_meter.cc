#include "tests/fuzz/allocation_meter.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<size_t> live{0};
std::atomic<size_t> peak{0};
size_t base = 0;

void* Count(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  const size_t now = live.fetch_add(malloc_usable_size(memory)) + malloc_usable_size(memory);
  size_t seen = peak.load();
  while (seen < now && !peak.compare_exchange_weak(seen, now)) {
  }
  return memory;
}

void Release(void* memory) {
  if (memory == nullptr) return;
  live.fetch_sub(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

// The other forms of the standard library call these.
void* operator new(size_t bytes) { return Count(std::malloc(std::max<size_t>(bytes, 1))); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  const auto align = static_cast<size_t>(alignment);
  return Count(std::aligned_alloc(align, (std::max<size_t>(bytes, 1) + align - 1) / align * align));
}
void operator delete(void* memory) noexcept { Release(memory); }
void operator delete(void* memory, size_t) noexcept { Release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { Release(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { Release(memory); }

namespace sluice::fuzz {

AllocationMeter::AllocationMeter() {
  base = live.load();
  peak.store(base);
}

size_t AllocationMeter::peak_bytes() const { return peak.load() - base; }

}  // namespace sluice::fuzz
