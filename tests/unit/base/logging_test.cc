#include "src/base/logging.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_split.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

// 2026-11-21T19:00:00.123Z
const auto kTime = std::chrono::system_clock::time_point(std::chrono::milliseconds(1795287600123));

// Returns what `write` logs through SetUpLogging, line by line.
template <typename F>
std::vector<std::string> Logged(LogLevel level, LogFormat format, F write) {
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  auto before = spdlog::default_logger();
  SetUpLogging(level, format, file);
  write();
  spdlog::set_default_logger(before);
  std::string text(static_cast<size_t>(std::ftell(file)), '\0');
  std::rewind(file);
  REQUIRE(std::fread(text.data(), 1, text.size(), file) == text.size());
  std::fclose(file);
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

TEST_CASE("a text record reads as a sentence with key=value behind it") {
  const std::string transfer = "5f00";
  CHECK(FormatLogRecord(LogFormat::kText, kTime, LogLevel::kInfo, "transfer committed",
                        {{"transfer_id", transfer},
                         {"bytes", size_t{4096}},
                         {"resumed", true},
                         {"seconds", 0.25},
                         {"delta", -3}}) ==
        "2026-11-21T19:00:00.123Z info  transfer committed transfer_id=5f00 bytes=4096 "
        "resumed=true seconds=0.25 delta=-3");
}

TEST_CASE("text values that would be read wrongly are quoted") {
  const auto value = [](std::string_view text) {
    const std::string line =
        FormatLogRecord(LogFormat::kText, kTime, LogLevel::kWarn, "m", {{"k", text}});
    return line.substr(line.find("k=") + 2);
  };
  CHECK(value("plain") == "plain");
  CHECK(value("") == "\"\"");
  CHECK(value("two words") == "\"two words\"");
  CHECK(value("a=b") == "\"a=b\"");
  CHECK(value("say \"x\"") == "\"say \\\"x\\\"\"");
}

TEST_CASE("a text message keeps its own quotes but cannot forge a line") {
  const std::string line = FormatLogRecord(LogFormat::kText, kTime, LogLevel::kError,
                                           "no \"config.json\" in C:\\m\nfake line", {});
  CHECK(line == "2026-11-21T19:00:00.123Z error no \"config.json\" in C:\\m\\nfake line");
}

TEST_CASE("a JSON record parses whatever its bytes are") {
  const std::string line =
      FormatLogRecord(LogFormat::kJson, kTime, LogLevel::kWarn, "bad \"input\"\n\xff",
                      {{"path", "a\tb\xc3"},
                       {"count", uint64_t{18446744073709551615u}},
                       {"ok", false},
                       {"ratio", std::nan("")}});
  CHECK(line.find('\n') == std::string::npos);
  const Json record = Json::parse(line);
  CHECK(record["time"] == "2026-11-21T19:00:00.123Z");
  CHECK(record["level"] == "warn");
  CHECK(record["message"] == "bad \"input\"\n\xef\xbf\xbd");
  CHECK(record["path"] == "a\tb\xef\xbf\xbd");
  CHECK(record["count"] == 18446744073709551615u);
  CHECK(record["ok"] == false);
  CHECK(record["ratio"] == "nan");
  CHECK(line.starts_with("{\"time\":"));
}

TEST_CASE("Log writes records with fields, spdlog's own calls come out the same way") {
  const auto lines = Logged(LogLevel::kInfo, LogFormat::kJson, [] {
    Log(LogLevel::kInfo, "with fields {}", {{"n", 7}});
    spdlog::warn("direct {}", 8);
    Log(LogLevel::kError, "without");
  });
  REQUIRE(lines.size() == 3);
  const Json first = Json::parse(lines[0]);
  CHECK(first["message"] == "with fields {}");
  CHECK(first["n"] == 7);
  const Json second = Json::parse(lines[1]);
  CHECK(second["message"] == "direct 8");
  CHECK(second["level"] == "warn");
  CHECK(second.size() == 3);
  CHECK(Json::parse(lines[2])["level"] == "error");
}

TEST_CASE("messages below the level are not written") {
  const auto lines = Logged(LogLevel::kWarn, LogFormat::kText, [] {
    CHECK_FALSE(LogEnabled(LogLevel::kInfo));
    CHECK(LogEnabled(LogLevel::kWarn));
    Log(LogLevel::kInfo, "quiet");
    Log(LogLevel::kWarn, "loud");
  });
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].ends_with(" warn  loud"));
}

TEST_CASE("what is not a terminal gets JSON") {
  const auto lines =
      Logged(LogLevel::kInfo, LogFormat::kAuto, [] { Log(LogLevel::kInfo, "hello"); });
  REQUIRE(lines.size() == 1);
  CHECK(Json::parse(lines[0])["message"] == "hello");
}

TEST_CASE("threads do not mix their fields") {
  const auto lines = Logged(LogLevel::kInfo, LogFormat::kJson, [] {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([t] {
        for (int i = 0; i < 200; ++i) {
          Log(LogLevel::kInfo, "thread " + std::to_string(t), {{"thread", t}, {"i", i}});
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  REQUIRE(lines.size() == 800);
  for (const std::string& line : lines) {
    const Json record = Json::parse(line);
    CHECK(record["message"] == "thread " + std::to_string(record["thread"].get<int>()));
  }
}

TEST_CASE("levels and formats go by the names of their settings") {
  CHECK(ParseLogLevel("trace") == LogLevel::kTrace);
  CHECK(ParseLogLevel("error") == LogLevel::kError);
  CHECK(ParseLogFormat("auto") == LogFormat::kAuto);
  CHECK(ParseLogFormat("text") == LogFormat::kText);
  CHECK(ParseLogFormat("json") == LogFormat::kJson);
}

TEST_CASE("what ends a line or steers a terminal is escaped, what people read is not") {
  const std::string nasty = "a\x7f\u009b31m\u0085\u2028\u2029\u00e4\u20ac";
  const std::string json =
      FormatLogRecord(LogFormat::kJson, kTime, LogLevel::kInfo, "m", {{"k", nasty}});
  CHECK(json.find(R"("k":"a\u007f\u009b31m\u0085\u2028\u2029)"
                  "\u00e4\u20ac\"") != std::string::npos);
  CHECK(Json::parse(json).at("k") == nasty);
  const std::string text =
      FormatLogRecord(LogFormat::kText, kTime, LogLevel::kInfo, nasty, {{"k", nasty}});
  for (const char* escaped : {"\x7f", "\u009b", "\u0085", "\u2028", "\u2029"}) {
    CHECK(text.find(escaped) == std::string::npos);
  }
  CHECK(text.find("\u00e4\u20ac k=") != std::string::npos);
}

TEST_CASE("any bytes in message, keys and values give one line of valid JSON or text") {
  std::mt19937_64 random(TestSeed());
  const auto bytes = [&] {
    std::string out(random() % 40, '\0');
    for (char& c : out) {
      // Control characters, quotes, backslashes and broken UTF-8 come more often than by chance.
      constexpr std::string_view kNasty("\0\n\r\t\x1b\x7f\"\\={}\x80\xc3\xe2\xff\xf4\xed", 18);
      c = random() % 2 == 0 ? kNasty[random() % kNasty.size()] : static_cast<char>(random());
    }
    return out;
  };
  for (int round = 0; round < 2000; ++round) {
    const std::string message = bytes(), key = "k" + bytes(), text = bytes();
    const auto number = static_cast<double>(random());
    const auto record = [&](LogFormat format) {
      return FormatLogRecord(format, kTime, LogLevel::kInfo, message,
                             {{key, text}, {"number", number}, {"nan", std::nan("")}});
    };
    const std::string json = record(LogFormat::kJson);
    CAPTURE(json);
    const Json parsed = Json::parse(json, nullptr, /*allow_exceptions=*/false);
    REQUIRE(parsed.is_object());
    REQUIRE(parsed.at("number").get<double>() == number);
    for (const std::string& line : {json, record(LogFormat::kText)}) {
      REQUIRE(std::none_of(line.begin(), line.end(),
                           [](char c) { return static_cast<unsigned char>(c) < 0x20; }));
    }
  }
}

}  // namespace
}  // namespace sluice
