#include "src/base/failpoint.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

std::string Refusal(const std::string& terms) {
  const auto parsed = ParseFailpoints(terms);
  REQUIRE_FALSE(parsed.ok());
  CHECK(absl::IsInvalidArgument(parsed.status()));
  return std::string(parsed.status().message());
}

// Returns whether each of `hits` passes of kv.reserve failed, as 0 and 1.
std::string Faults(int hits) {
  std::string out;
  for (int i = 0; i < hits; ++i) out += SLUICE_FAILPOINT(kKvReserve) ? '1' : '0';
  return out;
}

TEST_CASE("a term is read as it is written") {
  for (const char* term :
       {"kv.reserve=error", "kv.reserve=delay(50ms)", "kv.copy=delay(1s)*3", "kv.wake=error%0.25",
        "kv.wake=error%0.5*3@10", "clock.jump=jump(-1h)@2", "kv.reap=off"}) {
    const auto parsed = ParseFailpoints(term);
    REQUIRE(parsed.ok());
    REQUIRE(parsed->size() == 1);
    CHECK(FormatFailpoint(parsed->front()) == std::string(term));
  }
  const auto two = ParseFailpoints(" kv.reserve=error*1 ;; kv.copy=delay(1.5s);");
  REQUIRE(two.ok());
  REQUIRE(two->size() == 2);
  CHECK((*two)[0].count == 1);
  CHECK((*two)[1].argument == absl::Milliseconds(1500));
  CHECK(ParseFailpoints("")->empty());
}

TEST_CASE("a wrong term is refused with what would be right") {
  CHECK(absl::StrContains(Refusal("kv.resrve=error"), "did you mean kv.reserve?"));
  CHECK(absl::StrContains(Refusal("kv.reserve"), "NAME=ACTION"));
  CHECK(absl::StrContains(Refusal("kv.reserve=explode"), "error, delay(50ms), kill or off"));
  CHECK(absl::StrContains(Refusal("kv.reserve=jump(1s)"), "error, delay(50ms), kill or off"));
  CHECK(absl::StrContains(Refusal("kv.copy=error"), "must be delay(50ms), kill or off"));
  CHECK(absl::StrContains(Refusal("clock.jump=error"), "jump(1h)"));
  CHECK(absl::StrContains(Refusal("kv.reserve=error(1)"), "error, delay(50ms), kill or off"));
  CHECK(absl::StrContains(Refusal("kv.copy=delay"), "delay(50ms), kill or off"));
  CHECK(absl::StrContains(Refusal("kv.copy=delay)"), "delay(50ms), kill or off"));
  CHECK(absl::StrContains(Refusal("kv.copy=delay(2h)"), "from 0 to 1m"));
  CHECK(absl::StrContains(Refusal("kv.copy=delay(-1s)"), "from 0 to 1m"));
  CHECK(absl::StrContains(Refusal("kv.copy=delay(50)"), "unit"));
  CHECK(absl::StrContains(Refusal("clock.jump=jump(inf)"), "-1000h to 1000h"));
  CHECK(absl::StrContains(Refusal("kv.reserve=error%0"), "probability"));
  CHECK(absl::StrContains(Refusal("kv.reserve=error%1.5"), "probability"));
  CHECK(absl::StrContains(Refusal("kv.reserve=error%nan"), "probability"));
  CHECK(absl::StrContains(Refusal("kv.reserve=error*0"), "from 1"));
  CHECK(absl::StrContains(Refusal("kv.reserve=error*-1"), "from 1"));
  CHECK(absl::StrContains(Refusal("kv.reserve=error@x"), "skip"));
  CHECK(absl::StrContains(Refusal("kv.reserve=error;kv.reserve=off"), "twice"));
  // The message stays short whatever was sent.
  CHECK(Refusal(std::string(100000, 'x')).size() < 300);
}

TEST_CASE("every failpoint has a name of its own, an effect and something that survives") {
  std::set<std::string> names;
  for (const FailpointState& state : ListFailpoints()) {
    const FailpointInfo& info = InfoOf(state.point);
    CHECK(names.insert(info.name).second);
    CHECK(absl::StrContains(info.name, "."));
    CHECK(std::string(info.effect).size() > 10);
    CHECK(std::string(info.survives).size() > 10);
  }
  CHECK(names.size() == kFailpoints);
}

#ifndef SLUICE_NO_FAILPOINTS

TEST_CASE("a failpoint fails by its term and counts what it did") {
  CHECK(Faults(3) == "000");
  {
    const ScopedFailpoints armed("kv.reserve=error");
    CHECK(Faults(3) == "111");
    CHECK_FALSE(SLUICE_FAILPOINT(kKvAdmit));  // another one
  }
  CHECK(Faults(2) == "00");
  CHECK(StateOf(Failpoint::kKvReserve).hits == 3);  // counts stay to be looked at
  {
    const ScopedFailpoints armed("kv.reserve=error*2@1");
    CHECK(Faults(5) == "01100");
    const FailpointState state = StateOf(Failpoint::kKvReserve);
    CHECK(state.hits == 3);  // it disarmed itself after the second fault
    CHECK(state.fired == 2);
    CHECK_FALSE(state.armed);
    CHECK(FormatFailpoint(state.term) == "kv.reserve=error*2@1");
  }
  {
    const ScopedFailpoints armed("kv.reserve=error");
    REQUIRE(ArmFailpoints("kv.reserve=off").ok());
    CHECK(Faults(2) == "00");
  }
}

TEST_CASE("a wrong term among others arms none of them") {
  CHECK_FALSE(ArmFailpoints("kv.reserve=error;kv.nothing=error").ok());
  CHECK(Faults(1) == "0");
}

TEST_CASE("the same seed draws the same faults, another seed others") {
  const auto draw = [](uint64_t seed) {
    const ScopedFailpoints armed("kv.reserve=error%0.3", seed);
    return Faults(400);
  };
  const std::string first = draw(7);
  CHECK(draw(7) == first);
  CHECK(draw(8) != first);
  // Of 400 draws with probability 0.3, 120 are expected, with standard deviation 9.2. The seeds are
  // fixed.
  const auto faults = std::count(first.begin(), first.end(), '1');
  CHECK(faults > 75);
  CHECK(faults < 165);
}

TEST_CASE("a delay sleeps, or does what the simulation says, and the place goes on") {
  const auto begin = std::chrono::steady_clock::now();
  {
    const ScopedFailpoints armed("kv.reserve=delay(30ms)*1");
    CHECK(Faults(2) == "00");
  }
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(30));
  absl::Duration slept;
  SetFailpointSleep([&](absl::Duration d) { slept += d; });
  {
    const ScopedFailpoints armed("kv.reserve=delay(40s)*2");
    CHECK(Faults(3) == "000");
  }
  SetFailpointSleep(nullptr);
  CHECK(slept == absl::Seconds(80));
}

TEST_CASE("threads that pass an armed failpoint together share its count") {
  const ScopedFailpoints armed("kv.reserve=error*100");
  std::atomic<int> faults{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 1000; ++i) faults += SLUICE_FAILPOINT(kKvReserve) ? 1 : 0;
      });
    }
  }
  CHECK(faults == 100);
}

#else

TEST_CASE("without failpoints arming is refused and places never fail") {
  const absl::Status status = ArmFailpoints("kv.reserve=error");
  CHECK(absl::IsFailedPrecondition(status));
  CHECK(absl::StrContains(status.message(), "SLUICE_FAILPOINTS"));
  CHECK(ArmFailpoints("").ok());
  static_assert(!SLUICE_FAILPOINT(kKvReserve));
  CHECK(Faults(3) == "000");
}

#endif

}  // namespace
}  // namespace sluice
