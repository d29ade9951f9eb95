// Logging writes one line for each event to stderr: text for a person at a terminal, a JSON object
// for a program. A message is a constant sentence, and what varies goes into fields. A line never
// has the text or the token ids of a prompt or an answer.
//
//   Log(LogLevel::kInfo, "transfer committed", {{"transfer_id", id}, {"bytes", bytes}});
//
// Everything here may be called from any thread. The engine thread does not log in a steady step:
// writing to stderr may block.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

namespace sluice {

enum class LogLevel { kTrace, kDebug, kInfo, kWarn, kError };

enum class LogFormat {
  kAuto,  // kText if the stream is a terminal, else kJson
  kText,  // 2026-11-21T19:00:00.123Z info  transfer committed transfer_id=5f bytes=4096
  kJson,  // {"time":"2026-11-21T19:00:00.123Z","level":"info","message":"...","bytes":4096}
};

// A member of the record. It lives as long as the full expression that it is written in.
struct LogField {
  using Value = std::variant<bool, int64_t, uint64_t, double, std::string_view>;

  LogField(std::string_view field_key, std::string_view text) : key(field_key), value(text) {}
  LogField(std::string_view field_key, const char* text)
      : key(field_key), value(std::string_view(text)) {}
  LogField(std::string_view field_key, const std::string& text)
      : key(field_key), value(std::string_view(text)) {}
  template <typename T>
  requires std::is_arithmetic_v<T> LogField(std::string_view field_key, T number)
      : key(field_key), value(Widen(number)) {}

  // The key is in snake_case with its unit last: elapsed_seconds. It is not time, level or message.
  std::string_view key;
  Value value;

 private:
  template <typename T>
  static Value Widen(T number) {
    if constexpr (std::is_same_v<T, bool>) {
      return number;
    } else if constexpr (std::is_floating_point_v<T>) {
      return static_cast<double>(number);
    } else if constexpr (std::is_signed_v<T>) {
      return static_cast<int64_t>(number);
    } else {
      return static_cast<uint64_t>(number);
    }
  }
};

// Makes spdlog's default logger write in this form. Messages given to spdlog directly come out the
// same way, without fields. Call it once, first in main; until then spdlog's own defaults hold.
// REQUIRES: `stream` stays open until the process ends.
void SetUpLogging(LogLevel least_severe, LogFormat format, std::FILE* stream = stderr);

// Return the level or format by the names of the settings log_level (trace, debug, info, warn,
// error) and log_format (auto, text, json). REQUIRES: it is one of these names.
LogLevel ParseLogLevel(std::string_view name);
LogFormat ParseLogFormat(std::string_view name);

// Returns whether a message of that level would be written. Ask it before making costly fields.
bool LogEnabled(LogLevel level);

void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields = {});

// Returns the line that Log() writes, without its newline. `format` is kText or kJson. Bytes that
// are not UTF-8 are replaced and control characters are escaped, so a record is always one line.
std::string FormatLogRecord(LogFormat format, std::chrono::system_clock::time_point time,
                            LogLevel level, std::string_view message,
                            std::initializer_list<LogField> fields);

}  // namespace sluice
