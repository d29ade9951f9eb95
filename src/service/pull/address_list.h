// Which addresses a node may call at a caller's word: hosts, networks and ports, as a setting
// names them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/service/wire/host_port.h"

namespace sluice {

class AddressList {
 public:
  // Entries with commas between them: "*" (anywhere), a name ("prefill-0"), a name's domain
  // ("*.prefill.svc"), an address ("10.0.0.7", "fd00::7") or a network ("10.0.0.0/8"). Names and
  // domains, and addresses (IPv6 in brackets), may have a port behind them: ":7000".
  // INVALID_ARGUMENT quotes the entry that is none of these.
  static absl::StatusOr<AddressList> Parse(const std::string& text);
  // Names are compared as they are written, in any case, and addresses and networks with addresses
  // alone: nothing is looked up, so that what a name means cannot change in between.
  bool Allows(const HostPort& address) const;

 private:
  struct Entry {
    std::string name;            // lower case; of a domain with its dot: ".prefill.svc"
    bool domain = false;         // with an empty name: anywhere
    std::vector<uint8_t> bytes;  // of an address, in the network's order: 4 or 16; else empty
    int bits = 0;                // of `bytes` that count
    uint16_t port = 0;           // 0: any
  };
  static bool Matches(const Entry& entry, const std::string& name,
                      const std::vector<uint8_t>& bytes, uint16_t port);

  std::vector<Entry> entries_;
};

}  // namespace sluice
