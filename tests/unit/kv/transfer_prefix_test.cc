// Tests of transfers whose first blocks are here already: what Reserve answers, what senders may
// do, and that nobody writes to a block that others share.
#include <catch2/catch.hpp>

#include "src/base/error.h"
#include "tests/unit/kv/transfer_support.h"

namespace sluice {
namespace {

constexpr int64_t kShared = 16;  // two units of 8 tokens; the last token stays a sequence's own

// Takes a committed transfer as the engine does, and lets others share its blocks.
ReadySequence TakeAndShare(Table& t, const std::string& id) {
  REQUIRE(t.table->Commit(id, {}, nullptr).ok());
  const auto attached = t.table->Attach(ById(id));
  REQUIRE(attached.ok());
  auto ready = t.table->TakeReady(*attached);
  REQUIRE((ready.ok() && ready->has_value()));
  const int64_t most = t.table->ShareableTokens(kContext, kContext + 10);
  CHECK(most == kContext - 1);
  t.table->prefixes()->Publish((*ready)->tenant,
                               absl::MakeConstSpan((*ready)->prompt).subspan(0, most),
                               PrefixCache::Readers::kNone, *(*ready)->home);
  return **std::move(ready);
}

void Land(Table& t, const ChunkHeader& chunk) { REQUIRE(t.Land(chunk, t.Payload(chunk)).ok()); }

TransferTable::Reserved ReserveAs(Table& t, const std::string& tenant, Manifest manifest) {
  manifest.tenant = tenant;
  auto reserved = t.table->Reserve(manifest);
  REQUIRE(reserved.ok());
  return *std::move(reserved);
}

}  // namespace

TEST_CASE("Reserve answers how many tokens are here, and the rest completes the transfer") {
  Table t;
  CHECK(ReserveAs(t, "", t.Good()).cached_tokens == 0);
  TakeAndShare(t, t.ReserveAndFill());
  const TransferTable::Reserved reserved = ReserveAs(t, "", t.Good());
  CHECK(reserved.cached_tokens == kShared);
  const std::string id = reserved.transfer_id;
  TransferInfo missing;
  CHECK(ReasonOf(t.table->Commit(id, {}, &missing).status()) == "MISSING_BLOCKS");
  for (const MissingRange& range : missing.missing) {
    CHECK((range.token_begin == kShared && range.token_end == kContext));
  }
  for (const ChunkHeader& chunk : t.AllChunks(id)) {
    if (chunk.token_begin >= kShared) Land(t, chunk);
  }
  const ReadySequence ready = TakeAndShare(t, id);
  CHECK(ready.reused_tokens == kShared);
  CHECK(t.Intact(*ready.home, id));
}

TEST_CASE("what a sender sends of shared blocks is dropped, whatever it is") {
  Table t;
  const ReadySequence first = TakeAndShare(t, t.ReserveAndFill());
  const std::string id = ReserveAs(t, "", t.Good()).transfer_id;
  for (ChunkHeader chunk : t.AllChunks(id)) {  // an old sender sends everything
    const auto landed = t.Land(chunk, t.Payload(chunk));
    REQUIRE(landed.ok());
    CHECK(*landed == (chunk.token_begin >= kShared ? 1u : 0u));
  }
  // Other bytes and a wrong checksum: the blocks are not the sender's, so nothing is poisoned.
  ChunkHeader lie{id, 0, "kv", 0, 1, 0, 8, 0};
  const std::vector<uint8_t> bytes(t.PayloadBytes(lie), 0x77);
  auto landing = t.table->BeginChunk(lie, bytes.size());
  REQUIRE(landing.ok());
  (*landing)->Append(bytes);
  CHECK(*(*landing)->Finish() == 0);
  landing->reset();
  // A chunk that begins in shared blocks and ends behind them still needs its checksum.
  ChunkHeader across{id, 0, "kv", 0, 1, 12, 20, 0};
  std::vector<uint8_t> part = t.Payload({id, 0, "kv", 0, 1, 12, 16, 0});
  std::fill(part.begin(), part.end(), uint8_t{0x77});
  const std::vector<uint8_t> rest = t.Payload({id, 0, "kv", 0, 1, 16, 20, 0});
  part.insert(part.end(), rest.begin(), rest.end());
  landing = t.table->BeginChunk(across, part.size());
  REQUIRE(landing.ok());
  (*landing)->Append(part);
  CHECK(ReasonOf((*landing)->Finish().status()) == "CHECKSUM_MISMATCH");
  landing->reset();
  CHECK(t.Land(across, part).ok());
  const ReadySequence second = TakeAndShare(t, id);
  CHECK(t.Intact(*second.home, id));
  CHECK(t.Intact(*first.home, id));
  CHECK(first.home->Pages(0, 0)[0] == second.home->Pages(0, 0)[0]);
  CHECK(first.home->Pages(0, 0)[4] != second.home->Pages(0, 0)[4]);
}

TEST_CASE("a sender that leaves out more than is here is told so, and loses nothing") {
  Table t;
  TakeAndShare(t, t.ReserveAndFill());
  Manifest other = t.Good();
  other.prompt_token_ids[9] = 6;  // the second unit is another one
  const TransferTable::Reserved reserved = ReserveAs(t, "", other);
  CHECK(reserved.cached_tokens == 8);
  const std::string id = reserved.transfer_id;
  for (const ChunkHeader& chunk : t.AllChunks(id)) {
    if (chunk.token_begin >= kShared) Land(t, chunk);
  }
  TransferInfo missing;
  const absl::Status refused = t.table->Commit(id, {}, &missing).status();
  CHECK(ReasonOf(refused) == "MISSING_BLOCKS");
  CHECK_THAT(std::string(refused.message()), Catch::Contains("tokens [8, 16)"));
  for (const ChunkHeader& chunk : t.AllChunks(id)) {
    if (chunk.token_begin >= 8 && chunk.token_begin < kShared) Land(t, chunk);
  }
  CHECK(t.table->Commit(id, {}, nullptr).ok());
}

TEST_CASE("no tenant finds what another has") {
  Table t;
  Manifest manifest = t.Good();
  const std::string id = ReserveAs(t, "a", manifest).transfer_id;
  for (const ChunkHeader& chunk : t.AllChunks(id)) Land(t, chunk);
  TakeAndShare(t, id);
  CHECK(ReserveAs(t, "b", manifest).cached_tokens == 0);
  CHECK(ReserveAs(t, "", manifest).cached_tokens == 0);
  CHECK(ReserveAs(t, "a", manifest).cached_tokens == kShared);
}

TEST_CASE("a hand-off of a part of a prompt may find all of it") {
  Table t;
  TakeAndShare(t, t.ReserveAndFill());
  Manifest part = t.Good();
  part.context_length = 8;
  const TransferTable::Reserved reserved = ReserveAs(t, "", part);
  CHECK(reserved.cached_tokens == 8);
  CHECK(t.table->BlocksMissing(reserved.transfer_id) == 0);
  CHECK(*t.table->Commit(reserved.transfer_id, {}, nullptr) == 8);
}

TEST_CASE("blocks that nobody has make room for transfers, and those in use do not") {
  Table probe;
  const int64_t one = probe.dram->layout().BytesFor(kContext);
  Table t(static_cast<size_t>(2 * one) + 8192 + 100);
  TakeAndShare(t, t.ReserveAndFill());
  CHECK(t.dram->UsageOf(0).idle_bytes > 0);
  Manifest other = t.Good();
  other.prompt_token_ids.assign(kContext, 9);
  const std::string first = ReserveAs(t, "", other).transfer_id;
  const std::string second = ReserveAs(t, "", other).transfer_id;
  CHECK(t.dram->UsageOf(0).idle_bytes == 0);
  CHECK(ReasonOf(t.table->Reserve(other).status()) == "DRAM_FULL");
  CHECK(t.table->Abort(first, "").ok());
  CHECK(ReserveAs(t, "", t.Good()).cached_tokens == 0);
  CHECK(t.table->Abort(second, "").ok());
}

}  // namespace sluice
