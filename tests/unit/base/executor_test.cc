#include "src/base/executor.h"

#include <pthread.h>

#include <catch2/catch.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "src/base/manual_clock.h"
#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(30);

TEST_CASE("functions run by due time, equals in the order in which they came") {
  SplitMix64 rng(TestSeed());
  ManualClock clock;
  ManualExecutor executor(&clock);
  const absl::Time start = clock.Now();
  struct Ran {
    int64_t due_ms;
    int order;
  };
  std::vector<Ran> ran;
  for (int i = 0; i < 500; ++i) {
    const auto due_ms = static_cast<int64_t>(rng.Below(20));
    executor.PostAt(start + absl::Milliseconds(due_ms), [&ran, &clock, start, due_ms, i] {
      CHECK(clock.Now() == start + absl::Milliseconds(due_ms));
      ran.push_back({due_ms, i});
    });
  }
  CHECK(executor.pending() == 500);
  const size_t count = executor.Advance(absl::Milliseconds(9));
  CHECK(count == ran.size());
  CHECK(count > 0);
  CHECK(clock.Now() == start + absl::Milliseconds(9));
  CHECK(ran.back().due_ms <= 9);
  executor.Advance(absl::Seconds(1));
  REQUIRE(ran.size() == 500);
  for (size_t i = 1; i < ran.size(); ++i) {
    CHECK(std::pair(ran[i - 1].due_ms, ran[i - 1].order) < std::pair(ran[i].due_ms, ran[i].order));
  }
}

TEST_CASE("an overdue function runs before one posted later") {
  ManualClock clock;
  ManualExecutor executor(&clock);
  std::string ran;
  executor.PostAt(clock.Now() + absl::Seconds(1), [&] { ran += 'a'; });
  clock.Advance(absl::Seconds(2));
  executor.Post([&] { ran += 'c'; });
  executor.PostAt(absl::InfinitePast(), [&] { ran += 'd'; });
  CHECK(executor.RunDue() == 3);
  CHECK(ran == "acd");
}

TEST_CASE("a function may hand in more, timed ones at the time they see") {
  ManualClock clock;
  ManualExecutor executor(&clock);
  int ticks = 0;
  std::function<void()> tick = [&] {
    ++ticks;
    executor.PostAt(clock.Now() + absl::Seconds(1), tick);
  };
  executor.Post(tick);
  executor.Advance(absl::Seconds(10));
  CHECK(ticks == 11);
  CHECK(executor.pending() == 1);
  CHECK_FALSE(executor.RunOne());
}

TEST_CASE("a thread executor runs everything on its one named thread, in order") {
  std::vector<int> ran;
  std::string name;
  std::thread::id thread;
  absl::Notification done;
  auto executor = NewThreadExecutor("sluice-reaper-of-leases", RealClock());
  for (int i = 0; i < 1000; ++i) {
    executor->Post([&, i] {
      if (i == 0) thread = std::this_thread::get_id();
      CHECK(thread == std::this_thread::get_id());
      ran.push_back(i);
    });
  }
  executor->Post([&] {
    char buffer[16] = {};
    pthread_getname_np(pthread_self(), buffer, sizeof(buffer));
    name = buffer;
    done.Notify();
  });
  REQUIRE(done.WaitForNotificationWithTimeout(kPatience));
  CHECK(thread != std::this_thread::get_id());
  CHECK(name == "sluice-reaper-o");
  REQUIRE(ran.size() == 1000);
  for (int i = 0; i < 1000; ++i) CHECK(ran[i] == i);
}

TEST_CASE("a timed function waits for its time, and an earlier one handed in later goes first") {
  auto executor = NewThreadExecutor("timed", RealClock());
  std::string ran;
  absl::Notification done;
  const absl::Time start = RealClock()->Now();
  absl::Time at;
  executor->PostAt(start + absl::Milliseconds(60), [&] {
    at = RealClock()->Now();
    ran += 'b';
    done.Notify();
  });
  executor->PostAt(start + absl::Milliseconds(20), [&] { ran += 'a'; });
  REQUIRE(done.WaitForNotificationWithTimeout(kPatience));
  CHECK(ran == "ab");
  CHECK(at >= start + absl::Milliseconds(60));
}

TEST_CASE("destruction runs what is due and drops the rest") {
  int due = 0;
  bool late = false;
  bool posted_while_stopping = false;
  absl::Notification gate;
  absl::Notification started;
  auto executor = NewThreadExecutor("ends", RealClock());
  Executor* raw = executor.get();
  executor->Post([&] {
    started.Notify();
    gate.WaitForNotification();
  });
  REQUIRE(started.WaitForNotificationWithTimeout(kPatience));
  for (int i = 0; i < 10; ++i) executor->Post([&] { ++due; });
  executor->Post([&, raw] { raw->Post([&] { posted_while_stopping = true; }); });
  executor->PostAt(RealClock()->Now() + absl::Hours(1), [&] { late = true; });
  std::thread opener([&] {
    absl::SleepFor(absl::Milliseconds(50));  // by then the destructor has begun
    gate.Notify();
  });
  executor.reset();
  opener.join();
  CHECK(due == 10);
  CHECK_FALSE(late);
  CHECK_FALSE(posted_while_stopping);
}

}  // namespace
}  // namespace sluice
