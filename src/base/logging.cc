#include "src/base/logging.h"

#include <spdlog/formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kLevelNames[] = {"trace", "debug", "info", "warn", "error"};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  SLUICE_CHECK(false, "no such log level: ", static_cast<int>(level));
}

LogLevel FromSpdlog(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::trace:
      return LogLevel::kTrace;
    case spdlog::level::debug:
      return LogLevel::kDebug;
    case spdlog::level::warn:
      return LogLevel::kWarn;
    case spdlog::level::err:
    case spdlog::level::critical:
      return LogLevel::kError;
    default:
      return LogLevel::kInfo;
  }
}

std::string FormatTime(std::chrono::system_clock::time_point time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::FromChrono(time), absl::UTCTimeZone());
}

Json ToJson(const LogField::Value& value) {
  return std::visit(
      [](auto v) -> Json {
        if constexpr (std::is_same_v<decltype(v), double>) {
          // JSON has no inf and no nan. They are written as text, so that they are not lost as
          // null.
          if (!std::isfinite(v)) return absl::StrCat(v);
        }
        return v;
      },
      value);
}

// Writes as \u escapes the characters that JSON lets through but that end a line or steer a
// terminal: DEL, C1 controls and the separators U+2028 and U+2029. REQUIRES: `utf8` is valid UTF-8.
std::string EscapeInvisible(const std::string& utf8) {
  std::string out;
  out.reserve(utf8.size());
  for (size_t i = 0; i < utf8.size(); ++i) {
    const auto at = [&](size_t j) {
      return j < utf8.size() ? static_cast<unsigned char>(utf8[j]) : 0u;
    };
    if (at(i) == 0x7F) {
      out += "\\u007f";
    } else if (at(i) == 0xC2 && at(i + 1) < 0xA0) {
      absl::StrAppend(&out, "\\u00", absl::Hex(at(i + 1), absl::kZeroPad2));
      i += 1;
    } else if (at(i) == 0xE2 && at(i + 1) == 0x80 && (at(i + 2) == 0xA8 || at(i + 2) == 0xA9)) {
      out += at(i + 2) == 0xA8 ? "\\u2028" : "\\u2029";
      i += 2;
    } else {
      out.push_back(utf8[i]);
    }
  }
  return out;
}

std::string Dump(const Json& json) {
  return EscapeInvisible(
      json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace));
}

// Returns the text escaped as a JSON string but without its quotes, so that control characters
// cannot forge a line.
std::string Escaped(std::string_view text) {
  std::string quoted = Dump(Json(text));
  return quoted.substr(1, quoted.size() - 2);
}

void AppendTextValue(const LogField::Value& value, std::string* out) {
  const auto* text = std::get_if<std::string_view>(&value);
  const std::string dumped = Dump(ToJson(value));
  const bool bare = text != nullptr && !text->empty() && dumped.size() == text->size() + 2 &&
                    text->find_first_of(" =\"") == std::string_view::npos;
  if (bare) {
    absl::StrAppend(out, dumped.substr(1, text->size()));
  } else {
    absl::StrAppend(out, dumped);
  }
}

std::string FormatText(std::chrono::system_clock::time_point time, LogLevel level,
                       std::string_view message, std::initializer_list<LogField> fields) {
  std::string level_column(kLevelNames[static_cast<int>(level)]);
  level_column.resize(5, ' ');
  // The message is a sentence to be read, so its quotes and backslashes stay as they are.
  std::string out = absl::StrCat(FormatTime(time), " ", level_column, " ");
  std::string escaped = Escaped(message);
  if (escaped.size() != message.size()) {
    for (size_t i = 0; i < escaped.size(); ++i) {
      const bool quotes = escaped[i] == '\\' && i + 1 < escaped.size() &&
                          (escaped[i + 1] == '"' || escaped[i + 1] == '\\');
      if (quotes) ++i;
      out.push_back(escaped[i]);
    }
  } else {
    out += escaped;
  }
  for (const LogField& field : fields) {
    absl::StrAppend(&out, " ", Escaped(field.key), "=");
    AppendTextValue(field.value, &out);
  }
  return out;
}

std::string FormatJson(std::chrono::system_clock::time_point time, LogLevel level,
                       std::string_view message, std::initializer_list<LogField> fields) {
  Json record;
  record["time"] = FormatTime(time);
  record["level"] = kLevelNames[static_cast<int>(level)];
  record["message"] = message;
  for (const LogField& field : fields) record[std::string(field.key)] = ToJson(field.value);
  return Dump(record);
}

// spdlog makes its registry at first use. Making it here, before main, spares a thread's first line
// that cost. It also keeps ThreadSanitizer, which does not see the guard inside Debian's libspdlog,
// from reporting a race between two first lines.
[[maybe_unused]] const spdlog::logger* const made_before_any_thread = spdlog::default_logger_raw();

// The fields of the record that this thread is logging. spdlog's records have no room for them, and
// its formatters run on the thread that logs.
thread_local const std::initializer_list<LogField>* current_fields = nullptr;

class RecordFormatter : public spdlog::formatter {
 public:
  explicit RecordFormatter(LogFormat format) : format_(format) {}

  void format(const spdlog::details::log_msg& msg, spdlog::memory_buf_t& out) override {
    static constexpr std::initializer_list<LogField> kNone = {};
    const std::string line = FormatLogRecord(format_, msg.time, FromSpdlog(msg.level),
                                             {msg.payload.data(), msg.payload.size()},
                                             current_fields != nullptr ? *current_fields : kNone);
    out.append(line.data(), line.data() + line.size());
    out.push_back('\n');
  }

  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<RecordFormatter>(format_);
  }

 private:
  const LogFormat format_;
};

// Does what spdlog's stderr sink does, for any stream.
class StreamSink : public spdlog::sinks::stdout_sink_base<spdlog::details::console_mutex> {
 public:
  explicit StreamSink(std::FILE* stream) : stdout_sink_base(stream) {}
};

}  // namespace

std::string FormatLogRecord(LogFormat format, std::chrono::system_clock::time_point time,
                            LogLevel level, std::string_view message,
                            std::initializer_list<LogField> fields) {
  SLUICE_CHECK(format != LogFormat::kAuto, "a record is text or JSON");
  return format == LogFormat::kText ? FormatText(time, level, message, fields)
                                    : FormatJson(time, level, message, fields);
}

void SetUpLogging(LogLevel least_severe, LogFormat format, std::FILE* stream) {
  if (format == LogFormat::kAuto) {
    format = isatty(fileno(stream)) == 1 ? LogFormat::kText : LogFormat::kJson;
  }
  auto logger = std::make_shared<spdlog::logger>("", std::make_shared<StreamSink>(stream));
  logger->set_formatter(std::make_unique<RecordFormatter>(format));
  logger->set_level(ToSpdlog(least_severe));
  spdlog::set_default_logger(std::move(logger));
}

LogLevel ParseLogLevel(std::string_view name) {
  for (int i = 0; i < 5; ++i) {
    if (kLevelNames[i] == name) return static_cast<LogLevel>(i);
  }
  SLUICE_CHECK(false, "no such log level: ", std::string(name));
}

LogFormat ParseLogFormat(std::string_view name) {
  if (name == "auto") return LogFormat::kAuto;
  if (name == "text") return LogFormat::kText;
  SLUICE_CHECK(name == "json", "no such log format: ", std::string(name));
  return LogFormat::kJson;
}

bool LogEnabled(LogLevel level) {
  return spdlog::default_logger_raw()->should_log(ToSpdlog(level));
}

void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
  current_fields = &fields;
  spdlog::default_logger_raw()->log(ToSpdlog(level),
                                    spdlog::string_view_t(message.data(), message.size()));
  current_fields = nullptr;
}

}  // namespace sluice
