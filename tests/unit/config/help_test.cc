#include "src/config/help.h"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "src/config/config.h"

namespace sluice {
namespace {

TEST_CASE("help names every flag of its program, and no other") {
  for (const char* program : {"sluice-server", "sluice-prefill"}) {
    const std::string help = HelpText(program);
    for (const Setting& setting : AllSettings()) {
      CAPTURE(program, setting.name());
      const std::string flag =
          setting.is_bool() ? "  --[no-]" + setting.flag().substr(2) : "  " + setting.flag() + " ";
      CHECK(absl::StrContains(help, flag) == setting.AppliesTo(program));
    }
    for (const char* part : {"--config FILE", "--check-config", "--version", "SLUICE_HBM_BYTES",
                             "Examples:", "(default auto)", "(required)"}) {
      CAPTURE(part);
      CHECK(absl::StrContains(help, part));
    }
    CHECK(absl::StrContains(help, "--print-plan") == (std::string(program) == "sluice-server"));
  }
}

TEST_CASE("help fits into 100 columns") {
  for (const char* program : {"sluice-server", "sluice-prefill"}) {
    for (const auto line : absl::StrSplit(HelpText(program), '\n')) {
      CAPTURE(std::string(line));
      CHECK(line.size() <= 100);
      CHECK((line.empty() || line.back() != ' '));
    }
  }
}

TEST_CASE("the commands in the examples are accepted") {
  int commands = 0;
  for (const char* program : {"sluice-server", "sluice-prefill"}) {
    std::string help = HelpText(program);
    help = help.substr(help.find("Examples:"));
    while (help.find("\\\n") != std::string::npos) help.replace(help.find("\\\n"), 2, "");
    for (const auto line : absl::StrSplit(help, '\n')) {
      const std::vector<std::string> words =
          absl::StrSplit(absl::StripAsciiWhitespace(line), ' ', absl::SkipEmpty());
      const auto name = std::find(words.begin(), words.end(), program);
      if (name == words.end() || !absl::StartsWith(line, "    ")) continue;
      CAPTURE(std::string(line));
      const auto parsed =
          ParseCommandLine(program, std::vector<std::string>(name + 1, words.end()));
      INFO(parsed.status().message());
      CHECK(parsed.ok());
      ++commands;
    }
  }
  CHECK(commands == 7);
}

TEST_CASE("the version is the program's name and three numbers") {
  int a = 0, b = 0, c = 0;
  CHECK(std::sscanf(VersionText("sluice-server").c_str(), "sluice-server %d.%d.%d", &a, &b, &c) ==
        3);
}

TEST_CASE("the table has a line for every setting") {
  const std::string table = ConfigTableMarkdown();
  const std::vector<std::string> lines = absl::StrSplit(table, '\n', absl::SkipEmpty());
  REQUIRE(lines.size() == AllSettings().size() + 2);
  CHECK(absl::StrContains(table, "| `hbm_bytes` | `auto` | "));
  CHECK(absl::StrContains(table, "| `ess: warm_up` | `true` | "));
  CHECK(absl::StrContains(table, "| `model` | required | "));
  CHECK(absl::StrContains(table, ". One of `auto`, `dummy`. |"));
  CHECK(absl::StrContains(table, "(`sluice-server` only) |"));
}

TEST_CASE("the table of configs/README.md is the schema's") {
  const std::string path = SLUICE_SOURCE_DIR "/configs/README.md";
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  const std::string readme = text.str();
  constexpr absl::string_view kBegin = "<!-- config-table -->\n";
  const size_t begin = readme.find(std::string(kBegin));
  const size_t end = readme.find("<!-- /config-table -->");
  REQUIRE(begin < end);
  REQUIRE(end != std::string::npos);
  const size_t table = begin + kBegin.size();
  if (std::getenv("SLUICE_TEST_UPDATE") != nullptr) {
    std::ofstream(path) << readme.substr(0, table) << ConfigTableMarkdown() << readme.substr(end);
    return;
  }
  INFO("SLUICE_TEST_UPDATE=1 build/release/bin/config_test writes the table");
  CHECK((readme.substr(table, end - table) == ConfigTableMarkdown()));
}

}  // namespace
}  // namespace sluice
