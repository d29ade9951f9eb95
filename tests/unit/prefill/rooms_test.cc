#include "src/prefill/rooms.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "src/base/error.h"

namespace sluice {
namespace {

const Rooms::Key kRoom{"", 7};

// A visit, and what it was told.
struct Visit {
  std::optional<absl::StatusOr<Rooms::Met>> told;
  uint64_t wait = 0;

  void Meet(Rooms& rooms, const std::string& visitor = "v", const std::string& digest = "d",
            const Rooms::Key& key = kRoom) {
    wait = rooms.Meet(key, digest, visitor, [this](absl::StatusOr<Rooms::Met> met) {
      REQUIRE(!told.has_value());
      told = std::move(met);
    });
  }
  bool waits() const { return !told.has_value(); }
  std::string source() const { return told.has_value() && told->ok() ? (*told)->source_id : ""; }
  std::string reason() const {
    return told.has_value() ? ReasonOf(told->status()).value_or("") : "";
  }
};

std::shared_ptr<Rooms::Place> Opened(Rooms& rooms, const Rooms::Key& key = kRoom) {
  auto place = rooms.Open(key, "d");
  REQUIRE(place.ok());
  return *std::move(place);
}

TEST_CASE("the legs meet in a room, whichever comes first") {
  const auto rooms = std::make_shared<Rooms>();
  Visit before, between, after;
  before.Meet(*rooms);
  CHECK(before.waits());
  const auto place = Opened(*rooms);
  CHECK(before.waits());
  between.Meet(*rooms);
  CHECK(between.waits());
  place->Fill("held");
  CHECK(before.source() == "held");
  CHECK(between.source() == "held");
  after.Meet(*rooms);
  CHECK(after.source() == "held");
  CHECK(after.wait == 0);
}

TEST_CASE("a visitor that leaves off is told whether the prompt is expected") {
  const auto rooms = std::make_shared<Rooms>();
  Visit early, late;
  early.Meet(*rooms);
  rooms->LeaveOff(early.wait);
  REQUIRE(early.told.has_value());
  REQUIRE(early.told->ok());
  CHECK(!(*early.told)->expected);
  CHECK(early.source().empty());
  rooms->LeaveOff(early.wait);  // says nothing twice
  const auto place = Opened(*rooms);
  late.Meet(*rooms);
  rooms->LeaveOff(late.wait);
  REQUIRE(late.told->ok());
  CHECK((*late.told)->expected);
  place->Fill("held");
}

TEST_CASE("a room is one prompt's and one reader's") {
  const auto rooms = std::make_shared<Rooms>();
  auto place = Opened(*rooms);
  CHECK(rooms->Open(kRoom, "other").status().code() == absl::StatusCode::kAlreadyExists);
  CHECK(ReasonOf(rooms->Open(kRoom, "d").status()) == "ROOM_TAKEN");
  Visit first, second, again;
  first.Meet(*rooms, "first");
  second.Meet(*rooms, "second");
  CHECK(second.reason() == "ROOM_TAKEN");
  place->Fill("held");
  again.Meet(*rooms, "first");
  CHECK(again.source() == "held");
  place.reset();
  // A room that is empty again is anybody's.
  const auto next = Opened(*rooms);
  Visit other;
  other.Meet(*rooms, "second");
  CHECK(other.waits());
  next->Fill("next");
  CHECK(other.source() == "next");
}

TEST_CASE("a room of another tenant is another room") {
  const auto rooms = std::make_shared<Rooms>();
  const auto mine = Opened(*rooms, {"a", 7});
  mine->Fill("a's");
  Visit stranger;
  stranger.Meet(*rooms, "v", "d", {"b", 7});
  CHECK(stranger.waits());
  const auto theirs = Opened(*rooms, {"b", 7});
  theirs->Fill("b's");
  CHECK(stranger.source() == "b's");
}

TEST_CASE("who expects another prompt gets none, first or last") {
  const auto rooms = std::make_shared<Rooms>();
  Visit before, after, right;
  before.Meet(*rooms, "v", "another");
  const auto place = Opened(*rooms);
  CHECK(before.reason() == "SOURCE_MISMATCH");
  after.Meet(*rooms, "w", "another");
  CHECK(after.reason() == "SOURCE_MISMATCH");
  right.Meet(*rooms, "right");  // neither took the reader's place
  place->Fill("held");
  CHECK(right.source() == "held");
}

TEST_CASE("who waits hears what became of a prompt that is not computed") {
  const auto rooms = std::make_shared<Rooms>();
  SECTION("it failed") {
    auto place = Opened(*rooms);
    Visit visit;
    visit.Meet(*rooms);
    place->Fail(ResourceExhausted("HOLD_FULL", "full", absl::Seconds(1)));
    CHECK(visit.waits());
    place.reset();
    CHECK(visit.reason() == "HOLD_FULL");
  }
  SECTION("it was given up") {
    auto place = Opened(*rooms);
    Visit visit;
    visit.Meet(*rooms);
    place.reset();
    CHECK(visit.reason() == "SOURCE_NOT_FOUND");
  }
}

TEST_CASE("no more may wait than the rooms have places for") {
  const auto rooms = std::make_shared<Rooms>(/*max_waiting=*/2);
  Visit a, b, c, d;
  a.Meet(*rooms, "a", "d", {"", 1});
  b.Meet(*rooms, "b", "d", {"", 2});
  c.Meet(*rooms, "c", "d", {"", 3});
  CHECK(c.reason() == "ROOMS_FULL");
  rooms->LeaveOff(a.wait);
  d.Meet(*rooms, "d", "d", {"", 3});
  CHECK(d.waits());
  rooms->LeaveOff(b.wait);
  rooms->LeaveOff(d.wait);
}

TEST_CASE("legs that come, wait, leave and go at once are each told once") {
  constexpr int kThreads = 4;
  constexpr int kRounds = 300;
  const auto rooms = std::make_shared<Rooms>();
  std::atomic<int> met = 0, told = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRounds; ++i) {
        const Rooms::Key key{"", static_cast<uint64_t>(i)};
        if (t % 2 == 0) {  // two that promise, of whom one is refused now and then
          const auto place = rooms->Open(key, "d");
          if (place.ok() && i % 3 != 0) (*place)->Fill("held");
          continue;
        }
        absl::Notification done;
        const uint64_t wait =
            rooms->Meet(key, "d", std::to_string(t), [&](const absl::StatusOr<Rooms::Met>& what) {
              if (what.ok() && !what->source_id.empty()) ++met;
              ++told;
              done.Notify();
            });
        if (wait != 0) rooms->LeaveOff(wait);
        done.WaitForNotification();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(told == kThreads / 2 * kRounds);
  // Nothing stayed behind: every room is anybody's.
  for (int i = 0; i < kRounds; ++i) CHECK(rooms->Open({"", static_cast<uint64_t>(i)}, "d").ok());
}

}  // namespace
}  // namespace sluice
