// Addresses as people write them: host:port or [::1]:port. Pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace sluice {

struct HostPort {
  std::string host;  // without brackets
  uint16_t port = 0;
  // Returns "127.0.0.1:7000" or "[::1]:7000".
  std::string ToString() const;
};

// Parses a host name or address of at most 253 bytes, a colon, and a port of 0 to 65535.
// INVALID_ARGUMENT (which names no field) says what was expected.
absl::StatusOr<HostPort> ParseHostPort(const std::string& text);

// Returns whether a host to listen on stands for all addresses of the machine.
inline bool IsAnyHost(const std::string& host) { return host == "0.0.0.0" || host == "::"; }

}  // namespace sluice
