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

// A reader's wait, and what the reader was told.
struct Wait {
  std::optional<absl::StatusOr<Rooms::Awaited>> told;
  uint64_t wait = 0;

  void AwaitPrompt(Rooms& rooms, const std::string& reader = "v", const std::string& digest = "d",
                   const Rooms::Key& key = kRoom) {
    wait = rooms.AwaitPrompt(key, digest, reader, [this](absl::StatusOr<Rooms::Awaited> met) {
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

std::shared_ptr<Rooms::Promise> Opened(Rooms& rooms, const Rooms::Key& key = kRoom) {
  auto promise = rooms.Open(key, "d");
  REQUIRE(promise.ok());
  return *std::move(promise);
}

TEST_CASE("the legs meet in a room, whichever comes first") {
  const auto rooms = std::make_shared<Rooms>();
  Wait before, between, after;
  before.AwaitPrompt(*rooms);
  CHECK(before.waits());
  const auto promise = Opened(*rooms);
  CHECK(before.waits());
  between.AwaitPrompt(*rooms);
  CHECK(between.waits());
  promise->Fill("held");
  CHECK(before.source() == "held");
  CHECK(between.source() == "held");
  after.AwaitPrompt(*rooms);
  CHECK(after.source() == "held");
  CHECK(after.wait == 0);
}

TEST_CASE("a reader that stops waiting is told whether the prompt is expected") {
  const auto rooms = std::make_shared<Rooms>();
  Wait early, late;
  early.AwaitPrompt(*rooms);
  rooms->StopWaiting(early.wait);
  REQUIRE(early.told.has_value());
  REQUIRE(early.told->ok());
  CHECK(!(*early.told)->expected);
  CHECK(early.source().empty());
  rooms->StopWaiting(early.wait);  // says nothing twice
  const auto promise = Opened(*rooms);
  late.AwaitPrompt(*rooms);
  rooms->StopWaiting(late.wait);
  REQUIRE(late.told->ok());
  CHECK((*late.told)->expected);
  promise->Fill("held");
}

TEST_CASE("a room is one prompt's and one reader's") {
  const auto rooms = std::make_shared<Rooms>();
  auto promise = Opened(*rooms);
  CHECK(rooms->Open(kRoom, "other").status().code() == absl::StatusCode::kAlreadyExists);
  CHECK(ReasonOf(rooms->Open(kRoom, "d").status()) == "ROOM_TAKEN");
  Wait first, second, again;
  first.AwaitPrompt(*rooms, "first");
  second.AwaitPrompt(*rooms, "second");
  CHECK(second.reason() == "ROOM_TAKEN");
  promise->Fill("held");
  again.AwaitPrompt(*rooms, "first");
  CHECK(again.source() == "held");
  promise.reset();
  // Anybody may have a room that is empty again.
  const auto next = Opened(*rooms);
  Wait other;
  other.AwaitPrompt(*rooms, "second");
  CHECK(other.waits());
  next->Fill("next");
  CHECK(other.source() == "next");
}

TEST_CASE("a room of another tenant is another room") {
  const auto rooms = std::make_shared<Rooms>();
  const auto mine = Opened(*rooms, {"a", 7});
  mine->Fill("a's");
  Wait stranger;
  stranger.AwaitPrompt(*rooms, "v", "d", {"b", 7});
  CHECK(stranger.waits());
  const auto theirs = Opened(*rooms, {"b", 7});
  theirs->Fill("b's");
  CHECK(stranger.source() == "b's");
}

TEST_CASE("who expects another prompt gets none, first or last") {
  const auto rooms = std::make_shared<Rooms>();
  Wait before, after, right;
  before.AwaitPrompt(*rooms, "v", "another");
  const auto promise = Opened(*rooms);
  CHECK(before.reason() == "SOURCE_MISMATCH");
  after.AwaitPrompt(*rooms, "w", "another");
  CHECK(after.reason() == "SOURCE_MISMATCH");
  right.AwaitPrompt(*rooms, "right");  // neither took the reader's room
  promise->Fill("held");
  CHECK(right.source() == "held");
}

TEST_CASE("who waits hears what became of a prompt that is not computed") {
  const auto rooms = std::make_shared<Rooms>();
  SECTION("it failed") {
    auto promise = Opened(*rooms);
    Wait visit;
    visit.AwaitPrompt(*rooms);
    promise->Fail(ResourceExhausted("HOLD_FULL", "full", absl::Seconds(1)));
    CHECK(visit.waits());
    promise.reset();
    CHECK(visit.reason() == "HOLD_FULL");
  }
  SECTION("it was given up") {
    auto promise = Opened(*rooms);
    Wait visit;
    visit.AwaitPrompt(*rooms);
    promise.reset();
    CHECK(visit.reason() == "SOURCE_NOT_FOUND");
  }
}

TEST_CASE("no more readers may wait than the limit allows") {
  const auto rooms = std::make_shared<Rooms>(/*max_waiting=*/2);
  Wait a, b, c, d;
  a.AwaitPrompt(*rooms, "a", "d", {"", 1});
  b.AwaitPrompt(*rooms, "b", "d", {"", 2});
  c.AwaitPrompt(*rooms, "c", "d", {"", 3});
  CHECK(c.reason() == "ROOMS_FULL");
  rooms->StopWaiting(a.wait);
  d.AwaitPrompt(*rooms, "d", "d", {"", 3});
  CHECK(d.waits());
  rooms->StopWaiting(b.wait);
  rooms->StopWaiting(d.wait);
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
        if (t % 2 == 0) {  // two threads promise, and one of them is refused now and then
          const auto promise = rooms->Open(key, "d");
          if (promise.ok() && i % 3 != 0) (*promise)->Fill("held");
          continue;
        }
        absl::Notification done;
        const uint64_t wait = rooms->AwaitPrompt(key, "d", std::to_string(t),
                                                 [&](const absl::StatusOr<Rooms::Awaited>& what) {
                                                   if (what.ok() && !what->source_id.empty()) ++met;
                                                   ++told;
                                                   done.Notify();
                                                 });
        if (wait != 0) rooms->StopWaiting(wait);
        done.WaitForNotification();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(told == kThreads / 2 * kRounds);
  // Nothing stayed behind: anybody may have every room.
  for (int i = 0; i < kRounds; ++i) CHECK(rooms->Open({"", static_cast<uint64_t>(i)}, "d").ok());
}

}  // namespace
}  // namespace sluice
