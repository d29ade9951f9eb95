#include "src/kv/transfer_table.h"

#include <algorithm>

#include "src/base/error.h"
#include "tests/test_main.h"
#include "tests/unit/kv/transfer_support.h"

namespace sluice {
namespace {

TEST_CASE("a manifest's fault is named by its field, and the next manifest is accepted") {
  struct Bad {
    const char* field;
    std::function<void(Manifest&)> spoil;
  };
  const std::vector<Bad> table = {
      {"manifest.prompt_token_ids", [](auto& m) { m.prompt_token_ids.clear(); }},
      {"manifest.prompt_token_ids", [](auto& m) { m.prompt_token_ids[3] = 100; }},
      {"manifest.prompt_token_ids", [](auto& m) { m.prompt_token_ids.assign(1001, 1); }},
      {"manifest.context_length", [](auto& m) { m.context_length = 0; }},
      {"manifest.context_length", [](auto& m) { m.context_length = kContext + 1; }},
      {"manifest.max_new_tokens", [](auto& m) { m.max_new_tokens = 0; }},
      {"manifest.max_new_tokens", [](auto& m) { m.max_new_tokens = 980; }},
      {"manifest.max_new_tokens", [](auto& m) { m.max_new_tokens = 0xFFFFFFFFu; }},
      {"manifest.tenant", [](auto& m) { m.tenant.assign(129, 'x'); }},
      {"rendezvous_key", [](auto& m) { m.rendezvous_key.assign(129, 'x'); }},
      {"lease", [](auto& m) { m.lease = absl::Seconds(11); }},
      {"lease", [](auto& m) { m.lease = -absl::Seconds(1); }},
      {"manifest.cache_kinds", [](auto& m) { m.cache_kinds.pop_back(); }},
      {"manifest.cache_kinds", [](auto& m) { m.cache_kinds[0].heads = 4; }},
      {"manifest.cache_kinds", [](auto& m) { m.cache_kinds[1].element_type = DType::kBFloat16; }},
      {"manifest.cache_kinds", [](auto& m) { m.cache_kinds[0].block_tokens = 16; }},
  };
  Table t;
  for (const Bad& bad : table) {
    Manifest manifest = t.Good();
    bad.spoil(manifest);
    const absl::Status status = t.table->Reserve(manifest).status();
    INFO(bad.field << ": " << std::string(status.ToString()));
    REQUIRE(absl::IsInvalidArgument(status));
    CHECK(FieldOf(status) == bad.field);
    CHECK(t.Empty());
    const auto good = t.table->Reserve(t.Good());
    REQUIRE(good.ok());
    REQUIRE(t.table->Abort(good->transfer_id, "").ok());
  }
  Manifest other = t.Good();
  other.model_fingerprint = "beef";
  const absl::Status status = t.table->Reserve(other).status();
  CHECK(absl::IsFailedPrecondition(status));
  CHECK(ReasonOf(status) == "FINGERPRINT_MISMATCH");
}

TEST_CASE("what can never fit is refused for good, what does not fit now with a time to retry") {
  Table t(24 << 10);
  Manifest huge = t.Good();
  huge.prompt_token_ids.assign(900, 1);
  huge.context_length = 900;
  CHECK(absl::IsInvalidArgument(t.table->Reserve(huge).status()));
  std::vector<std::string> ids;
  for (;;) {
    const auto reserved = t.table->Reserve(t.Good());
    if (!reserved.ok()) {
      CHECK(absl::IsResourceExhausted(reserved.status()));
      CHECK(RetryAfterOf(reserved.status()).has_value());
      break;
    }
    ids.push_back(reserved->transfer_id);
  }
  REQUIRE(ids.size() > 2);
  REQUIRE(t.table->Abort(ids.back(), "make room").ok());
  ids.back() = t.Reserve();
  for (const std::string& id : ids) REQUIRE(t.table->Abort(id, "").ok());
  CHECK(t.Empty());
}

TEST_CASE("chunks in any order and any grouping land byte for byte at home") {
  Table t;
  const std::string id = t.Reserve();
  std::vector<ChunkHeader> chunks = t.AllChunks(id);
  SplitMix64 random(TestSeed());
  for (size_t i = chunks.size(); i > 1; --i) std::swap(chunks[i - 1], chunks[random.Below(i)]);
  for (const ChunkHeader& chunk : chunks) REQUIRE(*t.Land(chunk, t.Payload(chunk)) == 1);
  REQUIRE(*t.table->Commit(id, {}, nullptr) == kContext);
  const auto attached = t.table->Attach(ById(id));
  REQUIRE(attached.ok());
  auto ready = t.table->TakeReady(*attached);
  REQUIRE(ready.ok());
  REQUIRE(ready->has_value());
  for (const ChunkHeader& chunk : chunks) {
    const auto kind = static_cast<size_t>(t.layout.FindKind(chunk.kind));
    const CacheKind& k = t.layout.kinds[kind];
    const uint8_t* block = (*ready)->home->BlockAddress(
        static_cast<int>(chunk.layer), kind, static_cast<int>(chunk.head_begin),
        chunk.token_begin / static_cast<uint32_t>(k.block_tokens));
    const std::vector<uint8_t> want = t.Payload(chunk);
    const int64_t tokens = static_cast<int64_t>(want.size()) / k.bytes_per_token;
    auto next = want.begin();
    for (const int64_t bytes : k.part_bytes) {
      REQUIRE(std::equal(next, next + tokens * bytes, block));
      next += tokens * bytes;
      block += k.block_tokens * bytes;
    }
  }
  CHECK((*ready)->prompt.size() == kContext);
  ready->reset();
  CHECK(t.Empty());
}

TEST_CASE("a chunk over several blocks and heads equals its pieces") {
  Table t;
  const std::string id = t.Reserve();
  ChunkHeader whole{id, 1, "kv", 0, 3, 0, kContext, 0};
  const std::vector<uint8_t> payload = t.Payload(whole);
  REQUIRE(*t.Land(whole, payload) == 3 * 6);
  // In the payload the first block of head 1 lies behind that of head 0, 4 tokens of 16 bytes.
  ChunkHeader piece{id, 1, "kv", 1, 2, 0, 4, 0};
  const std::vector<uint8_t> same(payload.begin() + 64, payload.begin() + 128);
  CHECK(*t.Land(piece, same) == 0);
  REQUIRE(t.table->Abort(id, "").ok());
}

TEST_CASE("a header's fault is named by its field") {
  struct Bad {
    const char* field;
    std::function<void(ChunkHeader&, uint64_t&)> spoil;
  };
  const std::vector<Bad> table = {
      {"header.layer", [](auto& h, auto&) { h.layer = 2; }},
      {"header.layer", [](auto& h, auto&) { h.layer = 0xFFFFFFFFu; }},
      {"header.kind", [](auto& h, auto&) { h.kind = "latent"; }},
      {"header.kind", [](auto& h, auto&) { h.kind.clear(); }},
      {"header.head_begin, header.head_end", [](auto& h, auto&) { h.head_end = 4; }},
      {"header.head_begin, header.head_end", [](auto& h, auto&) { h.head_begin = 1; }},
      {"header.token_begin, header.token_end", [](auto& h, auto&) { h.token_end = 22; }},
      {"header.token_begin, header.token_end", [](auto& h, auto&) { h.token_end = 0; }},
      {"header.token_begin, header.token_end",
       [](auto& h, auto&) { h.token_begin = h.token_end = 0xFFFFFFFCu; }},
      {"header.token_begin", [](auto& h, auto&) { h.token_begin = 2; }},
      {"header.token_end", [](auto& h, auto&) { h.token_end = 6; }},
      {"payload", [](auto&, auto& bytes) { bytes -= 1; }},
      {"payload", [](auto&, auto& bytes) { bytes = uint64_t{1} << 63; }},
  };
  Table t;
  const std::string id = t.Reserve();
  for (const Bad& bad : table) {
    ChunkHeader header{id, 0, "kv", 0, 1, 0, 8, 0};
    uint64_t bytes = t.PayloadBytes(header);
    bad.spoil(header, bytes);
    const absl::Status status = t.table->BeginChunk(header, bytes).status();
    INFO(bad.field << ": " << std::string(status.ToString()));
    REQUIRE(absl::IsInvalidArgument(status));
    CHECK(FieldOf(status) == bad.field);
  }
  const ChunkHeader good{id, 0, "kv", 0, 1, 0, 8, 0};
  CHECK(t.Land(good, t.Payload(good)).ok());
  CHECK(absl::IsNotFound(t.table->BeginChunk({"nobody", 0, "kv", 0, 1, 0, 8, 0}, 128).status()));
  REQUIRE(t.table->Abort(id, "").ok());
}

TEST_CASE("a chunk that fails its checksum leaves its blocks missing, and may be sent again") {
  Table t;
  const std::string id = t.Reserve();
  const std::vector<ChunkHeader> chunks = t.AllChunks(id);
  for (size_t i = 1; i < chunks.size(); ++i) REQUIRE(t.Land(chunks[i], t.Payload(chunks[i])).ok());
  ChunkHeader broken = chunks[0];
  const std::vector<uint8_t> payload = t.Payload(broken);
  broken.crc32c = Crc32c(payload) ^ 1;
  {
    auto landing = t.table->BeginChunk(broken, payload.size());
    REQUIRE(landing.ok());
    (*landing)->Append(payload);
    const absl::Status status = (*landing)->Finish().status();
    CHECK(absl::IsDataLoss(status));
    CHECK(std::string(status.message()).find("layer 0") != std::string::npos);
  }
  TransferInfo missing;
  const absl::Status commit = t.table->Commit(id, {}, &missing).status();
  CHECK(absl::IsFailedPrecondition(commit));
  CHECK(ReasonOf(commit) == "MISSING_BLOCKS");
  REQUIRE(missing.missing.size() == 1);
  CHECK(missing.missing[0].token_end == 4);
  CHECK(missing.missing[0].head_end == 1);
  REQUIRE(t.Land(chunks[0], payload).ok());
  CHECK(t.table->Commit(id, {}, nullptr).ok());
  CHECK(t.table->Commit(id, {}, nullptr).ok());  // idempotent
  REQUIRE(t.table->Abort(id, "").ok());
  CHECK(t.Empty());
}

TEST_CASE(
    "the same chunk twice is accepted once, and other bytes for a landed block poison the "
    "transfer") {
  Table t;
  const std::string id = t.Reserve();
  const auto attached = t.table->Attach(ById(id));
  REQUIRE(attached.ok());
  const ChunkHeader chunk{id, 0, "kv", 0, 3, 0, 8, 0};
  std::vector<uint8_t> payload = t.Payload(chunk);
  CHECK(*t.Land(chunk, payload) == 6);
  CHECK(*t.Land(chunk, payload) == 0);
  payload[17] ^= 1;
  const absl::Status status = t.Land(chunk, payload).status();
  CHECK(absl::IsFailedPrecondition(status));
  CHECK(ReasonOf(status) == "POISONED");
  CHECK(absl::IsFailedPrecondition(t.table->Commit(id, {}, nullptr).status()));
  CHECK(absl::IsFailedPrecondition(t.Land(chunk, payload).status()));
  // The Generate that waits for it learns of that at once.
  CHECK(ReasonOf(t.table->TakeReady(*attached).status()) == "POISONED");
  // A Generate that comes now learns it too.
  CHECK(ReasonOf(t.table->Attach(ById(id)).status()) == "POISONED");
  REQUIRE(t.table->Abort(id, "").ok());
  CHECK(t.Empty());
}

TEST_CASE("a Generate whose transfer ended does not take the key from the next one") {
  Table t;
  Manifest manifest = t.Good();
  manifest.rendezvous_key = "room";
  const auto first = t.table->Reserve(manifest);
  const auto old = t.table->Attach(ByKey("room"));
  REQUIRE(old.ok());
  REQUIRE(t.table->Abort(first->transfer_id, "").ok());
  const auto next = t.table->Attach(ByKey("room"));
  REQUIRE(next.ok());
  t.table->Detach(*old, /*abort_transfer=*/true);
  const auto second = t.table->Reserve(manifest);
  REQUIRE(second.ok());
  REQUIRE(t.table->Info(*next).has_value());
  CHECK(t.table->Info(*next)->transfer_id == second->transfer_id);
  REQUIRE(t.table->Abort(second->transfer_id, "").ok());
}

TEST_CASE("missing ranges join neighbours in tokens and heads") {
  Table t;
  const std::string id = t.Reserve();
  auto info = t.table->Get(id, 100);
  REQUIRE(info.ok());
  // All heads miss everything, which makes one range for each layer and kind.
  CHECK(info->missing.size() == 4);
  CHECK(info->missing[0].head_end == 3);
  CHECK(info->missing[0].token_end == kContext);
  const ChunkHeader middle{id, 0, "kv", 1, 2, 8, 12, 0};
  REQUIRE(t.Land(middle, t.Payload(middle)).ok());
  info = t.table->Get(id, 100);
  REQUIRE(info.ok());
  CHECK(info->blocks_landed == 1);
  CHECK(info->missing.size() == 7);
  CHECK(t.table->Get(id, 2)->missing.size() == 2);
  REQUIRE(t.table->Abort(id, "").ok());
}

TEST_CASE("a lease that ends gives the pages back, although nothing else arrives") {
  Table t;
  const std::string id = t.Reserve();
  const auto attached = t.table->Attach(ById(id));
  t.clock.Advance(absl::Seconds(9));
  CHECK(t.Reap() == 0);
  const ChunkHeader chunk{id, 0, "kv", 0, 3, 0, 8, 0};
  REQUIRE(t.Land(chunk, t.Payload(chunk)).ok());  // a Write renews it
  t.clock.Advance(absl::Seconds(9));
  CHECK(t.Reap() == 0);
  t.clock.Advance(absl::Seconds(2));
  CHECK(t.Reap() == 1);
  CHECK(t.Empty());
  const absl::Status ended = t.table->TakeReady(*attached).status();
  CHECK(absl::IsDeadlineExceeded(ended));
  CHECK(ReasonOf(ended) == "LEASE_EXPIRED");
  CHECK(absl::IsNotFound(t.table->Commit(id, {}, nullptr).status()));
}

TEST_CASE("two writers of the same block: one lands it, the other is told to come again") {
  Table t;
  const std::string id = t.Reserve();
  const ChunkHeader chunk{id, 0, "kv", 0, 1, 0, 4, 0};
  auto first = t.table->BeginChunk(chunk, 64);
  REQUIRE(first.ok());
  CHECK(absl::IsAborted(t.table->BeginChunk(chunk, 64).status()));
  first->reset();  // gives its claim up
  CHECK(t.Land(chunk, t.Payload(chunk)).ok());
  REQUIRE(t.table->Abort(id, "").ok());
}

TEST_CASE("a Generate and a transfer meet by key, whichever comes first, and only once") {
  Table t;
  const auto early = t.table->Attach(ByKey("room"));
  REQUIRE(early.ok());
  CHECK_FALSE(t.table->Info(*early).has_value());
  CHECK(absl::IsAlreadyExists(t.table->Attach(ByKey("room")).status()));
  Manifest manifest = t.Good();
  manifest.rendezvous_key = "room";
  const auto reserved = t.table->Reserve(manifest);
  REQUIRE(reserved.ok());
  CHECK(absl::IsAlreadyExists(t.table->Reserve(manifest).status()));
  CHECK(t.table->Info(*early)->transfer_id == reserved->transfer_id);
  CHECK(absl::IsAlreadyExists(t.table->Attach(ById(reserved->transfer_id)).status()));
  // The key is the tenant's own.
  manifest.tenant = "other";
  const auto others = t.table->Reserve(manifest);
  REQUIRE(others.ok());
  REQUIRE(t.table->Attach(ByKey("room", "other")).ok());
  REQUIRE(t.table->Abort(others->transfer_id, "").ok());

  for (const ChunkHeader& h : t.AllChunks(reserved->transfer_id)) {
    REQUIRE(t.Land(h, t.Payload(h)).ok());
  }
  auto ready = t.table->TakeReady(*early);
  REQUIRE(ready.ok());
  CHECK_FALSE(ready->has_value());  // not committed yet
  OutputToken first;
  first.id = 7;
  REQUIRE(t.table->Commit(reserved->transfer_id, {first}, nullptr).ok());
  ready = t.table->TakeReady(*early);
  REQUIRE(ready.ok());
  REQUIRE(ready->has_value());
  CHECK((*ready)->first_tokens.at(0).id == 7);
  // A Commit whose answer was lost is answered again, and so is the question whether it arrived.
  CHECK(t.table->Get(reserved->transfer_id, 1)->state == TransferInfo::State::kCommitted);
  CHECK(t.table->Commit(reserved->transfer_id, {}, nullptr).ok());
  ready->reset();
  manifest.tenant.clear();
  const auto again = t.table->Reserve(manifest);  // the key is free again
  REQUIRE(again.ok());
  REQUIRE(t.table->Abort(again->transfer_id, "").ok());
  CHECK(t.Empty());
}

TEST_CASE("first tokens are checked, and a transfer whose Generate went away is given up") {
  Table t;
  const std::string id = t.ReserveAndFill();
  OutputToken bad;
  bad.id = 100;
  CHECK(FieldOf(t.table->Commit(id, {bad}, nullptr).status()) == "first_tokens");
  bad.id = 1;
  CHECK(FieldOf(t.table->Commit(id, std::vector<OutputToken>(11, bad), nullptr).status()) ==
        "first_tokens");
  const auto attached = t.table->Attach(ById(id));
  REQUIRE(attached.ok());
  t.table->Detach(*attached, /*abort_transfer=*/true);
  CHECK(t.Empty());
  CHECK(t.table->Abort(id, "").ok());  // idempotent
}

TEST_CASE("open transfers are bounded in number and in bytes of prompts") {
  const CacheLayout layout = TwoKinds();
  const auto dram = MakePool("dram", layout, 256 << 10), hbm = MakePool("hbm", layout, 256 << 10);
  ManualClock clock;
  TransferTable::Options options;
  options.model_fingerprint = "f00d";
  options.vocab_size = 100;
  options.max_context = 1000;
  options.footprint = [](int64_t context, int64_t) { return Footprint{context, 0}; };
  options.max_open = 3;
  options.max_prompt_bytes = 200;
  TransferTable table(options, dram.get(), hbm.get(), &clock);
  Manifest manifest;
  manifest.model_fingerprint = "f00d";
  manifest.context_length = 1;
  manifest.max_new_tokens = 1;
  const auto reserve = [&](size_t prompt) {
    manifest.prompt_token_ids.assign(prompt, 1);
    return table.Reserve(manifest);
  };
  const auto first = reserve(40);  // 160 bytes
  REQUIRE(first.ok());
  const absl::Status too_long = reserve(11).status();
  CHECK(ReasonOf(too_long) == "TOO_MANY_TRANSFERS");
  CHECK(RetryAfterOf(too_long).has_value());
  REQUIRE(reserve(10).ok());
  REQUIRE(table.Abort(first->transfer_id, "").ok());
  REQUIRE(reserve(1).ok());
  REQUIRE(reserve(1).ok());
  const int64_t reserved_bytes = dram->UsageOf(0).reserved_bytes;
  CHECK(ReasonOf(reserve(1).status()) == "TOO_MANY_TRANSFERS");
  CHECK(dram->UsageOf(0).reserved_bytes == reserved_bytes);
  clock.Advance(absl::Seconds(61));
  CHECK(reserve(1).ok());  // the leases of the others are over
  CHECK(table.open_transfers() == 1);
}

TEST_CASE(
    "ten thousand abandoned reservations end with their leases, without a pass over the open") {
  Table t(16 << 20);
  Manifest manifest = t.Good();
  manifest.context_length = 1;
  constexpr int kMany = 10'000;
  std::vector<std::string> ids;
  for (int i = 0; i < kMany; ++i) {
    const auto reserved = t.table->Reserve(manifest);
    REQUIRE(reserved.ok());
    ids.push_back(reserved->transfer_id);
    REQUIRE(t.Reap() ==
            0);  // as often as the engine would call it; passes over all would make 10^8 looks
  }
  CHECK(t.table->open_transfers() == kMany);
  // Transfers that are written to stay. The others go, all at once.
  t.clock.Advance(absl::Seconds(9));
  for (int i = 0; i < kMany; i += 100) {
    const ChunkHeader chunk{ids[static_cast<size_t>(i)], 0, "kv", 0, 1, 0, 1, 0};
    REQUIRE(t.Land(chunk, t.Payload(chunk)).ok());
  }
  t.clock.Advance(absl::Seconds(2));
  CHECK(t.Reap() == kMany - kMany / 100);
  t.clock.Advance(absl::Seconds(9));
  CHECK(t.Reap() == kMany / 100);
  CHECK(t.Empty());
}

}  // namespace
}  // namespace sluice
