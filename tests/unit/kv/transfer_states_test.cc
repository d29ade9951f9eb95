// Tests the answer of each call in each state of a transfer: the table of src/kv/transfer_table.h,
// cell by cell. It also tests the races between calls.
#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "src/base/error.h"
#include "tests/unit/kv/transfer_support.h"

namespace sluice {
namespace {

constexpr char kRoom[] = "room";

// A table with one transfer, or the rest of one, whose rendezvous key is kRoom.
struct Scene : Table {
  std::string id = std::string(32, '0');
  TransferTable::AttachId generate = 0;  // the Generate that belongs to the state

  void Open() {
    Manifest manifest = Good();
    manifest.rendezvous_key = kRoom;
    id = table->Reserve(manifest)->transfer_id;
  }
  void Fill() {
    for (const ChunkHeader& chunk : AllChunks(id)) REQUIRE(Land(chunk, Payload(chunk)).ok());
  }
  void Commit() { REQUIRE(table->Commit(id, {}, nullptr).ok()); }
  void Generate() {
    const auto attached = table->Attach(ByKey(kRoom));
    REQUIRE(attached.ok());
    generate = *attached;
  }
  ChunkHeader Chunk() const { return {id, 0, "kv", 0, 1, 0, 4, 0}; }
  void Poison() {
    std::vector<uint8_t> other = Payload(Chunk());
    REQUIRE(Land(Chunk(), other).ok());
    other[3] ^= 1;
    REQUIRE(ReasonOf(Land(Chunk(), other).status()) == "POISONED");
  }
  // Returns the answer that an attached Generate gets now.
  std::string Hears(TransferTable::AttachId attached) {
    const auto ready = table->TakeReady(attached);
    if (!ready.ok()) return ReasonOf(ready.status()).value_or("an error without a reason");
    return ready->has_value() ? "takes it" : "waits";
  }
};

std::string Answer(const absl::Status& status, const std::string& otherwise = "OK") {
  return status.ok() ? otherwise : ReasonOf(status).value_or("an error without a reason");
}

std::string Write(Scene& s) { return Answer(s.Land(s.Chunk(), s.Payload(s.Chunk())).status()); }
std::string Commit(Scene& s) { return Answer(s.table->Commit(s.id, {}, nullptr).status()); }
std::string Abort(Scene& s) { return Answer(s.table->Abort(s.id, "")); }
std::string Get(Scene& s) {
  const auto info = s.table->Get(s.id, 1);
  if (!info.ok()) return Answer(info.status());
  using State = TransferInfo::State;
  return info->state == State::kReceiving   ? "RECEIVING"
         : info->state == State::kCommitted ? "COMMITTED"
                                            : "POISONED";
}
std::string Generate(Scene& s, const HandoffRef& ref) {
  const auto attached = s.table->Attach(ref);
  const std::string answer = attached.ok() ? s.Hears(*attached) : Answer(attached.status());
  if (answer == "waits") s.table->Detach(*attached, /*abort_transfer=*/false);
  return answer;
}
std::string GenerateById(Scene& s) { return Generate(s, ById(s.id)); }
std::string GenerateByKey(Scene& s) { return Generate(s, ByKey(kRoom)); }
std::string Reserve(Scene& s) {
  Manifest manifest = s.Good();
  manifest.rendezvous_key = kRoom;
  return Answer(s.table->Reserve(manifest).status());
}

TEST_CASE("every call has one answer in every state of a transfer") {
  struct Event {
    const char* name;
    std::string (*call)(Scene&);
  };
  const std::vector<Event> events = {
      {"Write", Write},
      {"Commit", Commit},
      {"Abort", Abort},
      {"Get", Get},
      {"Generate by id", GenerateById},
      {"Generate by key", GenerateByKey},
      {"Reserve with the key", Reserve},
  };
  const std::string kNone = "TRANSFER_NOT_FOUND", kUsed = "RENDEZVOUS_KEY_IN_USE";
  struct State {
    const char* name;
    std::function<void(Scene&)> enter;
    std::vector<std::string> answers;  // in the order of `events`
    std::string attached;              // the answer that its own Generate gets before any event
  };
  const std::vector<State> states = {
      {"never reserved", [](Scene&) {}, {kNone, kNone, "OK", kNone, kNone, "waits", "OK"}, ""},
      {"receiving",
       [](Scene& s) { s.Open(); },
       {"OK", "MISSING_BLOCKS", "OK", "RECEIVING", "waits", "waits", kUsed},
       ""},
      {"receiving, all blocks there",
       [](Scene& s) { s.Open(), s.Fill(); },
       {"OK", "OK", "OK", "RECEIVING", "waits", "waits", kUsed},
       ""},
      {"receiving, with its Generate",
       [](Scene& s) { s.Open(), s.Generate(); },
       {"OK", "MISSING_BLOCKS", "OK", "RECEIVING", "GENERATE_EXISTS", "GENERATE_EXISTS", kUsed},
       "waits"},
      {"committed",
       [](Scene& s) { s.Open(), s.Fill(), s.Commit(); },
       {"COMMITTED", "OK", "OK", "COMMITTED", "takes it", "takes it", kUsed},
       ""},
      {"committed, with its Generate",
       [](Scene& s) { s.Open(), s.Fill(), s.Generate(), s.Commit(); },
       {"COMMITTED", "OK", "OK", "COMMITTED", "GENERATE_EXISTS", "GENERATE_EXISTS", kUsed},
       "takes it"},
      {"poisoned",
       [](Scene& s) { s.Open(), s.Poison(); },
       {"POISONED", "POISONED", "OK", "POISONED", "POISONED", "POISONED", kUsed},
       ""},
      {"poisoned under its Generate",
       [](Scene& s) { s.Open(), s.Generate(), s.Poison(); },
       {"POISONED", "POISONED", "OK", "POISONED", "POISONED", "POISONED", kUsed},
       "POISONED"},
      {"taken: it decodes, or has finished",
       [](Scene& s) {
         s.Open(), s.Fill(), s.Commit();
         REQUIRE(GenerateByKey(s) == "takes it");
       },
       {kNone, "OK", "OK", "COMMITTED", kNone, "waits", "OK"},
       ""},
      {"aborted",
       [](Scene& s) { s.Open(), s.Fill(), Abort(s); },
       {kNone, kNone, "OK", kNone, kNone, "waits", "OK"},
       ""},
      {"aborted under its Generate",
       [](Scene& s) { s.Open(), s.Generate(), Abort(s); },
       {kNone, kNone, "OK", kNone, kNone, "waits", "OK"},
       "TRANSFER_ABORTED"},
      {"its lease has ended, reaper or not",
       [](Scene& s) { s.Open(), s.Fill(), s.clock.Advance(absl::Seconds(10)); },
       {kNone, kNone, "OK", kNone, kNone, "waits", "OK"},
       ""},
      {"its lease has ended after Commit",
       [](Scene& s) {
         s.Open(), s.Fill(), s.Commit(), s.clock.Advance(absl::Seconds(10)), s.Reap();
       },
       {kNone, kNone, "OK", kNone, kNone, "waits", "OK"},
       ""},
      {"its lease has ended under its Generate",
       [](Scene& s) { s.Open(), s.Generate(), s.clock.Advance(absl::Seconds(10)), s.Reap(); },
       {kNone, kNone, "OK", kNone, kNone, "waits", "OK"},
       "LEASE_EXPIRED"},
      {"its Generate was cancelled",
       [](Scene& s) {
         s.Open(), s.Fill(), s.Generate();
         s.table->Detach(s.generate, /*abort_transfer=*/true);
       },
       {kNone, kNone, "OK", kNone, kNone, "waits", "OK"},
       ""},
  };
  for (const State& state : states) {
    for (size_t i = 0; i < events.size(); ++i) {
      INFO(state.name << ": " << events[i].name);
      Scene scene;
      state.enter(scene);
      CHECK(events[i].call(scene) == state.answers[i]);
      // A second call has the answer of the first, unless the first was an Abort, which ends the
      // transfer, a Generate, which then has it, or a Reserve, which opens one.
      if (i < 2 || i == 3) CHECK(events[i].call(scene) == state.answers[i]);
    }
    if (state.attached.empty()) continue;
    INFO(state.name << ": its Generate");
    Scene scene;
    state.enter(scene);
    CHECK(scene.Hears(scene.generate) == state.attached);
  }
}

TEST_CASE("a key serves one transfer after the other, however the last one ended") {
  Table t;
  Manifest manifest = t.Good();
  manifest.rendezvous_key = kRoom;
  for (const int ending : {0, 1, 2, 3, 0}) {
    INFO("ending " << ending);
    const auto reserved = t.table->Reserve(manifest);
    REQUIRE(reserved.ok());
    // A repeated Reserve neither opens a second transfer nor harms the first.
    CHECK(ReasonOf(t.table->Reserve(manifest).status()) == "RENDEZVOUS_KEY_IN_USE");
    const auto generate = t.table->Attach(ByKey(kRoom));
    REQUIRE(generate.ok());
    for (const ChunkHeader& chunk : t.AllChunks(reserved->transfer_id)) {
      REQUIRE(t.Land(chunk, t.Payload(chunk)).ok());
    }
    switch (ending) {
      case 0: {
        REQUIRE(t.table->Commit(reserved->transfer_id, {}, nullptr).ok());
        const auto ready = t.table->TakeReady(*generate);
        REQUIRE(ready.ok());
        REQUIRE(ready->has_value());
        CHECK(t.Intact(*(*ready)->home, reserved->transfer_id));
        break;
      }
      case 1:
        REQUIRE(t.table->Abort(reserved->transfer_id, "").ok());
        break;
      case 2:
        t.clock.Advance(absl::Seconds(11));
        break;
      default:
        t.table->Detach(*generate, /*abort_transfer=*/true);
    }
    if (ending == 1 || ending == 2) {
      t.Reap();
      CHECK_FALSE(t.table->TakeReady(*generate).ok());
    }
    CHECK(t.Empty());
  }
}

TEST_CASE("Commit racing Abort: the Generate takes a whole sequence or hears of the abort") {
  int taken = 0, aborted = 0;
  for (int round = 0; round < 300; ++round) {
    Scene s;
    s.Open(), s.Fill(), s.Generate();
    std::atomic<int> ready = 0;
    const auto meet = [&] {
      ++ready;
      while (ready < 3) std::this_thread::yield();
    };
    std::string committed, ended;
    std::thread sender([&] { meet(), committed = Commit(s); });
    std::thread canceller([&] { meet(), ended = Abort(s); });
    meet();
    std::string heard = "waits";
    bool intact = true;
    while (heard == "waits") {
      auto got = s.table->TakeReady(s.generate);
      if (!got.ok()) {
        heard = Answer(got.status());
      } else if (got->has_value()) {
        heard = "takes it";
        intact = s.Intact(*(*got)->home, s.id);
      }
    }
    sender.join();
    canceller.join();
    CHECK(ended == "OK");
    CHECK(intact);
    if (heard == "takes it") {
      CHECK(committed == "OK");
      ++taken;
    } else {
      CHECK(heard == "TRANSFER_ABORTED");
      CHECK((committed == "OK" || committed == "TRANSFER_NOT_FOUND"));
      ++aborted;
    }
    CHECK(s.Empty());
  }
  INFO(taken << " taken, " << aborted << " aborted");
  CHECK(taken + aborted == 300);
}

TEST_CASE("Abort during a chunk: the chunk is not acknowledged and its bytes reach nobody") {
  Scene s;
  s.Open();
  ChunkHeader header = s.Chunk();
  const std::vector<uint8_t> payload = s.Payload(header);
  header.crc32c = Crc32c(payload);
  auto landing = s.table->BeginChunk(header, payload.size());
  REQUIRE(landing.ok());
  const absl::Span<const uint8_t> bytes(payload);
  (*landing)->Append(bytes.subspan(0, 30));
  CHECK(Abort(s) == "OK");
  CHECK_FALSE(s.Empty());  // the writer is still there
  (*landing)->Append(bytes.subspan(30));
  CHECK(Answer((*landing)->Finish().status()) == "TRANSFER_NOT_FOUND");
  landing->reset();
  CHECK(s.Empty());
}

TEST_CASE("bytes that a device puts at a chunk's targets count by their checksum") {
  Scene s;
  s.Open();
  ChunkHeader header = s.Chunk();
  const std::vector<uint8_t> payload = s.Payload(header);
  header.crc32c = Crc32c(payload);
  const auto put = [&](uint32_t crc) {
    auto landing = s.table->BeginChunk(header, payload.size());
    REQUIRE(landing.ok());
    uint64_t at = 0, written = 0;
    for (const ChunkLanding::Target& target : (*landing)->Targets()) {
      if (target.data != nullptr) {
        std::memcpy(target.data, payload.data() + at, target.bytes);
        written += target.bytes;
      }
      at += target.bytes;
    }
    CHECK(at == payload.size());
    (*landing)->Received(crc);
    const auto blocks = (*landing)->Finish();
    return std::pair(blocks.ok() ? static_cast<int64_t>(*blocks) : -1, written);
  };
  CHECK(put(header.crc32c ^ 1) == std::pair(int64_t{-1}, uint64_t{payload.size()}));
  const auto landed = put(header.crc32c);
  CHECK((landed.first > 0 && landed.second == payload.size()));
  // They are there: nothing is written over them.
  CHECK(put(header.crc32c) == std::pair(int64_t{0}, uint64_t{0}));
}

TEST_CASE("a late chunk with other bytes poisons a transfer that is committed, not one that runs") {
  Scene s;
  s.Open(), s.Fill(), s.Generate();
  ChunkHeader header = s.Chunk();
  std::vector<uint8_t> other = s.Payload(header);
  other[0] ^= 1;
  header.crc32c = Crc32c(other);
  auto landing = s.table->BeginChunk(header, other.size());
  REQUIRE(landing.ok());
  s.Commit();
  CHECK(s.Hears(s.generate) == "waits");  // until the writer is gone
  (*landing)->Append(other);
  CHECK(Answer((*landing)->Finish().status()) == "POISONED");
  CHECK(s.Hears(s.generate) == "POISONED");
  landing->reset();
  CHECK(Abort(s) == "OK");
  CHECK(s.Empty());
}

TEST_CASE("a chunk broken off is as if never sent, and the next stream lands it") {
  Scene s;
  s.Open();
  const ChunkHeader header = s.Chunk();
  const std::vector<uint8_t> payload = s.Payload(header);
  {
    auto landing = s.table->BeginChunk(header, payload.size());
    REQUIRE(landing.ok());
    (*landing)->Append(absl::Span<const uint8_t>(payload).subspan(0, 33));
    // It finishes too early, as when a stream breaks, so no block counts.
    CHECK(FieldOf((*landing)->Finish().status()) == "payload");
  }
  CHECK(s.table->Get(s.id, 1)->blocks_landed == 0);
  CHECK(Write(s) == "OK");
  CHECK(s.table->Get(s.id, 1)->blocks_landed == 1);
  s.Fill();
  CHECK(Commit(s) == "OK");
  auto ready = s.table->TakeReady(*s.table->Attach(ById(s.id)));
  REQUIRE(ready.ok());
  CHECK(s.Intact(*(*ready)->home, s.id));
}

TEST_CASE("every end of a transfer wakes whoever waits for it") {
  Scene s;
  std::atomic<int> wakes = 0;
  s.table->SetWake([&] { ++wakes; });
  const auto woke = [&](const char* what, const std::function<void()>& act) {
    INFO(what);
    const int before = wakes;
    act();
    CHECK(wakes > before);
  };
  woke("Reserve", [&] { s.Open(); });
  s.Fill();
  woke("Commit", [&] { s.Commit(); });
  woke("Abort", [&] { Abort(s); });
  s.Open();
  woke("poisoned", [&] { s.Poison(); });
  Abort(s);
  s.Open();
  auto held = s.table->BeginChunk(s.Chunk(), s.Payload(s.Chunk()).size());
  s.clock.Advance(absl::Seconds(11));
  woke("the lease, met by another call", [&] { Get(s); });
  woke("the last writer of what has ended", [&] { held->reset(); });
  s.table->SetWake(nullptr);
}

}  // namespace
}  // namespace sluice
