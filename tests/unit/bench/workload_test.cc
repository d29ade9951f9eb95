#include "src/bench/serve/workload.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

namespace sluice::bench {
namespace {

using Catch::Matchers::Contains;

TEST_CASE("lengths are fixed or lognormal, and never outside their bounds") {
  SplitMix64 random(1);
  const Lengths fixed = *Lengths::Parse("512");
  CHECK(fixed.Draw(random, 4096) == 512);
  CHECK(fixed.Draw(random, 100) == 100);
  const Lengths drawn = *Lengths::Parse("lognormal:200:0.5");
  std::vector<double> logs;
  for (int i = 0; i < 20000; ++i) {
    const int64_t n = drawn.Draw(random, 100000);
    REQUIRE(n >= 1);
    logs.push_back(std::log(static_cast<double>(n)));
  }
  double mean = 0, square = 0;
  for (double v : logs) mean += v / 20000;
  for (double v : logs) square += (v - mean) * (v - mean) / 20000;
  // Six standard errors of the mean are 0.021; rounding adds less.
  CHECK(mean == Approx(std::log(200.0)).margin(0.025));
  CHECK(std::sqrt(square) == Approx(0.5).margin(0.02));
  for (int i = 0; i < 1000; ++i) CHECK(drawn.Draw(random, 150) <= 150);
}

TEST_CASE("a length that makes no sense is refused") {
  for (const char* text : {"", "0", "-1", "x", "1:2", "lognormal", "lognormal:5", "lognormal:5:0",
                           "lognormal:0:1", "lognormal:5:4", "lognormal:5:1:1", "99999999999"}) {
    INFO(text);
    CHECK_FALSE(Lengths::Parse(text).ok());
  }
}

TEST_CASE("phases are read by key") {
  const Phase full = *Phase::Parse("name=full,concurrency=64,seconds=30s");
  CHECK(full.concurrency == 64);
  CHECK(full.seconds == 30);
  CHECK(full.retry);
  const Phase over = *Phase::Parse("name=over,rate=4x,requests=9,on-refusal=count");
  CHECK(over.rate == 4);
  CHECK(over.rate_is_factor);
  CHECK(over.requests == 9);
  CHECK_FALSE(over.retry);
}

TEST_CASE("a phase that makes no sense is refused with its key") {
  const auto error = [](const char* text) {
    return std::string(Phase::Parse(text).status().message());
  };
  CHECK_THAT(error("concurrency=1,seconds=1"), Contains("name=NAME"));
  CHECK_THAT(error("name=a,seconds=1"), Contains("rate and concurrency"));
  CHECK_THAT(error("name=a,rate=1,concurrency=1,seconds=1"), Contains("rate and concurrency"));
  CHECK_THAT(error("name=a,rate=1"), Contains("requests and seconds"));
  CHECK_THAT(error("name=a,rate=x,seconds=1"), Contains("'rate'"));
  CHECK_THAT(error("name=a,rate=-1,seconds=1"), Contains("'rate'"));
  CHECK_THAT(error("name=a,rate=1,seconds=0"), Contains("'seconds'"));
  CHECK_THAT(error("name=a,rate=1,seconds=1,on-refusal=cry"), Contains("retry or count"));
  CHECK_THAT(error("name=a,raet=1,seconds=1"), Contains("'raet'") && Contains("rate"));
}

TEST_CASE("the same seed gives the same requests, another one others") {
  const Phase phase = *Phase::Parse("name=a,rate=100,requests=50");
  const Lengths lengths = *Lengths::Parse("lognormal:100:0.5");
  Arrivals one(phase, lengths, lengths, 2048, 7), same(phase, lengths, lengths, 2048, 7),
      other(phase, lengths, lengths, 2048, 8);
  int differ = 0;
  for (int i = 0; i < 50; ++i) {
    const PlannedRequest a = one.Next(), b = same.Next(), c = other.Next();
    CHECK((a.at == b.at && a.prompt == b.prompt && a.output == b.output && a.seed == b.seed));
    differ += a.at != c.at && a.seed != c.seed ? 1 : 0;
    CHECK(a.prompt + a.output <= 2048);
  }
  CHECK(differ == 50);
}

TEST_CASE("open-loop arrivals are a Poisson process of the rate that was asked for") {
  const Phase phase = *Phase::Parse("name=a,rate=200,seconds=1");
  Arrivals arrivals(phase, {10, 0}, {10, 0}, 2048, 3);
  constexpr int kCount = 20000;
  double last = 0, square = 0;
  for (int i = 0; i < kCount; ++i) {
    const double at = arrivals.Next().at;
    REQUIRE(at >= last);
    square += (at - last) * (at - last) / kCount;
    last = at;
  }
  // Gaps are exponential: mean 1/200, second moment 2/200^2; their standard errors are 0.7 and
  // 1.6 % of them.
  CHECK(last / kCount == Approx(1.0 / 200).epsilon(0.05));
  CHECK(square == Approx(2.0 / 40000).epsilon(0.1));
}

}  // namespace
}  // namespace sluice::bench
