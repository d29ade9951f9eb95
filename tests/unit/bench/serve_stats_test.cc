#include "src/bench/serve/serve_stats.h"

#include <catch2/catch.hpp>

namespace sluice::bench {
namespace {

using Outcome = RequestRecord::Outcome;

RequestRecord Done(size_t phase, double due, double first, double gap, int tokens) {
  RequestRecord r;
  r.phase = phase;
  r.due = due;
  r.committed = due + 0.01;
  r.first_token = first;
  r.last_token = first + gap * (tokens - 1);
  r.end = r.last_token;
  r.output_wanted = r.output_tokens = tokens;
  for (int i = 1; i < tokens; ++i) r.gaps.push_back(static_cast<float>(gap));
  r.outcome = Outcome::kDone;
  return r;
}

TEST_CASE("percentiles are values by nearest rank") {
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  const Percentiles p = PercentilesOf(values);
  CHECK(p.p10 == 10);
  CHECK(p.p50 == 50);
  CHECK(p.p99 == 99);
  CHECK(p.max == 100);
  CHECK(p.mean == 50.5);
  CHECK(PercentilesOf({7}).p99 == 7);
  CHECK(PercentilesOf({}).samples == 0);
}

TEST_CASE("a counted phase lasts until its last request has ended, with its own tokens") {
  const Phase phase = *Phase::Parse("name=a,concurrency=2,requests=3");
  LoadResult result;
  result.phases = {{1.0, 1.5, 0}};
  result.requests = {Done(0, 1.0, 1.1, 0.1, 10), Done(0, 1.0, 1.3, 0.1, 20)};
  RequestRecord failed;
  failed.outcome = Outcome::kFailed;
  failed.error = "UNAVAILABLE DRAINING";
  failed.message = "it drains";
  failed.end = 9;
  result.requests.push_back(failed);
  result.tokens.assign(100, 1);
  const PhaseStats s = StatsOf(result, phase, 0, {});
  CHECK(s.came == 3);
  CHECK(s.done == 2);
  CHECK(s.failed == 1);
  CHECK(s.errors.at("UNAVAILABLE DRAINING") == 1);
  CHECK(s.tokens == 30);
  CHECK(s.seconds == Approx(2.2));
  CHECK(s.tokens_per_second == Approx(30 / 2.2));
  CHECK(s.ttft.p50 == Approx(0.1));
  CHECK(s.ttft.max == Approx(0.3));
  CHECK(s.tpot.mean == Approx(0.1));
  CHECK(s.itl.samples == 28);
}

TEST_CASE("a timed phase counts every token that came while it lasted") {
  const Phase phase = *Phase::Parse("name=b,rate=5,seconds=10s");
  LoadResult result;
  result.phases = {{0, 2, 0}, {2, 12, 5}};
  result.tokens.assign(200, 3);  // 30 per second, including requests of the previous phase.
  result.requests = {Done(0, 1, 3, 0.1, 10), Done(1, 4, 5, 0.1, 4)};
  const PhaseStats s = StatsOf(result, phase, 1, {});
  CHECK(s.came == 1);
  CHECK(s.seconds == 10);
  CHECK(s.tokens_per_second == Approx(30));
  CHECK(s.slices.samples == 10);
  CHECK(s.requests_per_second == Approx(0.1));
}

TEST_CASE("a request decodes from its first token to its last") {
  LoadResult result;
  result.tokens.resize(10);
  result.requests = {Done(0, 0, 0.2, 0.1, 4), Done(0, 0, 0.31, 0.1, 2), RequestRecord()};
  CHECK(DecodingOverTime(result) == std::vector<uint32_t>{0, 0, 1, 2, 1, 0, 0, 0, 0, 0});
}

TEST_CASE("goodput counts requests that are done within the bounds") {
  const Phase phase = *Phase::Parse("name=a,concurrency=2,requests=4");
  LoadResult result;
  result.phases = {{0, 1, 0}};
  RequestRecord slow_gap = Done(0, 0, 0.1, 0.01, 50);
  slow_gap.gaps[3] = 0.5F;
  RequestRecord refused;
  refused.outcome = Outcome::kRefused;
  refused.error = "RESOURCE_EXHAUSTED DRAM_FULL";
  refused.refusals = 2;
  refused.refusals_without_retry_info = 1;
  refused.longest_retry_delay = 0.75;
  result.requests = {Done(0, 0, 0.1, 0.01, 50), Done(0, 0, 0.9, 0.01, 11), slow_gap, refused};
  const ServiceLevel bounds = {0.5, 0.1};
  const PhaseStats s = StatsOf(result, phase, 0, bounds);
  CHECK(s.good_share == Approx(0.25));
  CHECK(s.refused == 1);
  CHECK(s.refusals == 2);
  CHECK(s.refusals_without_retry_info == 1);
  CHECK(s.longest_retry_delay == 0.75);
  CHECK(StatsOf(result, phase, 0, {}).good_share == Approx(0.75));
  const std::string table = TableOf(s, bounds);
  CHECK_THAT(table, Catch::Matchers::Contains("1 x RESOURCE_EXHAUSTED DRAM_FULL") &&
                        Catch::Matchers::Contains("goodput"));
}

}  // namespace
}  // namespace sluice::bench
