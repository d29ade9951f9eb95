// The file in which a program that is ready tells scripts its addresses.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace sluice {

struct Addresses {
  std::string listen;        // host:port
  std::string admin_listen;  // empty: none
};

// Writes {"listen": ..., "admin_listen": ..., "pid": ...} and a newline. The file appears whole.
// The error names the path.
absl::Status WriteAddressFile(const std::string& path, const Addresses& addresses);

}  // namespace sluice
