#include "src/service/pull/address_list.h"

#include <arpa/inet.h>

#include <algorithm>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace sluice {
namespace {

// Returns the bytes of an address, or none if `host` is no address.
std::vector<uint8_t> BytesOf(const std::string& host) {
  std::vector<uint8_t> bytes(4);
  if (inet_pton(AF_INET, host.c_str(), bytes.data()) == 1) return bytes;
  bytes.resize(16);
  if (inet_pton(AF_INET6, host.c_str(), bytes.data()) != 1) return {};
  // The address ::ffff:10.0.0.7 is 10.0.0.7.
  static constexpr uint8_t kMapped[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  if (std::equal(std::begin(kMapped), std::end(kMapped), bytes.begin())) {
    bytes.erase(bytes.begin(), bytes.begin() + sizeof kMapped);
  }
  return bytes;
}

bool IsName(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isalnum(c) || c == '-' || c == '.' || c == '_';
  });
}

absl::Status NoEntry(std::string_view text, const std::string& why) {
  return absl::InvalidArgumentError(
      absl::StrCat("\"", std::string(text.substr(0, 64)), "\" ", why,
                   ": expected *, a name, *.domain, an address or a network (10.0.0.0/8)"));
}

}  // namespace

absl::StatusOr<AddressList> AddressList::Parse(const std::string& text) {
  AddressList list;
  for (const absl::string_view piece : absl::StrSplit(text, ',')) {
    const std::string written(absl::StripAsciiWhitespace(piece));
    if (written.empty()) continue;
    Entry entry;
    std::string host = written;
    if (const size_t slash = written.find('/'); slash != std::string::npos) {
      entry.bytes = BytesOf(written.substr(0, slash));
      if (entry.bytes.empty()) return NoEntry(written, "has no address before its /");
      const auto most = static_cast<int>(8 * entry.bytes.size());
      if (!absl::SimpleAtoi(written.substr(slash + 1), &entry.bits) || entry.bits < 0 ||
          entry.bits > most) {
        return NoEntry(written, absl::StrCat("must have 0 to ", most, " bits behind its /"));
      }
      list.entries_.push_back(std::move(entry));
      continue;
    }
    entry.bytes = BytesOf(host);
    if (entry.bytes.empty() && host.find(':') != std::string::npos) {
      const size_t colon = host.rfind(':');
      uint32_t port = 0;
      if (!absl::SimpleAtoi(host.substr(colon + 1), &port) || port == 0 || port > 65535) {
        return NoEntry(written, "must have a port of 1 to 65535 behind its colon");
      }
      entry.port = static_cast<uint16_t>(port);
      host.resize(colon);
      if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
        host = host.substr(1, host.size() - 2);
      }
      entry.bytes = BytesOf(host);
    }
    entry.bits = static_cast<int>(8 * entry.bytes.size());
    if (entry.bytes.empty()) {
      entry.domain = absl::StartsWith(host, "*");
      entry.name = absl::AsciiStrToLower(host.substr(entry.domain ? 1 : 0));
      const bool domain = entry.name.size() > 1 && entry.name[0] == '.' && IsName(entry.name);
      const bool good = entry.domain ? entry.name.empty() || domain : IsName(entry.name);
      if (!good) return NoEntry(written, "is no host");
    }
    list.entries_.push_back(std::move(entry));
  }
  return list;
}

bool AddressList::Matches(const Entry& entry, const std::string& name,
                          const std::vector<uint8_t>& bytes, uint16_t port) {
  if (entry.port != 0 && entry.port != port) return false;
  if (!entry.bytes.empty()) {
    if (bytes.size() != entry.bytes.size()) return false;
    for (int bit = 0; bit < entry.bits; bit += 8) {
      const auto i = static_cast<size_t>(bit / 8);
      const int left = std::min(8, entry.bits - bit);
      if (((bytes[i] ^ entry.bytes[i]) >> (8 - left)) != 0) return false;
    }
    return true;
  }
  if (entry.domain) {
    return entry.name.empty() || (bytes.empty() && absl::EndsWith(name, entry.name));
  }
  return bytes.empty() && name == entry.name;
}

bool AddressList::Allows(const HostPort& address) const {
  const std::string name = absl::AsciiStrToLower(address.host);
  const std::vector<uint8_t> bytes = BytesOf(name);
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return Matches(entry, name, bytes, address.port); });
}

}  // namespace sluice
