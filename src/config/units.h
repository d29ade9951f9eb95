// Quantities as people write them: 1GiB, 200ms, 127.0.0.1:7000.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

// Reads a count of bytes: digits, with an optional fraction, then optional blanks and B, KiB, MiB,
// GiB, TiB (powers of 1024), or kB, MB, GB, TB (powers of 1000), in any case. Returns nullopt for
// anything else, for what is not a whole number of bytes, and for 2^63 and more.
std::optional<uint64_t> ParseBytes(std::string_view text);

// Returns `bytes` in the largest binary unit that divides it: 1GiB, 1536MiB, 4097.
std::string FormatBytes(uint64_t bytes);

// Returns about `bytes` in two or three digits that people read easily: "1.50 GiB", "22.5 KiB",
// "100 B". It is for texts alone: ParseBytes may give another number back.
std::string ApproximateBytes(int64_t bytes);

// Reads seconds: a number, or one of Abseil's durations (1.5s, 200ms, 2m, 1h30m). The result is
// finite.
std::optional<double> ParseSeconds(std::string_view text);

// Returns the shortest decimal that reads back as the same number: 30s, 0.05s.
std::string FormatSeconds(double seconds);

// Returns whether `text` is host:port with a port in [0, 65535], where the host is a name, an IPv4
// address, or an IPv6 address in brackets.
bool IsAddress(std::string_view text);

}  // namespace sluice
