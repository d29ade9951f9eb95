#include "src/base/rng.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "src/base/status_macros.h"

namespace sluice {

void RandomBytes(void* out, size_t bytes) {
  auto* at = static_cast<unsigned char*>(out);
  while (bytes > 0) {
    const ssize_t got = getrandom(at, bytes, 0);
    if (got < 0) {
      // An id that could be guessed, or met twice, would hand one caller another's sequence.
      SLUICE_CHECK(errno == EINTR, "getrandom: ", std::strerror(errno));
      continue;
    }
    at += got;
    bytes -= static_cast<size_t>(got);
  }
}

uint64_t RandomU64() {
  uint64_t value = 0;
  RandomBytes(&value, sizeof(value));
  return value;
}

}  // namespace sluice
