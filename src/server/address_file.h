// The file that tells scripts where a program listens, once it is ready.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace sluice {

struct Addresses {
  std::string listen;        // host:port
  std::string admin_listen;  // empty: none
};

// Writes {"listen": ..., "admin_listen": ..., "pid": ...} and a newline. Atomic: whoever sees the
// file sees all of it. The error names the path.
absl::Status WriteAddressFile(const std::string& path, const Addresses& addresses);

}  // namespace sluice
