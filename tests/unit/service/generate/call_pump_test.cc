#include "src/service/generate/call_pump.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"

namespace sluice {
namespace {

class Source final : public CallPump::Source {
 public:
  explicit Source(std::function<void()> pump) : pump_(std::move(pump)) {}

 private:
  void Pump() override { pump_(); }
  const std::function<void()> pump_;
};

// Holds the pump's thread until it is destroyed.
class Hold {
 public:
  explicit Hold(CallPump* pump) : pump_(pump) {
    pump_->Wake(&source_);
    begun_.WaitForNotification();
  }
  ~Hold() {
    go_on_.Notify();
    pump_->Forget(&source_);
  }

 private:
  CallPump* const pump_;
  absl::Notification begun_, go_on_;
  Source source_{[this] {
    begun_.Notify();
    go_on_.WaitForNotification();
  }};
};

TEST_CASE("sources run in the order in which they were woken, each once") {
  CallPump pump;
  std::vector<int> ran;
  absl::Notification all;
  Source one([&] { ran.push_back(1); });
  Source two([&] { ran.push_back(2); });
  Source end([&] { all.Notify(); });
  {
    const Hold hold(&pump);
    for (Source* source : {&two, &one, &two, &end, &one}) pump.Wake(source);
  }
  all.WaitForNotification();
  CHECK(ran == std::vector<int>{2, 1});
  for (Source* source : {&one, &two, &end}) pump.Forget(source);
}

TEST_CASE("a source that is woken while it runs runs again") {
  CallPump pump;
  int runs = 0;
  absl::Notification again;
  std::unique_ptr<Source> source;
  source = std::make_unique<Source>([&] {
    if (++runs == 1) {
      pump.Wake(source.get());
    } else {
      again.Notify();
    }
  });
  pump.Wake(source.get());
  again.WaitForNotification();
  pump.Forget(source.get());
  CHECK(runs == 2);
}

TEST_CASE("a source that was forgotten does not run, and those around it do") {
  const int forgotten = GENERATE(0, 1, 2);
  CallPump pump;
  std::vector<int> ran;
  std::vector<std::unique_ptr<Source>> sources;
  for (int i = 0; i < 3; ++i) {
    sources.push_back(std::make_unique<Source>([&ran, i] { ran.push_back(i); }));
  }
  absl::Notification all;
  Source end([&] { all.Notify(); });
  {
    const Hold hold(&pump);
    for (const auto& source : sources) pump.Wake(source.get());
    pump.Forget(sources[static_cast<size_t>(forgotten)].get());
    sources[static_cast<size_t>(forgotten)].reset();
    pump.Wake(&end);
  }
  all.WaitForNotification();
  std::vector<int> expected = {0, 1, 2};
  expected.erase(expected.begin() + forgotten);
  CHECK(ran == expected);
  for (const auto& source : sources) {
    if (source != nullptr) pump.Forget(source.get());
  }
  pump.Forget(&end);
}

TEST_CASE("sources come and go while others wake them, and none runs after it is forgotten") {
  CallPump pump;
  std::atomic<int> after = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 2000; ++round) {
        std::atomic<bool> gone = false;
        Source source([&] {
          if (gone) ++after;
        });
        for (int i = 0; i < round % 4; ++i) pump.Wake(&source);
        pump.Forget(&source);
        gone = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(after == 0);
}

}  // namespace
}  // namespace sluice
