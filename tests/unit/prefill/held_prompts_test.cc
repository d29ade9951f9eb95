#include "src/prefill/held_prompts.h"

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"

namespace sluice {
namespace {

constexpr int kLayers = 2;
constexpr int64_t kTokenBytes = 8;  // one head of one layer
const auto kNever = [] { return false; };

CacheLayout Layout() {
  CacheLayout layout;
  layout.layers = kLayers;
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 1;
  kind.block_tokens = 4;
  kind.SetEqualParts(2, kTokenBytes);
  layout.kinds = {kind};
  return layout;
}

// Makes caches whose bytes say their layer, given in two pieces.
class FakePrefiller : public Prefiller {
 public:
  absl::StatusOr<PrefillResult> Run(const std::vector<int32_t>& prompt, const SamplingParams&,
                                    bool want_first_token, LayerSink& sink,
                                    const std::function<bool()>& cancelled) override {
    ++runs;
    if (cancelled()) return absl::CancelledError("cancelled");
    const absl::Status begun = sink.Begin();
    if (!begun.ok()) return begun;
    const auto tokens = static_cast<int>(prompt.size());
    const CacheLayout layout = Layout();
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::vector<uint8_t> bytes(static_cast<size_t>(tokens * kTokenBytes),
                                       static_cast<uint8_t>(layer + 1));
      const absl::Span<const uint8_t> all(bytes);
      const absl::Span<const uint8_t> pieces[] = {all.subspan(0, 3), all.subspan(3)};
      const absl::Status taken = sink.Layer(layer, layout.kinds[0], 0, tokens, pieces);
      if (!taken.ok()) return taken;
    }
    PrefillResult result;
    if (want_first_token) result.first_token.emplace().id = 7;
    return result;
  }
  int runs = 0;
};

HeldPrompts::Options SomeOptions() {
  HeldPrompts::Options options;
  options.layout = Layout();
  options.max_bytes = 3 * 4 * kTokenBytes * kLayers;  // three prompts of four tokens
  return options;
}

HeldPrompts::Wanted Four(const std::string& tenant = "") {
  HeldPrompts::Wanted wanted;
  wanted.prompt = {1, 2, 3, 4};
  wanted.tenant = tenant;
  return wanted;
}

TEST_CASE("what is computed is held as it was, and given back when it is released") {
  FakePrefiller prefiller;
  HeldPrompts held(SomeOptions(), &prefiller);
  const auto made = held.Hold(Four(), kNever);
  REQUIRE(made.ok());
  const std::string id = made->prompt->source_id;
  CHECK(id.size() == 32);
  const auto found = held.Find(id, "");
  REQUIRE(found != nullptr);
  CHECK(found->context_length == 4);
  REQUIRE(found->layers.size() == kLayers);
  for (int layer = 0; layer < kLayers; ++layer) {
    const HeldLayer& l = found->layers[static_cast<size_t>(layer)];
    CHECK(std::vector<uint8_t>(l.bytes, l.bytes + l.size) ==
          std::vector<uint8_t>(4 * kTokenBytes, static_cast<uint8_t>(layer + 1)));
  }
  CHECK(held.usage().bytes == 4 * kTokenBytes * kLayers);
  CHECK(held.Release(id, ""));
  CHECK_FALSE(held.Release(id, ""));
  CHECK(held.Find(id, "") == nullptr);
  // A reader keeps the prompt, and its bytes stay taken until then; `made` and `found` are readers
  // here.
  CHECK(held.usage().bytes == 4 * kTokenBytes * kLayers);
}

TEST_CASE("a layer that is computed in parts is one piece, in the arena if there is one") {
  // The tokens come in two chunks, [0, 4) and [4, 7).
  class InParts : public FakePrefiller {
   public:
    absl::StatusOr<PrefillResult> Run(const std::vector<int32_t>&, const SamplingParams&, bool,
                                      LayerSink& sink, const std::function<bool()>&) override {
      for (const auto& [begin, end] : {std::pair{0, 4}, std::pair{4, 7}}) {
        for (int layer = 0; layer < kLayers; ++layer) {
          std::vector<uint8_t> bytes;
          for (int i = begin * 8; i < end * 8; ++i) {
            bytes.push_back(static_cast<uint8_t>(100 * layer + i));
          }
          const absl::Span<const uint8_t> pieces[] = {bytes};
          const absl::Status taken = sink.Layer(layer, Layout().kinds[0], begin, end, pieces);
          if (!taken.ok()) return taken;
        }
      }
      return PrefillResult();
    }
  } prefiller;
  std::vector<uint8_t> arena(SomeOptions().max_bytes);
  HeldPrompts held(SomeOptions(), &prefiller,
                   Buffer(arena.data(), arena.size(), [](void*, size_t) {}));
  HeldPrompts::Wanted wanted;
  wanted.prompt.assign(7, 1);
  const auto made = held.Hold(wanted, kNever);
  REQUIRE(made.ok());
  REQUIRE(made->prompt->layers.size() == kLayers);
  for (int layer = 0; layer < kLayers; ++layer) {
    const HeldLayer& l = made->prompt->layers[static_cast<size_t>(layer)];
    CHECK(l.layer == layer);
    CHECK(l.tokens == 7);
    REQUIRE(l.size == 7 * kTokenBytes);
    CHECK(l.bytes == arena.data() + layer * 7 * kTokenBytes);
    for (size_t i = 0; i < l.size; ++i) {
      REQUIRE(l.bytes[i] == static_cast<uint8_t>(100 * static_cast<size_t>(layer) + i));
    }
    CHECK(l.Crc32cOf(Layout().kinds[0], 0, 7, 0, 1) == Crc32c({l.bytes, l.size}));
    CHECK(l.Crc32cOf(Layout().kinds[0], 4, 7, 0, 1) ==
          Crc32c({l.bytes + 4 * kTokenBytes, 3 * kTokenBytes}));
  }
}

TEST_CASE("a prompt whose bytes are free in an arena, but in no one piece, is refused for now") {
  FakePrefiller prefiller;
  std::vector<uint8_t> arena(SomeOptions().max_bytes);
  HeldPrompts held(SomeOptions(), &prefiller,
                   Buffer(arena.data(), arena.size(), [](void*, size_t) {}));
  std::vector<std::string> ids;
  for (int i = 0; i < 3; ++i) {
    const auto made = held.Hold(Four(), kNever);
    REQUIRE(made.ok());
    ids.push_back(made->prompt->source_id);
  }
  CHECK(held.Release(ids[0], ""));
  CHECK(held.Release(ids[2], ""));
  HeldPrompts::Wanted eight = Four();
  eight.prompt.assign(8, 1);
  const absl::Status full = held.Hold(eight, kNever).status();
  CHECK(ReasonOf(full) == "HOLD_FULL");
  CHECK(held.Release(ids[1], ""));
  CHECK(held.Hold(eight, kNever).ok());
}

TEST_CASE("checksums are there of whatever is cut out, a short last block's too") {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 2;
  kind.block_tokens = 4;
  kind.SetEqualParts(2, kTokenBytes);
  // The 11 tokens are in blocks of 4, 4 and 3.
  class Counting : public FakePrefiller {
   public:
    explicit Counting(const CacheKind& kind) : kind_(kind) {}
    absl::StatusOr<PrefillResult> Run(const std::vector<int32_t>&, const SamplingParams&, bool,
                                      LayerSink& sink, const std::function<bool()>&) override {
      std::vector<uint8_t> bytes(11 * 2 * kTokenBytes);
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(7 * i);
      const absl::Span<const uint8_t> pieces[] = {bytes};
      const absl::Status taken = sink.Layer(0, kind_, 0, 11, pieces);
      if (!taken.ok()) return taken;
      return PrefillResult();
    }

   private:
    const CacheKind kind_;
  } prefiller(kind);
  HeldPrompts::Options options;
  options.layout = {1, {kind}};
  HeldPrompts held(options, &prefiller);
  HeldPrompts::Wanted wanted;
  wanted.prompt.assign(11, 1);
  const auto made = held.Hold(wanted, kNever);
  REQUIRE(made.ok());
  const HeldLayer& layer = made->prompt->layers.at(0);
  const auto of = [&](size_t begin, size_t end) {
    return Crc32c({layer.bytes + begin * kTokenBytes, (end - begin) * kTokenBytes});
  };
  // The expected values count tokens of one head: a block of both heads is 8 of them, and the last
  // one 6.
  CHECK(layer.Crc32cOf(kind, 0, 11, 0, 2) == of(0, 22));
  CHECK(layer.Crc32cOf(kind, 0, 8, 0, 2) == of(0, 16));
  CHECK(layer.Crc32cOf(kind, 4, 11, 0, 2) == of(8, 22));
  CHECK(layer.Crc32cOf(kind, 4, 8, 1, 2) == of(12, 16));
  CHECK(layer.Crc32cOf(kind, 8, 11, 0, 1) == of(16, 19));
  CHECK(layer.Crc32cOf(kind, 8, 11, 1, 2) == of(19, 22));
}

TEST_CASE("the bytes of a prompt come back with its last reader") {
  FakePrefiller prefiller;
  HeldPrompts held(SomeOptions(), &prefiller);
  std::string id;
  {
    const auto made = held.Hold(Four(), kNever);
    REQUIRE(made.ok());
    id = made->prompt->source_id;
    CHECK(held.Release(id, ""));
    CHECK(held.usage().bytes > 0);
  }
  CHECK(held.usage().bytes == 0);
  CHECK(held.usage().prompts == 0);
}

TEST_CASE("a prompt is its tenant's alone") {
  FakePrefiller prefiller;
  HeldPrompts held(SomeOptions(), &prefiller);
  const auto made = held.Hold(Four("a"), kNever);
  REQUIRE(made.ok());
  const std::string id = made->prompt->source_id;
  CHECK(held.Find(id, "b") == nullptr);
  CHECK_FALSE(held.Renew(id, "b", absl::Seconds(1)).has_value());
  CHECK_FALSE(held.Release(id, "b"));
  CHECK(held.Find(id, "a") != nullptr);
}

TEST_CASE("room is asked for before anything is computed") {
  FakePrefiller prefiller;
  HeldPrompts held(SomeOptions(), &prefiller);
  std::vector<HeldPrompts::Held> all;
  for (int i = 0; i < 3; ++i) {
    auto made = held.Hold(Four(), kNever);
    REQUIRE(made.ok());
    all.push_back(*std::move(made));
  }
  const absl::Status full = held.Hold(Four(), kNever).status();
  CHECK(absl::IsResourceExhausted(full));
  CHECK(ReasonOf(full) == "HOLD_FULL");
  CHECK(RetryAfterOf(full).has_value());
  HeldPrompts::Wanted large = Four();
  large.prompt.assign(100, 1);
  const absl::Status never = held.Hold(large, kNever).status();
  CHECK(absl::IsInvalidArgument(never));
  CHECK(FieldOf(never) == "prompt_token_ids");
  CHECK(prefiller.runs == 3);
}

TEST_CASE("what was computed for a request goes with it, however often it was") {
  FakePrefiller prefiller;
  HeldPrompts held(SomeOptions(), &prefiller);
  std::vector<std::string> ids;
  for (const char* name : {"mine", "", "mine"}) {
    HeldPrompts::Wanted wanted = Four();
    wanted.request_id = name;
    const auto made = held.Hold(wanted, kNever);
    REQUIRE(made.ok());
    ids.push_back(made->prompt->source_id);
  }
  CHECK_FALSE(held.ReleaseRequest("min"));
  CHECK_FALSE(held.ReleaseRequest(""));
  CHECK(held.usage().prompts == 3);
  CHECK(held.ReleaseRequest("mine"));
  CHECK_FALSE(held.ReleaseRequest("mine"));
  CHECK(held.Find(ids[1], "") != nullptr);
  CHECK(held.usage().prompts == 1);
  CHECK(held.usage().bytes == 4 * kTokenBytes * kLayers);
}

TEST_CASE("a prompt that is not computed to its end leaves nothing") {
  FakePrefiller prefiller;
  HeldPrompts held(SomeOptions(), &prefiller);
  CHECK(absl::IsCancelled(held.Hold(Four(), [] { return true; }).status()));
  CHECK(held.usage().bytes == 0);
  CHECK(held.usage().prompts == 0);
}

TEST_CASE("a lease that nobody renews ends, and no lease is longer than the longest") {
  FakePrefiller prefiller;
  HeldPrompts::Options options = SomeOptions();
  options.max_lease = absl::Milliseconds(900);
  HeldPrompts held(options, &prefiller);
  std::string left, renewed;
  {
    const auto first = held.Hold(Four(), kNever);
    const auto second = held.Hold(Four(), kNever);
    REQUIRE(first.ok());
    REQUIRE(second.ok());
    left = first->prompt->source_id;
    renewed = second->prompt->source_id;
  }
  const absl::Time end = absl::Now() + absl::Seconds(2);
  while (absl::Now() < end) {
    REQUIRE(held.Renew(renewed, "", absl::Hours(1)) == absl::Milliseconds(900));
    absl::SleepFor(absl::Milliseconds(20));
  }
  CHECK(held.Find(left, "") == nullptr);
  CHECK(held.usage().prompts == 1);
  CHECK(held.usage().expired == 1);
  CHECK(held.usage().bytes == 4 * kTokenBytes * kLayers);
}

}  // namespace
}  // namespace sluice
