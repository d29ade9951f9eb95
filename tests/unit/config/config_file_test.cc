#include "src/config/config_file.h"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/failpoint.h"

namespace sluice {
namespace {

std::vector<ConfigFileEntry> Parsed(const std::string& text) {
  auto entries = ParseConfigText(text, "f");
  INFO(entries.status().message());
  REQUIRE(entries.ok());
  return *std::move(entries);
}

std::string Refusal(const std::string& text) {
  const auto entries = ParseConfigText(text, "f");
  CHECK(entries.status().code() == absl::StatusCode::kInvalidArgument);
  return std::string(entries.status().message());
}

void CheckBoth(const std::vector<ConfigFileEntry>& entries) {
  REQUIRE(entries.size() == 3);
  CHECK(entries[0].key == "model");
  CHECK(entries[0].value == "a: #b");
  CHECK(entries[0].quoted);
  CHECK(entries[1].key == "threads");
  CHECK(entries[1].value == "4");
  CHECK_FALSE(entries[1].quoted);
  CHECK(entries[2].value == "true");
  CHECK(entries[2].line == 4);
}

TEST_CASE("YAML and JSON give the same entries") {
  CheckBoth(Parsed("# comment\nmodel: 'a: #b'\nthreads: 4   # four\nlog_prompts: true\n"));
  CheckBoth(Parsed("{\n  \"model\": \"a: #b\",\n  \"threads\": 4,\n  \"log_prompts\": true\n}\n"));
  CheckBoth(Parsed("{\n\t\"model\": \"a: #b\",\n\t\"threads\": 4,\n\t\"log_prompts\": true\n}\n"));
}

TEST_CASE("JSON escapes are read") {
  const auto entries = Parsed(R"({"model": "a\"b\\c\/d\u00e9", "policy": ""})");
  CHECK(entries.at(0).value == "a\"b\\c/d\xc3\xa9");
  CHECK(entries.at(1).value.empty());
}

TEST_CASE("a file without settings has none") {
  CHECK(Parsed("").empty());
  CHECK(Parsed("# nothing\n\n").empty());
  CHECK(Parsed("---\n").empty());
  CHECK(Parsed("{}").empty());
}

TEST_CASE("what is not one mapping of single values is refused with its line") {
  CHECK(Refusal("model: a\nmodel: b\n") == "f:2: model is set twice, first on line 1");
  CHECK(Refusal("{\"a\": 1,\n \"a\": 1}") == "f:2: a is set twice, first on line 1");
  CHECK(absl::StartsWith(Refusal("model:\n"), "f:1: model has no value"));
  CHECK(absl::StartsWith(Refusal("model: ~\n"), "f:1: model has no value"));
  CHECK(absl::StartsWith(Refusal("{\"model\": null}"), "f:1: model has no value"));
  CHECK(Refusal("model: [a]\n") == "f:1: model must be a single value, but is a list");
  CHECK(Refusal("a: 1\nmodel:\n  x: 1\n") == "f:3: model must be a single value, but is a mapping");
  CHECK(Refusal("- a\n") == "f:1: expected lines of the form name: value, found a list");
  CHECK(Refusal("hello\n") == "f:1: expected lines of the form name: value, found a single value");
  CHECK(absl::StartsWith(Refusal("[a]: 1\n"), "f:1: expected a setting's name, found a list"));
  CHECK(Refusal("a: &x 1\nb: *x\n") == "f:2: aliases (*name) are not read: write the value itself");
  CHECK(Refusal("a: 1\n---\nb: 2\n") == "f holds more than one YAML document (---): keep one");
}

TEST_CASE("settings of a section are read in YAML and JSON") {
  for (const char* text :
       {"a: 1\ness:\n  warm_up: true\n  prefetch: 3\nb: 2\n",
        "{\"a\": 1,\n\"ess\":\n {\"warm_up\": true,\n \"prefetch\": 3},\n\"b\": 2}"}) {
    CAPTURE(text);
    const auto entries = Parsed(text);
    REQUIRE(entries.size() == 4);
    CHECK(entries[0].section.empty());
    CHECK(entries[1].section == "ess");
    CHECK(entries[1].key == "warm_up");
    CHECK(entries[1].line == 3);
    CHECK(entries[2].section == "ess");
    CHECK(entries[2].value == "3");
    CHECK(entries[3].section.empty());
    CHECK(entries[3].key == "b");
  }
  CHECK(Parsed("ess: {}\n").empty());
  // The same key in two places is two settings.
  CHECK(Parsed("x: 1\ness: {x: 1}\nscout: {x: 1}\n").size() == 3);
}

TEST_CASE("a section is one mapping of single values") {
  const std::string scalar =
      "f:1: ess must be a mapping of settings, such as ess: {sparse_memory_ratio: 0}, but is a "
      "single value; leave it out for the defaults";
  CHECK(Refusal("ess: 0.2\n") == scalar);
  CHECK(Refusal("ess:\n") == scalar);
  CHECK(Refusal("ess: [a]\n") == "f:1: ess must be a mapping, but is a list");
  CHECK(Refusal("ess: {warm_up: [a]}\n") == "f:1: warm_up must be a single value, but is a list");
  CHECK(Refusal("ess: {scout: {x: 1}}\n") == "f:1: scout must be a single value, but is a mapping");
  CHECK(absl::StartsWith(Refusal("ess: {warm_up: ~}\n"), "f:1: warm_up has no value"));
  CHECK(Refusal("ess: {a: 1}\nmodel: m\ness: {b: 1}\n") ==
        "f:3: ess is set twice, first on line 1");
  CHECK(Refusal("ess:\n  a: 1\n  a: 2\n") == "f:3: a is set twice, first on line 2");
}

TEST_CASE("what is no YAML is refused with its line") {
  CHECK(absl::StartsWith(Refusal("a: 1\nb: [\n"), "f:"));
  CHECK(absl::StrContains(Refusal("a: 1\n}\n"), "is neither YAML nor JSON"));
  CHECK(absl::StrContains(Refusal("{\"a\": 1"), "a { that is never closed"));
  CHECK(absl::StrContains(Refusal("a: \"open\n"), "is neither YAML nor JSON"));
}

TEST_CASE("size and nesting are bounded") {
  CHECK(absl::StrContains(Refusal(std::string(kMaxConfigFileBytes + 1, '#')), "at most 262144"));
  // Deep enough to end a parser that recurses without asking.
  CHECK(Refusal("a: " + std::string(200000, '[')) ==
        "f:1: a must be a single value, but is a list");
  CHECK(absl::StartsWith(Refusal(std::string(200000, '[')), "f:1: "));
  CHECK(absl::StartsWith(Refusal(std::string(200000, '{')), "f:1: "));
}

TEST_CASE("a file is read from disk, and what is none is named") {
  const auto folder = std::filesystem::temp_directory_path() / "sluice_config_file_test_XXXXXX";
  std::string path = folder.string();
  REQUIRE(mkdtemp(path.data()) != nullptr);
  const std::string file = path + "/a.yaml";
  std::ofstream(file) << "threads: 3\n";
  const auto entries = ReadConfigFile(file);
  REQUIRE(entries.ok());
  CHECK(entries->at(0).value == "3");
  if (kFailpointsCompiledIn) {
    const ScopedFailpoints armed("config.read=error*1");
    const auto broken = ReadConfigFile(file);
    CHECK(absl::StrContains(broken.status().message(), file + " cannot be read: "));
    CHECK(ReadConfigFile(file).ok());
  }

  const auto absent = ReadConfigFile(path + "/absent.yaml");
  CHECK(absent.status().code() == absl::StatusCode::kNotFound);
  CHECK(absl::StrContains(absent.status().message(), path + "/absent.yaml: No such file"));
  CHECK(absl::StrContains(ReadConfigFile(path).status().message(), "is not a regular file"));
  std::ofstream(file) << std::string(kMaxConfigFileBytes + 1, '\n');
  CHECK(absl::StrContains(ReadConfigFile(file).status().message(),
                          absl::StrCat(kMaxConfigFileBytes + 1, " bytes")));
  std::filesystem::remove_all(path);
}

}  // namespace
}  // namespace sluice
