#include "tests/fuzz/allocation_meter.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// These are from <sanitizer/allocator_interface.h>, which g++ does not bring.
extern "C" {
size_t __sanitizer_get_current_allocated_bytes();
size_t __sanitizer_get_allocated_size(const volatile void* memory);
int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*, size_t),
                                              void (*free_hook)(const volatile void*));
}
// the sanitizer's allocator calls back; operators of our own would not fit it
#define SLUICE_SANITIZER_HOOKS 1
#endif

namespace {

std::atomic<size_t> live{0};
std::atomic<size_t> peak{0};
size_t base = 0;

void Count(size_t bytes) {
  const size_t now = live.fetch_add(bytes) + bytes;
  size_t seen = peak.load();
  while (seen < now && !peak.compare_exchange_weak(seen, now)) {
  }
}

#ifdef SLUICE_SANITIZER_HOOKS
void InstallHooks() {
  static const bool installed = [] {
    live.store(__sanitizer_get_current_allocated_bytes());
    return __sanitizer_install_malloc_and_free_hooks(
               [](const volatile void*, size_t bytes) { Count(bytes); },
               [](const volatile void* memory) {
                 live.fetch_sub(__sanitizer_get_allocated_size(memory));
               }) != 0;
  }();
  if (!installed) std::abort();
}
#else
void InstallHooks() {}

void* Counted(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  Count(malloc_usable_size(memory));
  return memory;
}

void Release(void* memory) {
  if (memory == nullptr) return;
  live.fetch_sub(malloc_usable_size(memory));
  std::free(memory);
}
#endif

}  // namespace

#ifndef SLUICE_SANITIZER_HOOKS
// The standard library's other forms call these.
void* operator new(size_t bytes) { return Counted(std::malloc(std::max<size_t>(bytes, 1))); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  const auto align = static_cast<size_t>(alignment);
  return Counted(
      std::aligned_alloc(align, (std::max<size_t>(bytes, 1) + align - 1) / align * align));
}
void operator delete(void* memory) noexcept { Release(memory); }
void operator delete(void* memory, size_t) noexcept { Release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { Release(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { Release(memory); }
#endif

namespace sluice::fuzz {

AllocationMeter::AllocationMeter() {
  InstallHooks();
  base = live.load();
  peak.store(base);
}

size_t AllocationMeter::peak_bytes() const { return peak.load() - base; }

}  // namespace sluice::fuzz
