// Tests that pages are given out again only after their last writer is gone. ThreadSanitizer sees
// whether the old writer and the new one are ordered; the bytes show whether the old one wrote too
// late.
#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "src/base/error.h"
#include "tests/unit/kv/transfer_support.h"

namespace sluice {
namespace {

// A table whose DRAM holds one transfer, but not two.
struct OneRoom : Table {
  OneRoom() : Table(13 << 10) {}
};

// Writes one block again and again while it is held up, and then lets go.
class HeldUpWriter {
 public:
  HeldUpWriter(Table* t, const std::string& id) {
    // Every block of the layer's first kind, which the next transfer writes first.
    header_ = {id, 0, "kv", 0, 3, 0, kContext, 0};
    payload_.assign(t->PayloadBytes(header_), 0xEE);
    header_.crc32c = Crc32c(payload_);
    auto landing = t->table->BeginChunk(header_, payload_.size());
    REQUIRE(landing.ok());
    thread_ = std::thread([this, held = *std::move(landing)]() mutable {
      absl::Span<const uint8_t> left(payload_);
      held->Append(left.subspan(0, 64));
      left.remove_prefix(64);
      while (!go_on_) std::this_thread::yield();
      // It writes slowly, so that a transfer that took the pages too early would be overwritten.
      while (!left.empty()) {
        held->Append(left.subspan(0, 16));
        left.remove_prefix(std::min<size_t>(16, left.size()));
        std::this_thread::yield();
      }
      status_ = held->Finish().status();
      gone_ = true;
      held.reset();
    });
  }
  ~HeldUpWriter() {
    if (thread_.joinable()) (void)End();
  }
  void GoOn() { go_on_ = true; }
  // Returns whether it has finished writing. From then on its pages may have another owner.
  bool gone() const { return gone_; }
  absl::Status End() {
    GoOn();
    thread_.join();
    return status_;
  }

 private:
  ChunkHeader header_;
  std::vector<uint8_t> payload_;
  std::atomic<bool> go_on_{false}, gone_{false};
  absl::Status status_;
  std::thread thread_;
};

// Ends a transfer while its writer is held up.
void EndBy(const std::string& how, OneRoom& t, const std::string& id) {
  if (how == "lease") {
    t.clock.Advance(absl::Seconds(11));
    REQUIRE(t.Reap() == 1);
  } else {
    REQUIRE(t.table->Abort(id, "").ok());
  }
  REQUIRE(t.table->open_transfers() == 0);
}

TEST_CASE("fence: the only pages go to the next transfer when the held-up writer has gone") {
  const std::string how = GENERATE("lease", "abort");
  INFO("ended by " << how);
  OneRoom t;
  const std::string first = t.Reserve();
  HeldUpWriter writer(&t, first);
  EndBy(how, t, first);
  // While the writer is held up, however long that is, no transfer gets the pages.
  for (int i = 0; i < 50; ++i) {
    const absl::Status refused = t.table->Reserve(t.Good()).status();
    REQUIRE(ReasonOf(refused) == "DRAM_FULL");
    REQUIRE(RetryAfterOf(refused).has_value());
    t.clock.Advance(absl::Seconds(1));
  }
  // Another thread tries all the time, and writes as soon as it has the pages.
  std::atomic<bool> early{false};
  std::string second;
  std::thread next([&] {
    for (;;) {
      const auto reserved = t.table->Reserve(t.Good());
      if (reserved.ok()) {
        early = !writer.gone();
        second = reserved->transfer_id;
        break;
      }
      std::this_thread::yield();
    }
    for (const ChunkHeader& chunk : t.AllChunks(second)) (void)t.Land(chunk, t.Payload(chunk));
  });
  writer.GoOn();
  next.join();
  CHECK_FALSE(early);
  CHECK(ReasonOf(writer.End()) == "TRANSFER_NOT_FOUND");  // never acknowledged
  REQUIRE(t.table->Commit(second, {}, nullptr).ok());
  auto ready = t.table->TakeReady(*t.table->Attach(ById(second)));
  REQUIRE(ready.ok());
  REQUIRE(ready->has_value());
  CHECK(t.Intact(*(*ready)->home, second));
  ready->reset();
  CHECK(t.Empty());
}

TEST_CASE("fence: a sequence is handed to the engine only when no writer has its pages") {
  OneRoom t;
  const std::string id = t.ReserveAndFill();
  const auto generate = t.table->Attach(ById(id));
  REQUIRE(generate.ok());
  // A held-up repeat of a landed chunk reads the pages.
  const ChunkHeader chunk = t.AllChunks(id)[0];
  const std::vector<uint8_t> payload = t.Payload(chunk);
  ChunkHeader again = chunk;
  again.crc32c = Crc32c(payload);
  auto landing = t.table->BeginChunk(again, payload.size());
  REQUIRE(landing.ok());
  REQUIRE(t.table->Commit(id, {}, nullptr).ok());
  REQUIRE_FALSE(t.table->TakeReady(*generate)->has_value());
  std::atomic<bool> finished{false};
  uint64_t newly_landed = 99;  // Catch2's checks are for one thread
  std::thread repeat([&, held = *std::move(landing)]() mutable {
    held->Append(payload);
    newly_landed = held->Finish().value_or(99);
    finished = true;
    held.reset();
  });
  for (;;) {
    auto ready = t.table->TakeReady(*generate);
    REQUIRE(ready.ok());
    if (!ready->has_value()) continue;
    CHECK(finished);
    // The engine writes here, as it does when a sequence grows.
    *(*ready)->home->BlockAddress(0, 0, 0, 0) ^= 1;
    break;
  }
  repeat.join();
  CHECK(newly_landed == 0);
  CHECK(t.Empty());
}

TEST_CASE(
    "fence: writers, aborts and leases at random leave no page behind and none with two owners") {
  Table t(18 << 10);  // room for three
  std::atomic<int> landed{0}, foreign{0};
  const auto sender = [&](uint64_t seed) {
    SplitMix64 random(seed);
    for (int opened = 0; opened < 40; ++opened) {
      auto reserved = t.table->Reserve(t.Good());
      while (!reserved.ok()) {  // until a lease ends or a transfer has finished
        absl::SleepFor(absl::Microseconds(50));
        reserved = t.table->Reserve(t.Good());
      }
      const std::string& id = reserved->transfer_id;
      const uint64_t stop_at = random.Below(60);
      uint64_t n = 0;
      for (const ChunkHeader& chunk : t.AllChunks(id)) {
        if (n++ == stop_at) break;  // gives up here; the lease or an abort ends it
        if (!t.Land(chunk, t.Payload(chunk)).ok()) break;
      }
      if (t.table->Commit(id, {}, nullptr).ok()) {
        const auto attached = t.table->Attach(ById(id));
        if (!attached.ok()) continue;  // its lease ended meanwhile
        auto ready = t.table->TakeReady(*attached);
        if (!ready.ok()) continue;
        if (!ready->has_value()) {
          t.table->Detach(*attached, /*abort_transfer=*/true);
          continue;
        }
        ++(t.Intact(*(*ready)->home, id) ? landed : foreign);
      } else if (random.Below(2) == 0) {
        (void)t.table->Abort(id, "");
      }
    }
  };
  std::vector<std::thread> senders;
  for (uint64_t s = 0; s < 3; ++s) senders.emplace_back(sender, 11 + s);
  std::atomic<bool> over{false};
  std::thread time([&] {
    while (!over) {
      t.clock.Advance(absl::Seconds(1));
      t.Reap();
      absl::SleepFor(absl::Microseconds(200));
    }
  });
  for (std::thread& thread : senders) thread.join();
  over = true;
  time.join();
  t.clock.Advance(absl::Seconds(20));
  t.Reap();
  CHECK(landed > 0);
  CHECK(foreign == 0);
  CHECK(t.Empty());
}

}  // namespace
}  // namespace sluice
