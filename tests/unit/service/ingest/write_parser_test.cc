#include "src/service/ingest/write_parser.h"

#include <google/protobuf/io/zero_copy_stream.h>
#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <string>
#include <vector>

#include "sluice/v1/ingest.pb.h"
#include "src/base/error.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

// A message in slices that end at given offsets, as a transport cuts it.
class Slices : public google::protobuf::io::ZeroCopyInputStream {
 public:
  Slices(const std::string& bytes, std::vector<size_t> cuts)
      : bytes_(bytes), cuts_(std::move(cuts)) {
    cuts_.push_back(bytes.size());
    std::sort(cuts_.begin(), cuts_.end());
  }
  bool Next(const void** data, int* size) override {
    if (at_ == bytes_.size()) return false;
    const size_t end = *std::upper_bound(cuts_.begin(), cuts_.end(), at_);
    *data = bytes_.data() + at_;
    *size = static_cast<int>(end - at_);
    at_ = end;
    return true;
  }
  void BackUp(int count) override { at_ -= static_cast<size_t>(count); }
  bool Skip(int count) override {
    const size_t take = std::min(static_cast<size_t>(count), bytes_.size() - at_);
    at_ += take;
    return take == static_cast<size_t>(count);
  }
  int64_t ByteCount() const override { return static_cast<int64_t>(at_); }

 private:
  const std::string& bytes_;
  std::vector<size_t> cuts_;
  size_t at_ = 0;
};

struct Recorder : ChunkSink {
  absl::Status Begin(const ChunkHeader& h, uint64_t bytes) override {
    ++begins;
    header = h;
    announced = bytes;
    return answer;
  }
  void Append(absl::Span<const uint8_t> bytes) override {
    payload.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  absl::Status answer;
  int begins = 0;
  ChunkHeader header;
  uint64_t announced = 0;
  std::string payload;
};

v1::WriteRequest Chunk(size_t payload_bytes) {
  v1::WriteRequest chunk;
  chunk.mutable_header()->set_transfer_id("0123456789abcdef0123456789abcdef");
  chunk.mutable_header()->set_layer(5);
  chunk.mutable_header()->set_kind("kv");
  chunk.mutable_header()->set_head_begin(1);
  chunk.mutable_header()->set_head_end(3);
  chunk.mutable_header()->set_token_begin(64);
  chunk.mutable_header()->set_token_end(96);
  chunk.mutable_header()->set_crc32c(0xDEADBEEF);
  std::mt19937_64 random(TestSeed());
  for (size_t i = 0; i < payload_bytes; ++i) chunk.mutable_payload()->push_back(char(random()));
  return chunk;
}

absl::Status Parse(const std::string& bytes, ChunkSink& sink, std::vector<size_t> cuts = {}) {
  Slices slices(bytes, std::move(cuts));
  return ParseWriteRequest(&slices, bytes.size(), sink);
}

void CheckLanded(const Recorder& got, const v1::WriteRequest& chunk) {
  CHECK(got.begins == 1);
  CHECK(got.announced == chunk.payload().size());
  CHECK((got.payload == chunk.payload()));
  CHECK(got.header.transfer_id == chunk.header().transfer_id());
  CHECK(got.header.layer == 5);
  CHECK(got.header.kind == "kv");
  CHECK(got.header.head_begin == 1);
  CHECK(got.header.head_end == 3);
  CHECK(got.header.token_begin == 64);
  CHECK(got.header.token_end == 96);
  CHECK(got.header.crc32c == 0xDEADBEEF);
}

TEST_CASE("a chunk is read whole wherever the transport cuts it") {
  const v1::WriteRequest chunk = Chunk(300);
  const std::string bytes = chunk.SerializeAsString();
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    INFO("cut at " << cut);
    Recorder got;
    REQUIRE(Parse(bytes, got, {cut}).ok());
    CheckLanded(got, chunk);
  }
}

TEST_CASE("a chunk in slices of one byte, and in random ones, is read whole") {
  const v1::WriteRequest chunk = Chunk(5000);
  const std::string bytes = chunk.SerializeAsString();
  std::vector<size_t> every;
  for (size_t i = 0; i < bytes.size(); ++i) every.push_back(i);
  Recorder got;
  REQUIRE(Parse(bytes, got, every).ok());
  CheckLanded(got, chunk);
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 50; ++round) {
    std::vector<size_t> cuts;
    for (int i = 0; i < 17; ++i) cuts.push_back(random() % bytes.size());
    Recorder again;
    REQUIRE(Parse(bytes, again, cuts).ok());
    CheckLanded(again, chunk);
  }
}

TEST_CASE("a message that ends early is refused at every length") {
  const std::string bytes = Chunk(100).SerializeAsString();
  for (size_t length = 0; length < bytes.size(); ++length) {
    INFO("length " << length);
    Recorder got;
    const absl::Status status = Parse(bytes.substr(0, length), got);
    CHECK(absl::IsInvalidArgument(status));
    CHECK(FieldOf(status).has_value());
  }
}

TEST_CASE("unknown fields are skipped, before, between and after") {
  const v1::WriteRequest chunk = Chunk(40);
  v1::WriteRequest header_only, payload_only;
  *header_only.mutable_header() = chunk.header();
  payload_only.set_payload(chunk.payload());
  const std::string varint = "\x78\x96\x01";                        // field 15, varint
  const std::string text = std::string("\x82\x01\x03", 3) + "abc";  // field 16, bytes
  const std::string fixed = std::string("\x8d\x01", 2) + "1234";    // field 17, fixed32
  const std::string bytes =
      varint + header_only.SerializeAsString() + text + payload_only.SerializeAsString() + fixed;
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    Recorder got;
    REQUIRE(Parse(bytes, got, {cut}).ok());
    CheckLanded(got, chunk);
  }
}

TEST_CASE("headers and payloads that are missing, doubled or in the wrong order name the field") {
  const v1::WriteRequest chunk = Chunk(40);
  v1::WriteRequest header_message, payload_message;
  *header_message.mutable_header() = chunk.header();
  payload_message.set_payload(chunk.payload());
  const std::string header = header_message.SerializeAsString();
  const std::string payload = payload_message.SerializeAsString();
  const auto field = [](const std::string& bytes) {
    Recorder got;
    const absl::Status status = Parse(bytes, got);
    CHECK(absl::IsInvalidArgument(status));
    return FieldOf(status).value_or("none");
  };
  CHECK(field("") == "header");
  CHECK(field(header) == "payload");
  CHECK(field(payload) == "header");
  CHECK(field(payload + header) == "header");
  CHECK(field(header + header + payload) == "header");
  CHECK(field(header + payload + payload) == "payload");
  CHECK(field(header + payload + header) == "header");
  CHECK(field(std::string("\x0a\x02\xff\xff", 4) + payload) == "header");  // not a ChunkHeader
  CHECK(field(std::string("\x00", 1)) == "message");
  CHECK(field(header + payload + "\x0c") == "message");  // the end of a group that never began
  CHECK(field(std::string("\x0a\x81\x20", 3) + std::string(4097, 'x')) == "header");  // too long
}

TEST_CASE("a payload that announces more than follows is not begun") {
  const std::string header = [] {
    v1::WriteRequest message;
    *message.mutable_header() = Chunk(0).header();
    return message.SerializeAsString();
  }();
  Recorder got;
  // The field announces 2^32 - 1 bytes, of which four follow.
  const absl::Status status = Parse(header + "\x12\xff\xff\xff\xff\x0f" + "abcd", got);
  CHECK(FieldOf(status) == "payload");
  CHECK(got.begins == 0);
}

TEST_CASE("an error of the sink ends the parse before any byte is handed over") {
  Recorder got;
  got.answer = absl::NotFoundError("no such transfer");
  CHECK(Parse(Chunk(40).SerializeAsString(), got) == got.answer);
  CHECK(got.payload.empty());
}

TEST_CASE("random bytes never crash the parser") {
  google::protobuf::LogSilencer silence;  // protobuf logs each name that is no UTF-8
  std::mt19937_64 random(TestSeed());
  const std::string good = Chunk(64).SerializeAsString();
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good;
    for (int flips = 1 + static_cast<int>(random() % 4); flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    Recorder got;
    const absl::Status status = Parse(bytes, got, {random() % bytes.size()});
    if (status.ok()) CHECK(got.payload.size() == got.announced);
  }
}

}  // namespace
}  // namespace sluice
