// Damages messages of the wire. Whatever a peer can send reaches the transfer table, lands or is
// refused, and leaves no page behind.
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/stubs/logging.h>

#include <catch2/catch.hpp>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

extern "C" {
#include <isa-l/crc.h>
}

#include "sluice/v1/decode.pb.h"
#include "sluice/v1/ingest.pb.h"
#include "src/attention/policies/ess/warm_plan.h"
#include "src/base/manual_clock.h"
#include "src/base/status_macros.h"
#include "src/kv/selection_hints.h"
#include "src/kv/transfer_table.h"
#include "src/sampling/sampling_params.h"
#include "src/service/ingest/write_parser.h"
#include "src/service/wire/proto_conversion.h"
#include "tests/fuzz/allocation_meter.h"
#include "tests/fuzz/mutator.h"
#include "tests/test_main.h"
#include "tests/unit/kv/kv_support.h"

namespace sluice {
namespace {

using fuzz::AllocationMeter;
using fuzz::Mutator;

constexpr uint32_t kVocabulary = 100;
constexpr uint32_t kMaxContext = 64;
// The worst message is a list of empty CacheKinds: 2 bytes each on the wire, about 100 in memory,
// and the list that points to them while it grows.
constexpr size_t kBytesPerByte = 128;
constexpr size_t kBytesAlways = 64 << 10;
// Protobuf takes as much for a string of a damaged length before it sees that the message ends
// (kSafeStringSize in its coded streams).
constexpr size_t kProtobufBytes = 50'000'000;

// Lands a chunk as the ingest service does.
class LandingSink : public ChunkSink {
 public:
  explicit LandingSink(TransferTable* table) : table_(table) {}
  absl::Status Begin(const ChunkHeader& header, uint64_t bytes) override {
    SLUICE_ASSIGN_OR_RETURN(landing, table_->BeginChunk(header, bytes));
    return absl::OkStatus();
  }
  void Append(absl::Span<const uint8_t> bytes) override { landing->Append(bytes); }
  std::unique_ptr<ChunkLanding> landing;

 private:
  TransferTable* const table_;
};

class Node {
 public:
  Node()
      : hbm_(MakePool("hbm", TwoKinds(), 64 << 10)),
        dram_(MakePool("dram", TwoKinds(), 64 << 10)),
        table_(Options(), dram_.get(), hbm_.get(), &clock_) {}

  TransferTable& table() { return table_; }
  bool Empty() const {
    for (size_t kind = 0; kind < 2; ++kind) {
      const PagePool::Usage usage = dram_->UsageOf(kind);
      if (usage.reserved_bytes != 0 || usage.used_bytes != 0) return false;
    }
    return table_.open_transfers() == 0;
  }
  v1::ReserveRequest GoodReserve() const {
    v1::ReserveRequest request;
    v1::Manifest* manifest = request.mutable_manifest();
    manifest->set_model_fingerprint("model");
    for (const CacheKind& kind : TwoKinds().kinds) *manifest->add_cache_kinds() = ToProto(kind);
    manifest->set_context_length(10);
    for (uint32_t i = 0; i < 12; ++i) manifest->add_prompt_token_ids(i);
    manifest->set_max_new_tokens(5);
    manifest->set_tenant("tenant");
    request.set_rendezvous_key("key");
    request.mutable_lease()->set_seconds(7);
    return request;
  }
  absl::Status Reserve(const std::string& bytes, std::string* id, bool* is_message = nullptr) {
    v1::ReserveRequest request;
    const bool parsed = request.ParseFromString(bytes);
    if (is_message != nullptr) *is_message = parsed;
    if (!parsed) return absl::InvalidArgumentError("no message");
    SLUICE_ASSIGN_OR_RETURN(const Manifest manifest, FromProto(request));
    SLUICE_ASSIGN_OR_RETURN(const TransferTable::Reserved reserved, table_.Reserve(manifest));
    *id = reserved.transfer_id;
    return absl::OkStatus();
  }

 private:
  static TransferTable::Options Options() {
    TransferTable::Options options;
    options.model_fingerprint = "model";
    options.vocab_size = kVocabulary;
    options.max_context = kMaxContext;
    options.max_chunk_bytes = 4096;
    options.footprint = [](int64_t, int64_t total) { return Footprint{total, total}; };
    return options;
  }
  ManualClock clock_;
  std::unique_ptr<PagePool> hbm_, dram_;
  TransferTable table_;
};

// Returns the chunk of layer 1, heads 0 to 3, tokens 0 to 8 of kind "kv".
v1::WriteRequest GoodChunk(const std::string& id) {
  v1::WriteRequest chunk;
  chunk.mutable_payload()->assign(3 * 8 * 16, 'x');
  v1::ChunkHeader* header = chunk.mutable_header();
  header->set_transfer_id(id);
  header->set_layer(1);
  header->set_kind("kv");
  header->set_head_end(3);
  header->set_token_end(8);
  header->set_crc32c(~crc32_iscsi(reinterpret_cast<uint8_t*>(chunk.mutable_payload()->data()),
                                  static_cast<int>(chunk.payload().size()), ~0u));
  return chunk;
}

absl::Status Land(TransferTable* table, const std::string& bytes, size_t slice) {
  google::protobuf::io::ArrayInputStream in(bytes.data(), static_cast<int>(bytes.size()),
                                            static_cast<int>(slice));
  LandingSink sink(table);
  SLUICE_RETURN_IF_ERROR(ParseWriteRequest(&in, bytes.size(), sink));
  return sink.landing->Finish().status();
}

TEST_CASE("damaged chunks land or are refused, and a good one lands after all") {
  google::protobuf::LogSilencer silence;  // protobuf logs each name that is no UTF-8
  Node node;
  int landed = 0, refused = 0;
  Mutator sizes(TestSeed(), {""});
  for (int transfer = 0; transfer < 40; ++transfer) {
    std::string id;
    REQUIRE(node.Reserve(node.GoodReserve().SerializeAsString(), &id).ok());
    Mutator mutator(TestSeed() + static_cast<uint64_t>(transfer),
                    {GoodChunk(id).SerializeAsString()});
    for (int round = 0; round < 500; ++round) {
      const std::string bytes = mutator.Next();
      const size_t slice = 1 + sizes.Below(bytes.size() + 1);
      AllocationMeter meter;
      const absl::Status status = Land(&node.table(), bytes, slice);
      const size_t peak = meter.peak_bytes();
      INFO("transfer " << transfer << ", round " << round << ": " << status.ToString());
      if (peak > kBytesAlways + kBytesPerByte * bytes.size()) FAIL("took " << peak << " bytes");
      ++(status.ok() ? landed : refused);
    }
    const absl::Status good =
        Land(&node.table(), GoodChunk(id).SerializeAsString(), 1 + sizes.Below(500));
    // A chunk with other bytes and the right checksum poisons the transfer. Nothing else may refuse
    // the good chunk.
    const auto info = node.table().Get(id, 1);
    REQUIRE(info.ok());
    CHECK((good.ok() || info->state == TransferInfo::State::kPoisoned));
    REQUIRE(node.table().Abort(id, "").ok());
    REQUIRE(node.Empty());
  }
  CHECK(landed > 0);
  CHECK(refused > 0);
}

TEST_CASE("damaged manifests are reserved or refused, and nothing stays") {
  google::protobuf::LogSilencer silence;
  Node node;
  Mutator mutator(TestSeed(), {node.GoodReserve().SerializeAsString()});
  int reserved = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    const std::string bytes = mutator.Next();
    std::string id;
    bool is_message = false;
    AllocationMeter meter;
    const absl::Status status = node.Reserve(bytes, &id, &is_message);
    const size_t peak = meter.peak_bytes();
    INFO("round " << round << ": " << status.ToString());
    const size_t most = kBytesAlways + (is_message ? 0 : kProtobufBytes);
    if (peak > most + kBytesPerByte * bytes.size()) FAIL("took " << peak << " bytes");
    ++(status.ok() ? reserved : refused);
    if (status.ok()) REQUIRE(node.table().Abort(id, "").ok());
    REQUIRE(node.Empty());
  }
  CHECK(reserved > 0);
  CHECK(refused > 0);
}

v1::Hints GoodHints(uint32_t unit_tokens) {
  v1::Hints hints;
  hints.set_unit_tokens(unit_tokens);
  for (uint32_t i = 0; i < 12; ++i) {
    v1::Hints::Entry* entry = hints.add_entries();
    entry->set_layer(i % 3);
    if (i % 4 != 3) entry->set_position(20 + i);
    for (uint32_t u = i; u < kMaxContext / unit_tokens; u += 3 + i) entry->add_units(u);
  }
  hints.set_queries(std::string(24, 'q'));
  return hints;
}

TEST_CASE("damaged hints are refused, or leave a pool of the sequence's own entries") {
  google::protobuf::LogSilencer silence;
  constexpr int64_t kTokens = 50;
  HintBounds bounds;
  bounds.layers = 3;
  bounds.kv_heads = 1;
  bounds.block_tokens = 8;
  bounds.context_length = kTokens;
  bounds.most_tokens = 40;
  Mutator mutator(TestSeed(), {GoodHints(1).SerializeAsString(), GoodHints(8).SerializeAsString()});
  int taken = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    v1::Hints message;
    if (!message.ParseFromString(mutator.Next())) continue;
    const absl::StatusOr<SelectionHints> hints = FromProto(message);
    const absl::Status status = hints.ok() ? CheckHints(*hints, bounds) : hints.status();
    ++(status.ok() ? taken : refused);
    if (!status.ok()) REQUIRE(status.message().find("hints") != std::string::npos);
    if (!hints.ok()) continue;
    // Refused hints are tried too: a pool must not be worse off for them.
    WarmPlan plan(*hints, kTokens);
    for (int layer = 0; layer < 3; ++layer) {
      for (const int64_t room : {int64_t{7}, kTokens}) {
        const std::vector<WarmEntry> entries = plan.Of(layer, room);
        REQUIRE(std::ssize(entries) == room);
        std::set<int32_t> units;
        for (const WarmEntry& entry : entries) {
          REQUIRE((entry.unit >= 0 && entry.unit < kTokens && entry.stamp < kTokens));
          REQUIRE(units.insert(entry.unit).second);
        }
      }
    }
  }
  CHECK(taken > 0);
  CHECK(refused > 0);
}

TEST_CASE("a damaged GenerateRequest becomes a request inside its bounds, or is refused") {
  google::protobuf::LogSilencer silence;
  v1::GenerateRequest good;
  good.set_request_id("request");
  good.set_rendezvous_key("key");
  for (uint32_t i = 0; i < 8; ++i) good.add_prompt_token_ids(i);
  v1::SamplingParams* sampling = good.mutable_sampling();
  sampling->set_temperature(0.5f);
  sampling->set_top_p(0.9f);
  sampling->set_max_tokens(7);
  (*sampling->mutable_logit_bias())[3] = 1.5f;
  sampling->add_stop("stop");
  sampling->add_stop_token_ids(4);
  sampling->set_logprobs(3);
  Mutator mutator(TestSeed(), {good.SerializeAsString()});
  int taken = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    v1::GenerateRequest message;
    absl::Status status = absl::InvalidArgumentError("no message");
    if (message.ParseFromString(mutator.Next())) {
      const absl::StatusOr<Request> request = FromProto(message, kVocabulary, kMaxContext);
      status = request.status();
      if (request.ok()) {
        REQUIRE(request->prompt.size() <= kMaxContext);
        for (const int32_t id : request->prompt) REQUIRE((id >= 0 && id < int32_t{kVocabulary}));
        status = ValidateSamplingParams(request->sampling, kVocabulary, true);
        // The device's form holds everything that was validated.
        if (status.ok()) {
          const std::vector<int32_t> stops = StopIds(request->sampling, {2});
          MakeSamplingSlot(request->sampling, 1, 8, static_cast<int32_t>(stops.size()));
        }
      }
    }
    ++(status.ok() ? taken : refused);
  }
  CHECK(taken > 0);
  CHECK(refused > 0);
}

}  // namespace
}  // namespace sluice
