#include <catch2/catch.hpp>
#include <thread>

#include "src/request/stop_conditions.h"
#include "src/request/token_sink.h"

namespace sluice {
namespace {

OutputToken TokenOf(int32_t id) {
  OutputToken token;
  token.id = id;
  return token;
}

FinishInfo Length() {
  FinishInfo info;
  info.reason = FinishInfo::Reason::kLength;
  return info;
}

TEST_CASE("a stream gives tokens in order, then its finish, once") {
  TokenStream stream(4);
  stream.Emit(TokenOf(1));
  stream.Emit(TokenOf(2));
  stream.Finish(Length());
  TokenStream::Batch batch = stream.Read();
  REQUIRE(batch.tokens.size() == 2);
  CHECK(batch.tokens[0].id == 1);
  CHECK(batch.tokens[1].id == 2);
  CHECK(batch.finish.has_value());
  batch = stream.Read();
  CHECK(batch.tokens.empty());
  CHECK_FALSE(batch.finish.has_value());
}

TEST_CASE("a full stream has no room, and a read that frees it wakes the engine") {
  int woken = 0;
  TokenStream stream(4, [&] { ++woken; });
  for (int i = 0; i < 4; ++i) stream.Emit(TokenOf(i));
  CHECK_FALSE(stream.HasRoom(1));
  CHECK(stream.Read().tokens.size() == 4);
  CHECK(woken == 1);
  CHECK(stream.HasRoom(4));
  CHECK_FALSE(stream.HasRoom(5));
}

TEST_CASE(
    "the ready callback comes for what was there before it was set, and never after clearing") {
  TokenStream stream(8);
  stream.Emit(TokenOf(1));
  int called = 0;
  stream.SetReadyCallback([&] { ++called; });
  CHECK(called == 1);
  stream.Emit(TokenOf(2));
  CHECK(called == 2);
  stream.SetReadyCallback(nullptr);
  stream.Finish(Length());
  CHECK(called == 2);
}

TEST_CASE("a reader on another thread gets every token of a small stream") {
  constexpr int kTokens = 5000;
  TokenStream stream(8);
  std::vector<int32_t> read;
  std::thread reader([&] {
    for (;;) {
      TokenStream::Batch batch = stream.ReadBlocking();
      for (const OutputToken& token : batch.tokens) read.push_back(token.id);
      if (batch.finish.has_value()) return;
    }
  });
  for (int i = 0; i < kTokens; ++i) {
    while (!stream.HasRoom(1)) std::this_thread::yield();
    stream.Emit(TokenOf(i));
  }
  stream.Finish(Length());
  reader.join();
  REQUIRE(read.size() == kTokens);
  for (int i = 0; i < kTokens; ++i) REQUIRE(read[static_cast<size_t>(i)] == i);
}

TEST_CASE("a stop id ends a sequence, but not before min_tokens") {
  StopConditions stops({2, 9}, {}, 2);
  CHECK_FALSE(stops.Take(2, nullptr).has_value());
  CHECK_FALSE(stops.Take(5, nullptr).has_value());
  const auto match = stops.Take(9, nullptr);
  REQUIRE(match.has_value());
  CHECK(match->token_id == 9);
}

TEST_CASE("a stop string is found across tokens, and the first to be complete wins") {
  const std::string he = "he", llo = "llo", world = " world";
  StopConditions stops({}, {"o wor", "lo", "zzz"}, 0);
  CHECK_FALSE(stops.Take(1, &he).has_value());
  const auto match = stops.Take(2, &llo);
  REQUIRE(match.has_value());
  CHECK(match->text == "lo");

  StopConditions later({}, {"o wor"}, 0);
  CHECK_FALSE(later.Take(1, &he).has_value());
  CHECK_FALSE(later.Take(2, &llo).has_value());
  CHECK(later.Take(3, &world)->text == "o wor");
}

TEST_CASE("a stop string one byte at a time is found whatever its length") {
  for (size_t length = 1; length < 40; ++length) {
    std::string stop;
    for (size_t i = 0; i < length; ++i) stop += static_cast<char>('a' + (i * 7) % 26);
    StopConditions stops({}, {stop}, 0);
    const std::string text = "xx" + stop;
    for (size_t i = 0; i < text.size(); ++i) {
      const std::string byte(1, text[i]);
      CHECK(stops.Take(1, &byte).has_value() == (i + 1 == text.size()));
    }
  }
}

TEST_CASE("without bytes there are no stop strings") {
  StopConditions stops({}, {"a"}, 0);
  CHECK_FALSE(stops.Take(1, nullptr).has_value());
}

}  // namespace
}  // namespace sluice
