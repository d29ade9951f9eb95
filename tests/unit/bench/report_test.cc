#include "src/bench/report/report.h"

#include <catch2/catch.hpp>
#include <cstdio>

namespace sluice::bench {
namespace {

Report Sample() {
  Report r;
  r.subcommand = "step";
  r.command = "sluice-bench step --model m";
  r.shape = {{"batches", "1,8"}};
  r.machine = {"Some CPU", 2, 1 << 30, "abc-dirty"};
  Figure f;
  f.name = "step, batch 1";
  f.unit = "s";
  f.lower_is_better = true;
  f.median = 0.25;
  f.low = 0.125;
  f.high = 0.5;
  f.samples = 40;
  f.more = {{"of_floor", 0.5}};
  r.figures.push_back(f);
  return r;
}

TEST_CASE("a report reads back as it was written") {
  const Report r = *ParseReport(ToJson(Sample()));
  CHECK(r.subcommand == "step");
  CHECK(r.command == "sluice-bench step --model m");
  CHECK(r.shape == Sample().shape);
  CHECK(r.machine.cpu == "Some CPU");
  CHECK(r.machine.revision == "abc-dirty");
  REQUIRE(r.figures.size() == 1);
  CHECK(r.figures[0].name == "step, batch 1");
  CHECK(r.figures[0].lower_is_better);
  CHECK(r.figures[0].median == 0.25);
  CHECK(r.figures[0].low == 0.125);
  CHECK(r.figures[0].high == 0.5);
  CHECK(r.figures[0].samples == 40);
  CHECK(r.figures[0].more == Sample().figures[0].more);
}

TEST_CASE("the schema stays as it is: programs read it") {
  const auto j = nlohmann::json::parse(ToJson(Sample()));
  CHECK(j.at("schema") == "sluice-bench/1");
  std::vector<std::string> keys, figure_keys;
  for (const auto& [key, value] : j.items()) keys.push_back(key);
  for (const auto& [key, value] : j.at("figures").at(0).items()) figure_keys.push_back(key);
  CHECK(keys == std::vector<std::string>{"command", "details", "figures", "machine", "revision",
                                         "schema", "shape", "subcommand"});
  CHECK(figure_keys == std::vector<std::string>{"better", "median", "more", "name", "p10", "p90",
                                                "samples", "unit"});
}

TEST_CASE("a text that is not a report is refused with a reason") {
  using Catch::Matchers::Contains;
  const auto error = [](const std::string& text) {
    return std::string(ParseReport(text).status().message());
  };
  CHECK_THAT(error("{"), Contains("not JSON"));
  CHECK_THAT(error("[]"), Contains("sluice-bench/1"));
  CHECK_THAT(error(R"({"schema": 3})"), Contains("sluice-bench/1"));
  CHECK_THAT(error(R"({"schema": "sluice-bench/1"})"), Contains("subcommand"));
  auto j = nlohmann::json::parse(ToJson(Sample()));
  j["figures"][0]["median"] = "fast";
  CHECK_FALSE(ParseReport(j.dump()).ok());
  CHECK_THAT(std::string(ReadReport("/no/such/file").status().message()),
             Contains("/no/such/file"));
}

}  // namespace
}  // namespace sluice::bench
