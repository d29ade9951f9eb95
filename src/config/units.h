// Quantities as people write them: 1GiB, 200ms, 127.0.0.1:7000.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

// A count of bytes: digits, with an optional fraction, then B, KiB, MiB, GiB, TiB (powers of 1024),
// or kB, MB, GB, TB (powers of 1000), in any case, after optional blanks. Nothing if it is
// something else, not a whole number of bytes, or 2^63 and more.
std::optional<uint64_t> ParseBytes(std::string_view text);

// The largest binary unit that divides it: 1GiB, 1536MiB, 4097.
std::string FormatBytes(uint64_t bytes);

// Seconds: a number, or Abseil's durations (1.5s, 200ms, 2m, 1h30m). Finite.
std::optional<double> ParseSeconds(std::string_view text);

// 30s, 0.05s: the shortest decimal that reads back as the same number.
std::string FormatSeconds(double seconds);

// host:port with port in [0, 65535]; the host a name, an IPv4 address, or an IPv6 one in brackets.
bool IsAddress(std::string_view text);

}  // namespace sluice
