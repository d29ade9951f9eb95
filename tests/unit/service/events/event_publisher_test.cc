// Tests the form of KV events byte by byte, the queue that drops them, and a publisher against
// subscribers that read, that come late and that hang.
#include "src/service/events/event_publisher.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>
#include <zmq.hpp>
#include <zmq_addon.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "src/base/rng.h"
#include "src/kv/sequence_cache.h"
#include "src/metrics/metrics.h"
#include "src/service/events/event_queue.h"
#include "tests/support/eventually.h"
#include "tests/support/or_fail.h"
#include "tests/unit/kv/kv_support.h"

namespace sluice {
namespace {

using testing::Eventually;
using Kind = KvEvent::Kind;
constexpr int64_t kUnit = 8;
constexpr int kSoonMs = 30000;

KvEvent Stored(std::vector<uint64_t> hashes, std::optional<uint64_t> parent,
               std::vector<int32_t> tokens) {
  return {Kind::kStored, std::move(hashes), parent, std::move(tokens)};
}

// Events as msgpack of Python wrote them, in hexadecimal digits.
std::string Hex(const std::vector<KvEvent>& events, EventSchema schema) {
  return absl::BytesToHexString(EncodeBatch(1.5, events, 2, schema));
}

std::string TextHex(const std::string& text) {
  return absl::StrCat(absl::BytesToHexString(std::string(1, static_cast<char>(0xa0 + text.size()))),
                      absl::BytesToHexString(text));
}

// A socket file of its own, or Options::endpoint, and a cache that may be published.
struct World {
  explicit World(EventPublisher::Options options = {}) {
    const CacheLayout layout = TwoKinds();
    pool = MakePool("dram", layout, static_cast<size_t>(layout.BytesFor(kUnit) * 400) + 8292);
    cache = PrefixCache::Create(pool.get());
    static int worlds = 0;
    base = absl::StrCat("ipc:///tmp/sluice-events-", getpid(), "-", ++worlds);
    const bool tcp = !options.endpoint.empty();
    if (!tcp) {
      options.endpoint = base;
      options.replay_endpoint = base + "-replay";
    }
    options.topic = "kv";
    options.metrics = &metrics;
    publisher = OrFail(EventPublisher::Create(std::move(options)));
    const std::string bound = publisher->endpoint();
    if (tcp) base = "tcp://127.0.0.1" + bound.substr(bound.rfind(':'));
  }
  zmq::socket_t Subscribe(int rcvhwm = 0) {
    zmq::socket_t socket(context, zmq::socket_type::sub);
    socket.set(zmq::sockopt::rcvhwm, rcvhwm);
    socket.set(zmq::sockopt::rcvtimeo, kSoonMs);
    socket.set(zmq::sockopt::linger, 0);
    socket.connect(base);
    socket.set(zmq::sockopt::subscribe, "kv");
    return socket;
  }
  zmq::socket_t Replayer() {
    zmq::socket_t socket(context, zmq::socket_type::req);
    socket.set(zmq::sockopt::rcvtimeo, kSoonMs);
    socket.set(zmq::sockopt::linger, 0);
    socket.connect(base + "-replay");
    return socket;
  }
  void Follow() { publisher->Follow({cache.get()}, "model"); }
  void Run(int32_t first, int64_t count) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < count; ++i) tokens.push_back(first + static_cast<int32_t>(i));
    SharedPrefix prefix = cache->Find("", tokens);
    Reservation rest = pool->TryReserve(count - prefix.tokens());
    REQUIRE(!rest.empty());
    SequenceCache sequence(pool.get(), std::move(rest), std::move(prefix));
    sequence.EnsureTokens(count);
    cache->Publish("", tokens, PrefixCache::Readers::kNone, sequence);
  }

  Metrics metrics;
  std::unique_ptr<PagePool> pool;
  std::shared_ptr<PrefixCache> cache;
  std::string base;
  zmq::context_t context;
  std::unique_ptr<EventPublisher> publisher;
};

// Returns a connected socket that has subscribed, by ZMTP 3.0, and reads nothing.
int RawSubscriber(const std::string& endpoint) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port =
      htons(static_cast<uint16_t>(std::stoi(endpoint.substr(endpoint.rfind(':') + 1))));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  std::string greeting("\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL", 16);
  greeting.resize(64);
  const std::string ready("\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB", 27);
  const std::string subscribe("\0\x03\x01kv", 5);
  const std::string hello = greeting + ready;
  REQUIRE(write(fd, hello.data(), hello.size()) == std::ssize(hello));
  // The other side's greeting and READY, before which it wants no messages.
  std::string answer(66, '\0');
  REQUIRE(recv(fd, answer.data(), 66, MSG_WAITALL) == 66);
  const auto rest = static_cast<size_t>(answer[65]);
  REQUIRE(recv(fd, answer.data(), rest, MSG_WAITALL) == static_cast<ssize_t>(rest));
  REQUIRE(write(fd, subscribe.data(), subscribe.size()) == std::ssize(subscribe));
  return fd;
}

// Whether the other end of this socket is connected yet. It is closed without a word to this one.
bool IsConnected(int fd) {
  sockaddr_in own{};
  socklen_t bytes = sizeof(own);
  REQUIRE(getsockname(fd, reinterpret_cast<sockaddr*>(&own), &bytes) == 0);
  const std::string peer = absl::StrFormat(":%04X 01", ntohs(own.sin_port));  // 01: established
  std::ifstream connections("/proc/net/tcp6");
  const std::string all(std::istreambuf_iterator<char>(connections), {});
  return all.find(peer) != std::string::npos;
}

std::vector<std::string> Receive(zmq::socket_t& socket) {
  std::vector<zmq::message_t> frames;
  REQUIRE(zmq::recv_multipart(socket, std::back_inserter(frames)));
  std::vector<std::string> texts;
  for (const zmq::message_t& frame : frames) texts.push_back(frame.to_string());
  return texts;
}

// Returns the messages that answer a request, without the end marker.
std::vector<std::vector<std::string>> ReplayAll(World& w, uint64_t from) {
  zmq::socket_t socket(w.context, zmq::socket_type::dealer);
  socket.set(zmq::sockopt::rcvtimeo, kSoonMs);
  socket.set(zmq::sockopt::linger, 0);
  socket.connect(w.base + "-replay");
  socket.send(zmq::message_t(), zmq::send_flags::sndmore);
  socket.send(zmq::message_t(EncodeSequence(from)), zmq::send_flags::none);
  std::vector<std::vector<std::string>> batches;
  for (;;) {
    std::vector<std::string> frames = Receive(socket);
    REQUIRE(frames.size() == 4);
    CHECK(frames[0].empty());
    if (frames[2] == EncodeSequence(~uint64_t{0})) {
      CHECK(frames[3].empty());
      return batches;
    }
    batches.push_back(std::move(frames));
  }
}

}  // namespace

TEST_CASE("Events are written as vLLM writes them") {
  const std::string time = "93cb3ff8000000000000";
  const KvEvent stored = Stored({1, 0xffffffffffffffff}, 300, {5, 6, 70000, 8});
  const std::string hashes = "9201cfffffffffffffffff", tokens = "940506ce0001117008";
  CHECK(Hex({stored}, EventSchema::kArrays) ==
        absl::StrCat(time, "91", "98", TextHex("BlockStored"), hashes, "cd012c", tokens, "02", "c0",
                     TextHex("CPU"), "c0", "00"));
  CHECK(Hex({stored}, EventSchema::kMaps) ==
        absl::StrCat(time, "91", "88", TextHex("type"), TextHex("BlockStored"),
                     TextHex("block_hashes"), hashes, TextHex("parent_block_hash"), "cd012c",
                     TextHex("token_ids"), tokens, TextHex("block_size"), "02", TextHex("lora_id"),
                     "c0", TextHex("medium"), TextHex("CPU"), TextHex("lora_name"), "c0", "00"));
  const std::vector<KvEvent> others = {{Kind::kRemoved, {7}, std::nullopt, {}}, KvEvent{}};
  CHECK(Hex(others, EventSchema::kArrays) == absl::StrCat(time, "92", "93", TextHex("BlockRemoved"),
                                                          "9107", TextHex("CPU"), "91",
                                                          TextHex("AllBlocksCleared"), "00"));
  CHECK(Hex(others, EventSchema::kMaps) ==
        absl::StrCat(time, "92", "83", TextHex("type"), TextHex("BlockRemoved"),
                     TextHex("block_hashes"), "9107", TextHex("medium"), TextHex("CPU"), "81",
                     TextHex("type"), TextHex("AllBlocksCleared"), "00"));
  CHECK(Hex({Stored({1}, std::nullopt, {0, 0})}, EventSchema::kArrays).find("9101c0920000") !=
        std::string::npos);
  CHECK(EncodeSequence(0x0102) == std::string("\0\0\0\0\0\0\1\2", 8));
}

TEST_CASE("Long events become several that say the same") {
  const auto batches = CutIntoBatches({KvEvent{},
                                       Stored({1, 2, 3, 4, 5}, 9, {1, 1, 2, 2, 3, 3, 4, 4, 5, 5}),
                                       {Kind::kRemoved, {6, 7}, std::nullopt, {}}},
                                      2, 3);
  REQUIRE(batches.size() == 3);
  CHECK(batches[0].size() == 2);
  CHECK(batches[0][0].kind == Kind::kCleared);
  CHECK(batches[0][1].hashes == std::vector<uint64_t>{1, 2});
  CHECK(batches[0][1].parent == 9);
  CHECK(batches[0][1].tokens == std::vector<int32_t>{1, 1, 2, 2});
  REQUIRE(batches[1].size() == 1);
  CHECK(batches[1][0].hashes == std::vector<uint64_t>{3, 4, 5});
  CHECK(batches[1][0].parent == 2);
  CHECK(batches[1][0].tokens == std::vector<int32_t>{3, 3, 4, 4, 5, 5});
  REQUIRE(batches[2].size() == 1);
  CHECK(batches[2][0].hashes == std::vector<uint64_t>{6, 7});
  CHECK(batches[2][0].tokens.empty());
}

TEST_CASE("A full queue drops everything until it begins anew") {
  int woken = 0;
  EventQueue queue(10, [&] { ++woken; });
  const std::vector<int32_t> tokens(3);
  const std::vector<uint64_t> hashes = {1};
  queue.OnStored(std::nullopt, tokens, hashes);
  queue.OnStored(1, tokens, hashes);
  CHECK(woken == 1);
  CHECK(queue.Take().size() == 2);
  queue.OnStored(1, tokens, hashes);
  queue.OnStored(1, tokens, hashes);
  queue.OnStored(1, tokens, hashes);
  CHECK(queue.overflowed());
  CHECK(woken == 3);
  queue.OnRemoved(hashes);
  CHECK(queue.Take().empty());
  CHECK(queue.TakeDropped() == 4);
  CHECK(queue.TakeDropped() == 0);
  queue.Restart();
  CHECK(!queue.overflowed());
  queue.OnRemoved(hashes);
  CHECK(queue.Take().size() == 1);
}

TEST_CASE("A subscriber gets all batches, and can have them again") {
  World w;
  zmq::socket_t subscriber = w.Subscribe();
  absl::SleepFor(absl::Milliseconds(200));  // until the subscription is there
  w.Follow();
  std::vector<std::vector<std::string>> got = {Receive(subscriber)};
  for (int32_t i = 0; i < 5; ++i) {
    w.Run(i * 1000, 64);
    got.push_back(Receive(subscriber));
  }
  for (size_t i = 0; i < got.size(); ++i) {
    REQUIRE(got[i].size() == 3);
    CHECK(got[i][0] == "kv");
    CHECK(got[i][1] == EncodeSequence(i));
    CHECK((got[i][2].find("AllBlocksCleared") != std::string::npos) == (i == 0));
    CHECK((got[i][2].find("BlockStored") != std::string::npos) == (i > 0));
  }
  for (const uint64_t from : {0, 4, 6, 100}) {
    const auto again = ReplayAll(w, from);
    REQUIRE(again.size() == (from < 6 ? 6 - from : 0));
    for (size_t i = 0; i < again.size(); ++i) {
      CHECK(std::vector<std::string>(again[i].begin() + 1, again[i].end()) == got[from + i]);
    }
  }
}

TEST_CASE("A publisher whose queue overflows says all that there is") {
  EventPublisher::Options options;
  options.max_queued = 20;
  World w(std::move(options));
  zmq::socket_t subscriber = w.Subscribe();
  absl::SleepFor(absl::Milliseconds(200));
  w.Follow();
  CHECK(Receive(subscriber)[2].find("AllBlocksCleared") != std::string::npos);
  w.Run(0, 64);  // 64 tokens do not fit
  const std::string payload = Receive(subscriber)[2];
  CHECK(payload.find("AllBlocksCleared") != std::string::npos);
  CHECK(payload.find("BlockStored") != std::string::npos);
}

TEST_CASE("Nobody waits for subscribers and replay clients that hang") {
  EventPublisher::Options options;
  options.max_messages = 4;
  World w(std::move(options));
  zmq::socket_t hanging = w.Subscribe(1);
  zmq::socket_t replayer(w.context, zmq::socket_type::dealer);
  replayer.set(zmq::sockopt::rcvhwm, 1);
  replayer.set(zmq::sockopt::linger, 0);
  replayer.connect(w.base + "-replay");
  absl::SleepFor(absl::Milliseconds(200));
  w.Follow();
  const auto ask = [&] {
    replayer.send(zmq::message_t(), zmq::send_flags::sndmore);
    replayer.send(zmq::message_t(EncodeSequence(0)), zmq::send_flags::none);
  };
  constexpr int kRounds = 2000;
  const absl::Time begin = absl::Now();
  for (int32_t i = 0; i < kRounds; ++i) {
    w.Run(i * 4000, 1024);
    if (i % 100 == 0) ask();
  }
  CHECK(absl::Now() - begin < absl::Seconds(60));
  // Another client is served all the same.
  std::vector<std::vector<std::string>> all;
  CHECK(Eventually(absl::Seconds(30), [&] {
    all = ReplayAll(w, 0);
    return all.size() > 1;
  }));
  const absl::Time end = absl::Now();
  w.publisher.reset();
  CHECK(absl::Now() - end < absl::Seconds(10));
}

TEST_CASE("A connection that takes nothing for long is closed") {
  EventPublisher::Options options;
  options.endpoint = "tcp://*:*";
  options.stall = absl::Seconds(1);
  World w(std::move(options));
  const int hanging = RawSubscriber(w.base);
  w.Follow();
  CHECK(IsConnected(hanging));
  const absl::Time begin = absl::Now();
  // More than the buffers of both ends hold.
  CHECK(Eventually(absl::Seconds(60), [&] {
    w.Run(static_cast<int32_t>(RandomU64() >> 34), 2400);
    return !IsConnected(hanging);
  }));
  CHECK(absl::Now() - begin > absl::Milliseconds(900));
  close(hanging);
}

TEST_CASE("A replay request of another form gets the end marker") {
  World w;
  w.Follow();
  zmq::socket_t replayer = w.Replayer();
  replayer.send(zmq::message_t(std::string("all")), zmq::send_flags::none);
  const std::vector<std::string> frames = Receive(replayer);
  REQUIRE(frames.size() == 3);
  CHECK(frames[1] == EncodeSequence(~uint64_t{0}));
}

TEST_CASE("An endpoint that cannot be had is an error with a remedy") {
  EventPublisher::Options options;
  const auto error = [&](const std::string& endpoint, const std::string& replay = "") {
    options.endpoint = endpoint;
    options.replay_endpoint = replay;
    return std::string(EventPublisher::Create(options).status().message());
  };
  CHECK_THAT(error("5557"), Catch::StartsWith("kv_events_endpoint: 5557 cannot be used"));
  CHECK_THAT(error("tcp://*:notaport"), Catch::Contains("give one such as tcp://*:5557"));
  CHECK_THAT(error("inproc://here"), Catch::StartsWith("kv_events_endpoint"));
  const auto first = [&] {
    options.endpoint = "tcp://*:*";
    options.replay_endpoint = "";
    return OrFail(EventPublisher::Create(options));
  }();
  const std::string port = first->endpoint().substr(first->endpoint().rfind(':') + 1);
  CHECK_THAT(error("tcp://*:" + port), Catch::Contains("give a free port"));
  CHECK_THAT(error("tcp://*:*", "tcp://*:" + port), Catch::StartsWith("kv_events_replay_endpoint"));
}

}  // namespace sluice
