#include "src/base/logging.h"

#include <spdlog/spdlog.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_split.h"

namespace sluice {
namespace {

using Json = nlohmann::json;

// 2026-11-21T19:00:00.123Z
const auto kTime = std::chrono::system_clock::time_point(std::chrono::milliseconds(1795287600123));

// What `write` logs through SetUpLogging, line by line.
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

}  // namespace
}  // namespace sluice
