// These tests say which ranks have which experts, and to which copies their rows go.
#include "src/model/expert_placement.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/fixtures/fixtures.h"

namespace sluice {
namespace {

// Checks that every rank has as many experts, each once, and that no expert is lacking.
void CheckPlacement(const ExpertPlacement& placement, int routed, int ranks, int redundancy) {
  CHECK(placement.ranks == ranks);
  CHECK(placement.each == routed / ranks + redundancy);
  REQUIRE(std::ssize(placement.experts) == int64_t{ranks} * placement.each);
  std::set<int32_t> all;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto own = placement.OfRank(rank);
    const std::set<int32_t> different(own.begin(), own.end());
    REQUIRE(different.size() == own.size());
    all.insert(own.begin(), own.end());
  }
  REQUIRE(std::ssize(all) == routed);
  REQUIRE(*all.begin() == 0);
  REQUIRE(*all.rbegin() == routed - 1);
}

// Loads as routers give them: few experts have much, and some have none.
std::vector<int64_t> SkewedLoad(int routed, std::mt19937_64& random) {
  std::vector<int64_t> load;
  for (int e = 0; e < routed; ++e) {
    const auto share = static_cast<double>(random() % 1000) / 1000;
    load.push_back(random() % 5 == 0 ? 0 : static_cast<int64_t>(10'000 * share * share * share));
  }
  return load;
}

double Most(const ExpertPlacement& placement, const std::vector<int64_t>& load) {
  const std::vector<double> of = LoadOfRanks(placement, load);
  return *std::max_element(of.begin(), of.end());
}

struct Shape {
  int routed, ranks, redundancy;
};
const Shape kShapes[] = {{8, 1, 0},    {8, 2, 0},    {8, 2, 1}, {8, 2, 4},    {8, 4, 2},
                         {8, 4, 6},    {8, 8, 1},    {8, 8, 7}, {256, 32, 1}, {256, 32, 2},
                         {256, 64, 4}, {64, 16, 60}, {12, 3, 5}};

TEST_CASE("without knowledge a rank has its share, and copies of the experts that follow") {
  CHECK(PlaceExperts(8, 4, 0).experts == std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(PlaceExperts(8, 4, 1).experts == std::vector<int32_t>{0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 0});
  for (const auto& [routed, ranks, redundancy] : kShapes) {
    CheckPlacement(PlaceExperts(routed, ranks, redundancy), routed, ranks, redundancy);
  }
}

TEST_CASE("by any load every rank has as many experts, and every expert has a rank") {
  std::mt19937_64 random(7);
  for (const auto& [routed, ranks, redundancy] : kShapes) {
    INFO(routed << " experts on " << ranks << " ranks with " << redundancy << " copies");
    const auto n = static_cast<size_t>(routed);
    std::vector<std::vector<int64_t>> loads = {std::vector<int64_t>(n, 0),
                                               std::vector<int64_t>(n, 5)};
    loads.emplace_back(n, 0).front() = 1'000'000;  // one expert has it all
    for (int i = 0; i < 20; ++i) loads.push_back(SkewedLoad(routed, random));
    for (const std::vector<int64_t>& load : loads) {
      const ExpertPlacement placement = PlaceExperts(load, ranks, redundancy);
      CheckPlacement(placement, routed, ranks, redundancy);
      CHECK(placement.experts == PlaceExperts(load, ranks, redundancy).experts);
      const std::vector<double> of = LoadOfRanks(placement, load);
      const double all = std::accumulate(of.begin(), of.end(), 0.0);
      const auto want = static_cast<double>(std::accumulate(load.begin(), load.end(), int64_t{0}));
      CHECK(all == Approx(want));
    }
  }
}

TEST_CASE("the busiest expert by load for each copy gets the next copy") {
  // 90 / 1, then 50 / 1 against 90 / 2, then 90 / 2.
  const ExpertPlacement placement = PlaceExperts({90, 50, 10, 0}, 4, 1);
  std::vector<int> copies(4);
  for (const int32_t e : placement.experts) ++copies[static_cast<size_t>(e)];
  CHECK(copies == std::vector<int>{4, 2, 1, 1});
  // With two ranks the lightest experts fill up the rank of the heaviest.
  CHECK(PlaceExperts({9, 8, 7, 1}, 2, 0).experts == std::vector<int32_t>{0, 3, 1, 2});
}

TEST_CASE("ranks have about as much load each, with copies more so") {
  std::mt19937_64 random(11);
  double in_order = 0, placed = 0, copied = 0, mean = 0;
  for (int i = 0; i < 20; ++i) {
    const std::vector<int64_t> load = SkewedLoad(256, random);
    const double before = Most(PlaceExperts(256, 32, 0), load);
    const double moved = Most(PlaceExperts(load, 32, 0), load);
    const double with_copies = Most(PlaceExperts(load, 32, 2), load);
    CHECK(moved <= before);
    in_order += before;
    placed += moved;
    copied += with_copies;
    mean += static_cast<double>(std::accumulate(load.begin(), load.end(), int64_t{0})) / 32;
  }
  INFO(in_order / mean << " " << placed / mean << " " << copied / mean);
  CHECK(in_order > 1.3 * mean);
  CHECK(placed < 1.15 * mean);
  CHECK(copied < 1.05 * mean);
  // A hot expert is one rank's work without copies, however the others are placed.
  std::vector<int64_t> hot(256, 10);
  hot[3] = 10'000;
  CHECK(Most(PlaceExperts(hot, 32, 0), hot) >= 10'000);
  CHECK(Most(PlaceExperts(hot, 32, 1), hot) < 500);
}

TEST_CASE("a rank's rows go to its own copy, and the others' are spread over all copies") {
  std::mt19937_64 random(13);
  for (const auto& [routed, ranks, redundancy] : kShapes) {
    INFO(routed << " experts on " << ranks << " ranks with " << redundancy << " copies");
    const ExpertPlacement placement = PlaceExperts(SkewedLoad(routed, random), ranks, redundancy);
    std::map<int32_t, int> served;  // ranks, by physical expert
    for (int source = 0; source < ranks; ++source) {
      const std::vector<int32_t> from = PhysicalExpertsFrom(placement, routed, source);
      REQUIRE(std::ssize(from) == routed);
      const auto own = placement.OfRank(source);
      for (int32_t e = 0; e < routed; ++e) {
        const int32_t physical = from[static_cast<size_t>(e)];
        REQUIRE(placement.experts.at(static_cast<size_t>(physical)) == e);
        const bool has = std::find(own.begin(), own.end(), e) != own.end();
        REQUIRE((!has || physical / placement.each == source));
        ++served[physical];
      }
    }
    std::map<int32_t, std::pair<int, int>> of;  // the fewest and the most, by expert
    for (size_t i = 0; i < placement.experts.size(); ++i) {
      const int n = served[static_cast<int32_t>(i)];
      const auto [at, first] = of.try_emplace(placement.experts[i], n, n);
      at->second = {std::min(at->second.first, n), std::max(at->second.second, n)};
    }
    for (const auto& [expert, range] : of) {
      INFO("expert " << expert);
      REQUIRE(range.first >= 1);
      REQUIRE(range.second - range.first <= 1);
    }
  }
}

TEST_CASE("without copies and load every expert is the physical one of its number") {
  for (int source = 0; source < 4; ++source) {
    CHECK(PhysicalExpertsFrom(PlaceExperts(8, 4, 0), 8, source) ==
          std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7});
  }
}

// ---- Files ----

class LoadFiles {
 public:
  LoadFiles() : config_(LoadModelConfig(fixtures::SourceDir("tiny-deepseek-v32")).value()) {}
  std::string Write(const std::string& name, const std::string& text) {
    std::ofstream(dir_.File(name)) << text;
    return dir_.File(name);
  }
  absl::StatusOr<ExpertLoad> Read(const std::string& paths) {
    return ReadExpertLoad(paths, config_);
  }
  void CheckRefused(const std::string& text, const std::string& says) {
    const std::string path = Write("wrong", text);
    const absl::Status status = Read(path).status();
    INFO(status);
    CHECK(absl::IsInvalidArgument(status));
    CHECK(status.message().find("expert_load: " + path) == 0);
    CHECK(status.message().find(says) != std::string::npos);
  }
  const ModelConfig& config() const { return config_; }

 private:
  const fixtures::TempDir dir_;
  const ModelConfig config_;
};

std::string Line(int layer, int64_t first) {
  return absl::StrCat("\"", layer, "\": [", first, ", 1, 2, 3, 4, 5, 6, 7]");
}

TEST_CASE("files of load are added up") {
  LoadFiles files;
  REQUIRE(files.config().layers == 3);
  REQUIRE(files.config().latent->dense_layers == 1);
  const std::string a = files.Write("a", "{\"choices\": {" + Line(1, 9) + ", " + Line(2, 0) + "}}");
  const std::string b = files.Write("b", "{\"choices\": {" + Line(1, 1) + ", " + Line(2, 5) + "}}");
  const auto load = files.Read(a + "," + b);
  INFO(load.status());
  REQUIRE(load.ok());
  CHECK(*load == ExpertLoad{{}, {10, 2, 4, 6, 8, 10, 12, 14}, {5, 2, 4, 6, 8, 10, 12, 14}});
  CHECK(files.Read("")->empty());
}

TEST_CASE("a file of load that is written says what was counted") {
  LoadFiles files;
  const ExpertLoad load = {{}, {1, 2, 3, 4, 5, 6, 7, 8}, {int64_t{1} << 40, 0, 0, 0, 0, 0, 0, 9}};
  const std::string path = files.Write("out", "older");
  CHECK(CheckExpertLoadPath(path).ok());
  REQUIRE(WriteExpertLoad(load, path).ok());
  const auto read = files.Read(path);
  INFO(read.status());
  REQUIRE(read.ok());
  CHECK(*read == load);
  for (const absl::Status& status :
       {WriteExpertLoad(load, "/nowhere/out"), CheckExpertLoadPath("/nowhere/out")}) {
    CHECK(absl::IsInvalidArgument(status));
    CHECK(status.message() ==
          "expert_load_out: cannot write /nowhere/out: No such file or directory");
  }
}

TEST_CASE("a file of load that does not fit the model is refused with what is wrong") {
  LoadFiles files;
  const std::string one = Line(1, 0), two = Line(2, 0);
  files.CheckRefused("{", "");
  files.CheckRefused("{}", "choices: expected an object");
  files.CheckRefused("{\"choices\": {" + one + "}}", "choices: 2: expected a list of 8 numbers");
  files.CheckRefused("{\"choices\": {" + one + ", \"2\": [1, 2]}}", "2: expected a list of 8");
  files.CheckRefused("{\"choices\": {" + one + ", " + Line(2, -1) + "}}", "found -1");
  files.CheckRefused("{\"choices\": {" + one + ", \"2\": [1, 2, 3, 4, 5, 6, 7, 0.5]}}",
                     "whole numbers from 0 to 281474976710656, found 0.5");
  files.CheckRefused("{\"choices\": {" + one + ", " + two + ", " + Line(0, 0) + "}}",
                     "the 2 layers from 1 on alone, found 3");
  const absl::Status none = files.Read("/nowhere/load").status();
  CHECK(absl::IsInvalidArgument(none));
  CHECK(none.message().find("expert_load: /nowhere/load") == 0);
  const std::string many = absl::StrJoin(std::vector<std::string>(65, "a"), ",");
  CHECK(files.Read(many).status().message().find("at most 64 files") != std::string::npos);
  const auto dense = ReadExpertLoad("a", *LoadModelConfig(fixtures::SourceDir("tiny-llama")));
  CHECK(dense.status().message().find("has no experts") != std::string::npos);
}

}  // namespace
}  // namespace sluice
