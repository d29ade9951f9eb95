#include "src/bench/report/flags.h"

#include <catch2/catch.hpp>

namespace sluice::bench {
namespace {

struct Values {
  bool quiet = false;
  std::string name = "here", json;
  int64_t count = 3;
  double rate = 0, seconds = 1;
  std::vector<int64_t> sizes = {1, 2};
  std::vector<std::string> phases, rest;
};

Flags MakeFlags(Values& v, bool with_rest = false) {
  Flags flags("tool", "Does things.\n", "  tool --count 4\n");
  flags.Switch("quiet", "says less", &v.quiet);
  flags.Text("name", "NAME", "its name", &v.name);
  flags.Integer("count", "how many", 1, 10, &v.count);
  flags.Number("rate", "how fast", 0, 5, &v.rate);
  flags.Seconds("seconds", "how long", 60, &v.seconds);
  flags.Integers("sizes", "which", 1, 100, &v.sizes);
  flags.File("json", "where to", &v.json);
  flags.Repeated("phase", "TEXT", "what", [&v](const std::string& text) {
    v.phases.push_back(text);
    return text == "bad" ? absl::InvalidArgumentError("is bad") : absl::OkStatus();
  });
  if (with_rest) flags.Rest("FILE...", "files", &v.rest);
  return flags;
}

std::string ErrorOf(std::vector<std::string> args) {
  Values v;
  return std::string(MakeFlags(v).Parse(args).status().message());
}

TEST_CASE("flags are read in both spellings, the rest keep their defaults") {
  Values v;
  Flags flags = MakeFlags(v);
  const std::vector<std::string> args = {"--quiet",   "--count", "7",       "--rate=2.5",
                                         "--seconds", "200ms",   "--sizes", "4,5",
                                         "--phase",   "a",       "--phase", "b"};
  REQUIRE(*flags.Parse(args));
  CHECK(v.quiet);
  CHECK(v.count == 7);
  CHECK(v.rate == 2.5);
  CHECK(v.seconds == 0.2);
  CHECK(v.sizes == std::vector<int64_t>{4, 5});
  CHECK(v.phases == std::vector<std::string>{"a", "b"});
  CHECK(v.name == "here");
  CHECK(v.json.empty());
}

TEST_CASE("the value of a file may be left out") {
  for (const auto& [args, expected] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{{{"--json"}, "-"},
                                                                     {{"--json", "--quiet"}, "-"},
                                                                     {{"--json", "f"}, "f"},
                                                                     {{"--json=g"}, "g"}}) {
    Values v;
    Flags flags = MakeFlags(v);
    REQUIRE(*flags.Parse(args));
    CHECK(v.json == expected);
  }
}

TEST_CASE("errors name the flag and the values that it takes") {
  using Catch::Matchers::Contains;
  CHECK_THAT(ErrorOf({"--cuont", "4"}), Contains("--cuont") && Contains("did you mean --count"));
  CHECK_THAT(ErrorOf({"--count", "11"}), Contains("--count") && Contains("from 1 to 10"));
  CHECK_THAT(ErrorOf({"--count", "4x"}), Contains("--count") && Contains("'4x'"));
  CHECK_THAT(ErrorOf({"--count"}), Contains("--count needs a value"));
  CHECK_THAT(ErrorOf({"--count", "1", "--count", "2"}), Contains("given twice"));
  CHECK_THAT(ErrorOf({"--rate", "nan"}), Contains("--rate"));
  CHECK_THAT(ErrorOf({"--seconds", "2h"}), Contains("--seconds"));
  CHECK_THAT(ErrorOf({"--sizes", "1,,2"}), Contains("--sizes"));
  CHECK_THAT(ErrorOf({"--quiet=yes"}), Contains("--quiet takes no value"));
  CHECK_THAT(ErrorOf({"--phase", "bad"}), Contains("--phase is bad"));
  CHECK_THAT(ErrorOf({"stray"}), Contains("'stray'"));
}

TEST_CASE("--help wins over errors and shows every flag with its default") {
  Values v;
  Flags flags = MakeFlags(v, true);
  const std::vector<std::string> args = {"--nonsense", "--help"};
  CHECK_FALSE(*flags.Parse(args));
  const std::string help = flags.Help();
  for (const char* words : {"Does things.", "--count N", "(default 3)", "--sizes", "(default 1,2)",
                            "FILE...", "Examples:", "tool --count 4"}) {
    CHECK_THAT(help, Catch::Matchers::Contains(words));
  }
}

TEST_CASE("arguments that are not flags are collected if the command takes them") {
  Values v;
  Flags flags = MakeFlags(v, true);
  const std::vector<std::string> args = {"a.json", "--quiet", "b.json"};
  REQUIRE(*flags.Parse(args));
  CHECK(v.rest == std::vector<std::string>{"a.json", "b.json"});
}

}  // namespace
}  // namespace sluice::bench
