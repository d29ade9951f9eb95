#include "src/service/wire/host_port.h"

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

constexpr size_t kMaxHostBytes = 253;  // RFC 1035, 2.3.4

bool IsHost(const std::string& host, bool bracketed) {
  if (host.empty() || host.size() > kMaxHostBytes) return false;
  for (const char c : host) {
    const auto byte = static_cast<unsigned char>(c);
    const bool colon = bracketed && (c == ':' || c == '%');
    if (!absl::ascii_isalnum(byte) && c != '.' && c != '-' && c != '_' && !colon) return false;
  }
  return true;
}

absl::Status BadAddress(const std::string& text) {
  return absl::InvalidArgumentError(
      absl::StrCat("expected host:port, e.g. 127.0.0.1:7000 or [::1]:7000, found \"",
                   absl::CHexEscape(text.substr(0, 300)), "\""));
}

}  // namespace

std::string HostPort::ToString() const {
  return host.find(':') == std::string::npos ? absl::StrCat(host, ":", port)
                                             : absl::StrCat("[", host, "]:", port);
}

absl::StatusOr<HostPort> ParseHostPort(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return BadAddress(text);
  HostPort out;
  out.host = text.substr(0, colon);
  const bool bracketed = out.host.size() > 2 && out.host.front() == '[' && out.host.back() == ']';
  if (bracketed) out.host = out.host.substr(1, out.host.size() - 2);
  const std::string port = text.substr(colon + 1);
  int number = 0;
  const bool digits = !port.empty() && port.size() <= 5 &&
                      port.find_first_not_of("0123456789") == std::string::npos;
  if (!IsHost(out.host, bracketed) || !digits || !absl::SimpleAtoi(port, &number) ||
      number > 65535) {
    return BadAddress(text);
  }
  out.port = static_cast<uint16_t>(number);
  return out;
}

}  // namespace sluice
