#include "src/device/mailbox.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <stdexcept>
#include <thread>
#include <vector>

#include "src/base/status_macros.h"
#include "src/device/mailbox_team.h"
#include "tests/unit/device/devices.h"

namespace sluice {
namespace {

// A device with a stream and a mailbox, and pinned memory that both sides use. A round: the stream
// copies `ticket` to the question, the workers each answer with a number made of it, and the stream
// copies the answers to the log of that round.
class Exchange {
 public:
  Exchange(Device& device, const MailboxOptions& options)
      : options_(options),
        stream_(device.NewStream(Device::StreamKind::kCompute)),
        done_(device.NewEvent()),
        mailbox_(*device.NewMailbox(options)),
        memory_(*device.Allocate(MemoryKind::kPinned, kWords * sizeof(uint64_t), "a test")) {}
  ~Exchange() { Finish(); }

  // Words of pinned memory that last as long as the test.
  uint64_t* Words(int count) {
    SLUICE_CHECK(used_ + count <= kWords);
    used_ += count;
    return memory_.as<uint64_t>() + used_ - count;
  }
  // Waits until the stream has done everything.
  void Finish() {
    stream_->Record(*done_);
    done_->Wait();
  }

  Mailbox& mailbox() { return *mailbox_; }
  Stream& stream() { return *stream_; }
  int workers() const { return options_.workers; }

 private:
  static constexpr int kWords = 1 << 16;
  const MailboxOptions options_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<Event> done_;
  const std::unique_ptr<Mailbox> mailbox_;
  const Buffer memory_;
  int used_ = 0;
};

uint64_t AnswerTo(uint64_t question, int worker) {
  return question * 1000 + static_cast<uint64_t>(worker) + 1;
}

// The memory of questions and answers: for each channel one question, and one answer per worker.
struct Papers {
  Papers(Exchange& e, int channels)
      : workers(e.workers()), questions(e.Words(channels)), answers(e.Words(channels * workers)) {}
  absl::Status Answer(int worker, int channel) const {
    answers[channel * workers + worker] = AnswerTo(questions[channel], worker);
    return absl::OkStatus();
  }
  const int workers;
  uint64_t* const questions;
  uint64_t* const answers;
};

void AskEverything(Device& device) {
  constexpr int kRounds = 300, kChannels = 3, kWorkers = 3;
  Exchange e(device, {.channels = kChannels, .workers = kWorkers, .slots = 4});
  const Papers papers(e, kChannels);
  uint64_t* const tickets = e.Words(kRounds);
  uint64_t* const log = e.Words(kRounds * kChannels * kWorkers);
  MailboxTeam team(&e.mailbox(), [&](int w, int c) { return papers.Answer(w, c); });
  for (int round = 0; round < kRounds; ++round) {
    tickets[round] = static_cast<uint64_t>(round) + 7;
    // All channels are under way at once; the last to be asked is the first to be waited for.
    for (int c = 0; c < kChannels; ++c) {
      e.stream().Copy(&papers.questions[c], &tickets[round], sizeof(uint64_t));
      e.mailbox().Raise(e.stream(), c);
    }
    for (int c = kChannels - 1; c >= 0; --c) e.mailbox().Await(e.stream(), c);
    e.stream().Copy(log + round * kChannels * kWorkers, papers.answers,
                    sizeof(uint64_t) * kChannels * kWorkers);
  }
  e.Finish();
  for (int i = 0; i < kRounds * kChannels * kWorkers; ++i) {
    REQUIRE(log[i] == AnswerTo(tickets[i / (kChannels * kWorkers)], i % kWorkers));
  }
  for (int slot = 0; slot < 4; ++slot) CHECK(e.mailbox().error(slot) == MailboxError::kNone);
}
SLUICE_TEST_ON_EVERY_DEVICE("a mailbox carries every question and every answer", AskEverything)

// The program's constants are the same each time; its question is not.
void RunAgain(Device& device) {
  constexpr int kRuns = 10000, kChannels = 2, kWorkers = 2;
  Exchange e(
      device,
      {.channels = kChannels, .workers = kWorkers, .slots = 1, .deadline = absl::Seconds(60)});
  const Papers papers(e, kChannels);
  std::atomic<int> answered{0};
  MailboxTeam team(&e.mailbox(), [&](int w, int c) {
    answered.fetch_add(1, std::memory_order_relaxed);
    if (w == 0) ++papers.questions[c];
    return absl::OkStatus();
  });
  auto program = device.Record(e.stream(), [&](Stream& s) {
    for (int c = 0; c < kChannels; ++c) {
      e.mailbox().Raise(s, c);
      e.mailbox().Await(s, c);
      // The next run begins with the state that one run leaves.
      s.Copy(&papers.answers[c], &papers.questions[c], sizeof(uint64_t));
      s.Copy(&papers.questions[c], &papers.answers[c], sizeof(uint64_t));
    }
  });
  REQUIRE(program.ok());
  for (int i = 0; i < kRuns; ++i) (*program)->Run(e.stream());
  e.Finish();
  CHECK(answered.load() == kRuns * kChannels * kWorkers);
  for (int c = 0; c < kChannels; ++c) CHECK(papers.answers[c] == kRuns);
  CHECK(e.mailbox().error(0) == MailboxError::kNone);
}
SLUICE_TEST_ON_EVERY_DEVICE("a program with rounds in it runs ten thousand times", RunAgain)

void ThrowingWorker(Device& device) {
  constexpr int kWorkers = 3;
  Exchange e(device, {.channels = 1, .workers = kWorkers, .slots = 3});
  for (int slot = 0; slot < 3; ++slot) e.mailbox().SetServers(slot, 1u << slot);
  const Papers papers(e, 1);
  std::atomic<int> round{0};
  MailboxTeam team(&e.mailbox(), [&](int w, int c) {
    if (w == 1 && round.load() == 2) throw std::runtime_error("a worker's fault");
    if (w == 2 && round.load() == 3) return absl::InternalError("another's");
    return papers.Answer(w, c);
  });
  for (int i = 0; i < 5; ++i) {
    round = i;
    papers.questions[0] = static_cast<uint64_t>(i) + 100;
    e.mailbox().Raise(e.stream(), 0);
    e.mailbox().Await(e.stream(), 0);
    e.Finish();
    CHECK(papers.answers[0] == AnswerTo(static_cast<uint64_t>(i) + 100, 0));
    CHECK(e.mailbox().error(0) == MailboxError::kNone);
    CHECK(e.mailbox().error(1) == (i >= 2 ? MailboxError::kFailed : MailboxError::kNone));
    CHECK(e.mailbox().errors()[2] == (i >= 3 ? 1 : 0));
  }
  // The slot serves its next sequence as if nothing had happened.
  e.mailbox().Reset(1);
  e.mailbox().Raise(e.stream(), 0);
  e.mailbox().Await(e.stream(), 0);
  e.Finish();
  CHECK(e.mailbox().error(1) == MailboxError::kNone);
}
SLUICE_TEST_ON_EVERY_DEVICE("a worker that throws fails its sequences, and answers", ThrowingWorker)

// A worker of the test's own, which answers until `stop`, or dies with a round taken up but not
// answered.
void AnswerUntil(Mailbox& mailbox, int worker, const std::atomic<bool>& stop,
                 const std::atomic<bool>& die) {
  while (!stop.load()) {
    if (mailbox.Poll(worker) < 0) {
      std::this_thread::yield();
    } else if (die.load()) {
      return mailbox.Leave(worker);
    } else {
      mailbox.Answer(worker);
    }
  }
}

void DyingWorker(Device& device) {
  Exchange e(device, {.channels = 2, .workers = 2, .slots = 2, .deadline = absl::Seconds(60)});
  for (int slot = 0; slot < 2; ++slot) e.mailbox().SetServers(slot, 1u << slot);
  std::atomic<bool> stop{false}, die{false};
  const std::atomic<bool> live{false};
  std::thread first([&] { AnswerUntil(e.mailbox(), 0, stop, live); });
  std::thread second([&] { AnswerUntil(e.mailbox(), 1, stop, die); });
  const auto round = [&] {
    for (int c = 0; c < 2; ++c) e.mailbox().Raise(e.stream(), c);
    for (int c = 0; c < 2; ++c) e.mailbox().Await(e.stream(), c);
    e.Finish();
  };
  round();
  CHECK(e.mailbox().error(1) == MailboxError::kNone);
  die = true;
  for (int i = 0; i < 20; ++i) round();
  CHECK(e.mailbox().error(0) == MailboxError::kNone);
  CHECK(e.mailbox().error(1) == MailboxError::kLeft);
  stop = true;
  first.join();
  second.join();
  // Now the other one dies too: the watchdog answers alone.
  e.mailbox().Leave(0);
  for (int i = 0; i < 20; ++i) round();
  CHECK(e.mailbox().error(0) == MailboxError::kLeft);
}
SLUICE_TEST_ON_EVERY_DEVICE("rounds go on when a worker dies, and when all have died", DyingWorker)

void SlowWorker(Device& device) {
  Exchange e(device, {.channels = 1, .workers = 2, .slots = 2, .deadline = absl::Milliseconds(50)});
  for (int slot = 0; slot < 2; ++slot) e.mailbox().SetServers(slot, 1u << slot);
  std::atomic<bool> stop{false}, slow{true}, refused{false}, back{false};
  const std::atomic<bool> live{false};
  std::thread first([&] { AnswerUntil(e.mailbox(), 0, stop, live); });
  std::thread second([&] {
    while (e.mailbox().Poll(1) < 0) std::this_thread::yield();
    while (slow.load()) std::this_thread::yield();
    refused = !e.mailbox().Answer(1);
    e.mailbox().Poll(1);
    back = true;
    AnswerUntil(e.mailbox(), 1, stop, live);
  });
  const auto round = [&] {
    e.mailbox().Raise(e.stream(), 0);
    e.mailbox().Await(e.stream(), 0);
    e.Finish();
  };
  for (int i = 0; i < 5; ++i)
    round();  // the first round takes the deadline, the others do not count on the worker
  CHECK(e.mailbox().error(0) == MailboxError::kNone);
  CHECK(e.mailbox().error(1) == MailboxError::kDeadline);
  slow = false;
  while (!back.load()) std::this_thread::yield();
  CHECK(refused.load());
  e.mailbox().Reset(1);
  for (int i = 0; i < 5; ++i) round();
  CHECK(e.mailbox().error(1) == MailboxError::kNone);
  stop = true;
  first.join();
  second.join();
}
SLUICE_TEST_ON_EVERY_DEVICE("a worker past the deadline is not waited for, and may come back",
                            SlowWorker)

void HoldingWorker(Device& device) {
  // The time is long enough that a worker on a busy machine has begun by then.
  Exchange e(device,
             {.channels = 1, .workers = 1, .slots = 1, .deadline = absl::Milliseconds(500)});
  std::atomic<bool> over{false}, over_while_held{true}, refused{false};
  std::thread worker([&] {
    while (e.mailbox().Poll(0) < 0) std::this_thread::yield();
    if (e.mailbox().Hold(0)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      over_while_held = over.load();
      e.mailbox().LetGo(0);
    }
    while (e.mailbox().Hold(0)) {
      e.mailbox().LetGo(0);
      std::this_thread::yield();
    }
    refused = !e.mailbox().Answer(0);
  });
  e.mailbox().Raise(e.stream(), 0);
  e.mailbox().Await(e.stream(), 0);
  e.Finish();
  over = true;
  worker.join();
  CHECK_FALSE(over_while_held.load());
  CHECK(refused.load());
  CHECK(e.mailbox().error(0) == MailboxError::kDeadline);
}
SLUICE_TEST_ON_EVERY_DEVICE("a round is not over while a worker holds it, and may be just after",
                            HoldingWorker)

void ShutDownInARound(Device& device) {
  Exchange e(device, {.channels = 1, .workers = 2, .slots = 1, .deadline = absl::Seconds(60)});
  {
    MailboxTeam team(&e.mailbox(), [](int, int) { return absl::OkStatus(); });
  }
  for (int i = 0; i < 3; ++i) {
    e.mailbox().Raise(e.stream(), 0);
    e.mailbox().Await(e.stream(), 0);
  }
  e.Finish();
  CHECK(e.mailbox().error(0) == MailboxError::kLeft);
}
SLUICE_TEST_ON_EVERY_DEVICE("streams come to their end when the workers have gone",
                            ShutDownInARound)

// Workers 31 to 63 need the second half of a set.
void ManyWorkers(Device& device) {
  constexpr int kWorkers = Mailbox::kMaxWorkers, kRounds = 20;
  Exchange e(device,
             {.channels = 2, .workers = kWorkers, .slots = 3, .deadline = absl::Seconds(60)});
  const int served_by[] = {0, 32, 63};
  for (int slot = 0; slot < 3; ++slot) {
    e.mailbox().SetServers(slot, uint64_t{1} << served_by[slot]);
  }
  const Papers papers(e, 2);
  std::atomic<bool> dies{false};
  MailboxTeam team(&e.mailbox(), [&](int w, int c) {
    if (w == 63 && dies.load()) return absl::AbortedError("a worker that dies");
    return papers.Answer(w, c);
  });
  for (int i = 0; i < kRounds; ++i) {
    dies = i == kRounds / 2;
    for (int c = 0; c < 2; ++c) {
      papers.questions[c] = static_cast<uint64_t>(100 * i + c);
      e.mailbox().Raise(e.stream(), c);
    }
    for (int c = 0; c < 2; ++c) e.mailbox().Await(e.stream(), c);
    e.Finish();
    const int present = i < kRounds / 2 ? kWorkers : kWorkers - 1;
    for (int c = 0; c < 2; ++c) {
      for (int w = 0; w < present; ++w) {
        REQUIRE(papers.answers[c * kWorkers + w] == AnswerTo(papers.questions[c], w));
      }
    }
  }
  CHECK(e.mailbox().error(0) == MailboxError::kNone);
  CHECK(e.mailbox().error(1) == MailboxError::kNone);
  CHECK(e.mailbox().error(2) == MailboxError::kLeft);
  CHECK(e.mailbox().gone() == uint64_t{1} << 63);
}
SLUICE_TEST_ON_EVERY_DEVICE("sixty-four workers answer, and the last of them may die", ManyWorkers)

TEST_CASE("mailbox options out of range are refused by name") {
  CHECK(Mailbox::CheckOptions({.workers = 65}).message() ==
        "mailbox: 65 workers; it takes 1 to 64");
  CHECK_FALSE(Mailbox::CheckOptions({.workers = 0}).ok());
  CHECK_FALSE(Mailbox::CheckOptions({.channels = 0}).ok());
  CHECK_FALSE(Mailbox::CheckOptions({.slots = 0}).ok());
  CHECK_FALSE(Mailbox::CheckOptions({.deadline = absl::ZeroDuration()}).ok());
  CHECK(Mailbox::CheckOptions({}).ok());
}

}  // namespace
}  // namespace sluice
