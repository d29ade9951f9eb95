#include "src/config/units.h"

#include <charconv>
#include <cmath>

#include "absl/flags/marshalling.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace sluice {
namespace {

struct ByteUnit {
  const char* name;
  uint64_t bytes;
};

constexpr ByteUnit kByteUnits[] = {
    {"", 1},
    {"b", 1},
    {"kib", uint64_t{1} << 10},
    {"mib", uint64_t{1} << 20},
    {"gib", uint64_t{1} << 30},
    {"tib", uint64_t{1} << 40},
    {"kb", 1'000},
    {"mb", 1'000'000},
    {"gb", 1'000'000'000},
    {"tb", 1'000'000'000'000},
};

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

bool IsDecimal(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

// Returns number * unit exactly, for a decimal number with or without a fraction.
std::optional<uint64_t> Scale(std::string_view number, uint64_t unit) {
  const size_t point = number.find('.');
  const std::string_view whole = number.substr(0, point);
  uint64_t value = 0;
  if (!IsDecimal(whole) || !absl::SimpleAtoi(View(whole), &value)) return std::nullopt;
  if (value > static_cast<uint64_t>(INT64_MAX) / unit) return std::nullopt;
  value *= unit;
  if (point == std::string_view::npos) return value;

  // A fraction of a unit that is a whole number of bytes below 2^53 is exact in a double.
  double fraction = 0;
  const std::string_view digits = number.substr(point + 1);
  if (!IsDecimal(digits) || !absl::SimpleAtod(absl::StrCat("0.", View(digits)), &fraction)) {
    return std::nullopt;
  }
  const double bytes = fraction * static_cast<double>(unit);
  if (bytes != std::floor(bytes)) return std::nullopt;
  value += static_cast<uint64_t>(bytes);
  if (value > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  return value;
}

}  // namespace

std::optional<uint64_t> ParseBytes(std::string_view text) {
  const size_t end = text.find_first_not_of("0123456789.");
  const std::string_view number = text.substr(0, end);
  absl::string_view suffix = end == std::string_view::npos ? "" : View(text.substr(end));
  const std::string unit = absl::AsciiStrToLower(absl::StripAsciiWhitespace(suffix));
  for (const ByteUnit& candidate : kByteUnits) {
    if (unit == candidate.name) return Scale(number, candidate.bytes);
  }
  return std::nullopt;
}

std::string FormatBytes(uint64_t bytes) {
  for (int i = 5; i >= 2; --i) {
    const uint64_t unit = kByteUnits[i].bytes;
    constexpr const char* kNames[] = {"", "", "KiB", "MiB", "GiB", "TiB"};
    if (bytes != 0 && bytes % unit == 0) return absl::StrCat(bytes / unit, kNames[i]);
  }
  return absl::StrCat(bytes);
}

std::string ApproximateBytes(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= int64_t{1} << 30) return absl::StrFormat("%.2f GiB", value / (1 << 30));
  if (bytes >= 1 << 20) return absl::StrFormat("%.1f MiB", value / (1 << 20));
  if (bytes >= 1 << 10) return absl::StrFormat("%.1f KiB", value / (1 << 10));
  return absl::StrCat(bytes, " B");
}

std::optional<double> ParseSeconds(std::string_view text) {
  double seconds = 0;
  if (!absl::SimpleAtod(View(text), &seconds)) {
    absl::Duration duration;
    std::string error;
    if (!absl::ParseFlag(View(text), &duration, &error)) return std::nullopt;
    seconds = absl::ToDoubleSeconds(duration);
  }
  if (!std::isfinite(seconds)) return std::nullopt;
  return seconds;
}

std::string FormatSeconds(double seconds) {
  char buffer[400];  // the fixed form of a double has at most 309 digits before its point
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), seconds, std::chars_format::fixed).ptr;
  return absl::StrCat(absl::string_view(buffer, static_cast<size_t>(end - buffer)), "s");
}

bool IsAddress(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const std::string_view port = text.substr(colon + 1);
  uint32_t number = 0;
  if (!IsDecimal(port) || !absl::SimpleAtoi(View(port), &number) || number > 65535) return false;
  std::string_view host = text.substr(0, colon);
  if (host.front() == '[') {
    return host.size() > 2 && host.back() == ']' &&
           host.substr(1, host.size() - 2).find_first_not_of("0123456789abcdefABCDEF:.%") ==
               std::string_view::npos;
  }
  return host.find_first_of(":/[] \t") == std::string_view::npos;
}

}  // namespace sluice
