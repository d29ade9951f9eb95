// Addresses as people write them: host:port, [::1]:port. Pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace sluice {

struct HostPort {
  std::string host;  // without brackets
  uint16_t port = 0;
  // "127.0.0.1:7000", "[::1]:7000".
  std::string ToString() const;
};

// INVALID_ARGUMENT (without naming a field) saying what was expected: a host name or an address of
// at most 253 bytes, a colon, a port of 0 to 65535.
absl::StatusOr<HostPort> ParseHostPort(const std::string& text);

}  // namespace sluice
