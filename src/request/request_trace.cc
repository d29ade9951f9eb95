#include "src/request/request_trace.h"

#include <algorithm>
#include <vector>

namespace sluice {
namespace {

// version "-" trace-id "-" parent-id "-" trace-flags
constexpr size_t kVersionEnd = 2;
constexpr size_t kTraceIdBegin = 3, kTraceIdEnd = 35;
constexpr size_t kParentIdBegin = 36, kParentIdEnd = 52;
constexpr size_t kFlagsBegin = 53, kFlagsEnd = 55;
constexpr size_t kMaxMembers = 32;
constexpr size_t kMaxMemberPart = 256;  // maximum bytes of a key or a value

bool IsLowerHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool AllZero(std::string_view text) {
  return text.find_first_not_of('0') == std::string_view::npos;
}

bool IsTracestateKey(std::string_view key) {
  const auto lower_or_digit = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
  };
  if (key.empty() || key.size() > kMaxMemberPart || !lower_or_digit(key.front())) return false;
  if (std::count(key.begin(), key.end(), '@') > 1 || key.back() == '@') return false;
  return std::all_of(key.begin(), key.end(), [&](char c) {
    return lower_or_digit(c) || c == '_' || c == '-' || c == '*' || c == '/' || c == '@';
  });
}

bool IsTracestateValue(std::string_view value) {
  if (value.empty() || value.size() > kMaxMemberPart || value.back() == ' ') return false;
  return std::all_of(value.begin(), value.end(),
                     [](char c) { return c >= 0x20 && c <= 0x7E && c != ',' && c != '='; });
}

std::string_view WithoutBlanks(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

}  // namespace

std::string_view RequestTrace::trace_id() const {
  if (traceparent.empty()) return {};
  return std::string_view(traceparent).substr(kTraceIdBegin, kTraceIdEnd - kTraceIdBegin);
}

std::string_view RequestTrace::parent_id() const {
  if (traceparent.empty()) return {};
  return std::string_view(traceparent).substr(kParentIdBegin, kParentIdEnd - kParentIdBegin);
}

bool RequestTrace::sampled() const {
  if (traceparent.empty()) return false;
  const char digit = traceparent[kFlagsEnd - 1];  // the low four flags, of which it is the first
  return ((digit <= '9' ? digit - '0' : digit - 'a' + 10) & 1) != 0;
}

bool IsExternalId(std::string_view id) {
  return !id.empty() && id.size() <= kMaxExternalIdBytes &&
         std::all_of(id.begin(), id.end(), [](char c) { return c > 0x20 && c < 0x7F; });
}

bool IsTraceparent(std::string_view header) {
  if (header.size() < kFlagsEnd) return false;
  const std::string_view version = header.substr(0, kVersionEnd);
  const std::string_view trace = header.substr(kTraceIdBegin, kTraceIdEnd - kTraceIdBegin);
  const std::string_view parent = header.substr(kParentIdBegin, kParentIdEnd - kParentIdBegin);
  const std::string_view flags = header.substr(kFlagsBegin, kFlagsEnd - kFlagsBegin);
  for (const size_t dash : {kVersionEnd, kTraceIdEnd, kParentIdEnd}) {
    if (header[dash] != '-') return false;
  }
  for (const std::string_view part : {version, trace, parent, flags}) {
    if (!IsLowerHex(part)) return false;
  }
  if (version == "ff" || AllZero(trace) || AllZero(parent)) return false;
  if (header.size() == kFlagsEnd) return true;
  return version != "00" && header[kFlagsEnd] == '-';
}

bool IsTracestate(std::string_view header) {
  if (header.size() > kMaxTracestateBytes) return false;
  std::vector<std::string_view> keys;
  for (size_t begin = 0; begin <= header.size();) {
    const size_t end = std::min(header.find(',', begin), header.size());
    const std::string_view member = WithoutBlanks(header.substr(begin, end - begin));
    begin = end + 1;
    if (member.empty()) continue;  // allowed
    const size_t equals = member.find('=');
    if (equals == std::string_view::npos) return false;
    const std::string_view key = member.substr(0, equals);
    if (!IsTracestateKey(key) || !IsTracestateValue(member.substr(equals + 1))) return false;
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) return false;
    keys.push_back(key);
  }
  return !keys.empty() && keys.size() <= kMaxMembers;
}

}  // namespace sluice
