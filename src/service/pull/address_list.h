// The addresses that a node may call because a caller names them: hosts, networks and ports, as a
// setting lists them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/service/wire/host_port.h"

namespace sluice {

class AddressList {
 public:
  // Parses entries with commas between them: "*" (any address), a name ("prefill-0"), a name's
  // domain ("*.prefill.svc"), an address ("10.0.0.7", "fd00::7") or a network ("10.0.0.0/8").
  // Names, domains and addresses (IPv6 in brackets) may end with a port: ":7000". INVALID_ARGUMENT
  // quotes the entry that is none of these.
  static absl::StatusOr<AddressList> Parse(const std::string& text);
  // Returns whether an entry allows the address. Names are compared as they are written, in any
  // case, and addresses and networks only with addresses. Nothing is looked up, so that the meaning
  // of a name cannot change in between.
  bool Allows(const HostPort& address) const;

 private:
  struct Entry {
    std::string name;            // lower case; a domain has its dot: ".prefill.svc"
    bool domain = false;         // with an empty name: any address
    std::vector<uint8_t> bytes;  // the address in network order: 4 or 16 bytes; else empty
    int bits = 0;                // how many bits of `bytes` count
    uint16_t port = 0;           // 0: any port
  };
  static bool Matches(const Entry& entry, const std::string& name,
                      const std::vector<uint8_t>& bytes, uint16_t port);

  std::vector<Entry> entries_;
};

}  // namespace sluice
