// Tests the traffics of `sluice-bench policies`: which sequences they are made of, what a jump of
// the workload's path is, and a run of the real engine.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "src/bench/harness/traffic_run.h"
#include "src/bench/policies/traffic_report.h"
#include "src/bench/workload/topic_path.h"

namespace sluice::bench {
namespace {

TEST_CASE("a traffic's name is one that there is") {
  CHECK(ParseTraffics("steady,mixed,staggered").ok());
  const auto wrong = ParseTraffics("steady,mixd");
  CHECK_THAT(std::string(wrong.status().message()), Catch::Contains("did you mean mixed"));
}

TEST_CASE("the first sequence of a traffic outlives the others' submissions") {
  for (const char* traffic : {"steady", "mixed", "staggered"}) {
    for (const int batch : {1, 2, 5, 10}) {
      for (const int steps : {1, 2, 16}) {
        INFO(traffic << ", batch " << batch << ", " << steps << " steps");
        constexpr size_t kLengths = 3, kDistinct = 2;
        const auto all = SequencesOf(traffic, batch, kLengths, kDistinct, steps);
        REQUIRE(static_cast<int>(all.size()) == batch);
        CHECK(all[0].after == 0);
        CHECK(all[0].context >= (kLengths - 1) * kDistinct);
        for (const TrafficSequence& one : all) {
          CHECK(one.context < kLengths * kDistinct);
          CHECK(one.tokens > 1);
          CHECK(one.tokens <= all[0].tokens);
          CHECK(one.after < all[0].tokens);
          if (traffic != std::string("staggered")) CHECK(one.after == 0);
          if (traffic != std::string("mixed")) {
            CHECK(one.context >= (kLengths - 1) * kDistinct);
          }
        }
        if (traffic == std::string("staggered") && batch > 2) {
          CHECK(all.back().after > all[0].after);
          CHECK(all[1].tokens < all[0].tokens);
        }
        if (traffic == std::string("mixed") && batch >= 3) CHECK(all[2].context < kDistinct);
      }
    }
  }
}

double Cosine(const std::vector<double>& a, const std::vector<double>& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return ab / std::sqrt(aa * bb);
}

TEST_CASE("a path jumps every so many tokens and drifts in between") {
  TopicPath path;
  path.drift = 0.01;
  path.jump = 24;
  const auto at = [&](int64_t token) {
    std::vector<double> out(512);
    path.Add(token, absl::MakeSpan(out));
    return out;
  };
  for (const int64_t jump : {24, 48, 240}) {
    CHECK(Cosine(at(jump - 2), at(jump - 1)) > 0.9);
    CHECK(Cosine(at(jump), at(jump + 1)) > 0.9);
    CHECK(std::abs(Cosine(at(jump - 1), at(jump))) < 0.4);
  }
  path.jump = 0;
  CHECK(Cosine(at(23), at(24)) > 0.9);
}

TEST_CASE("a traffic's costs are its steps over the median step") {
  TrafficFigures figures;
  figures.policy = "scout";
  figures.traffic = "steady";
  figures.batch = 3;
  figures.run.steps = {1, 2, 2, 2, 6};
  figures.run.gaps = {2, 2, 2, 6};
  figures.run.jumps = {6, 2};
  figures.run.after_jumps = {2};
  const nlohmann::json j = TrafficJson(figures);
  CHECK(j["median_step_seconds"].get<double>() == 2);
  CHECK(j["jump_over_median"].get<double>() == 2);
  CHECK(j["worst_jump_over_median"].get<double>() == 3);
  CHECK(j["after_jump_over_median"].get<double>() == 1);
  CHECK(j["arrival_over_median"].get<double>() == 0);
  CHECK_FALSE(j.contains("idle_share"));
  CHECK_THAT(TrafficLine(figures), Catch::Contains("2.00 x (3.00)"));
}

}  // namespace
}  // namespace sluice::bench
