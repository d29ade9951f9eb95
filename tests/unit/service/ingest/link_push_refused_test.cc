// Tests what a decode node and the links to it refuse: pushes that find no link or no turn on it,
// and streams that break the rules of KvIngest.WriteByLink.
#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/device/cpu/cpu_peer_link.h"
#include "src/service/wire/status_mapping.h"
#include "tests/support/or_fail.h"
#include "tests/unit/service/ingest/link_push_support.h"

namespace sluice {
namespace {

using testing::PushPair;

// Links of a device that there is not.
class OtherLinks : public PeerLinks {
 public:
  const char* transport() const override { return "pigeons"; }
  absl::StatusOr<std::string> NewId() override { return absl::InternalError("none"); }
  absl::Status CheckId(const std::string&) const override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<PeerLink>> Join(const PeerLinkOptions&) override {
    return absl::InternalError("none");
  }
};

TEST_CASE("a node without links, or with links of another kind, says so once", "[links]") {
  SECTION("none") {
    PushPair pair(/*linked=*/false);
    for (int i = 0; i < 2; ++i) {
      const absl::Status refused = pair.Open(pair.Reserve()).status();
      CHECK(absl::IsFailedPrecondition(refused));
      CHECK(refused.message().find("kv_transport is grpc") != std::string::npos);
    }
  }
  SECTION("another kind") {
    PushPair pair(/*linked=*/true, std::make_shared<OtherLinks>());
    const absl::Status refused = pair.Open(pair.Reserve()).status();
    CHECK(absl::IsFailedPrecondition(refused));
    CHECK(refused.message().find("pigeons") != std::string::npos);
  }
}

TEST_CASE("a transfer that is not there is refused before a link is made", "[links]") {
  PushPair pair;
  CHECK(absl::IsNotFound(pair.Open(std::string(32, '0')).status()));
  CHECK(pair.Link().empty());
  pair.PushWell();
}

TEST_CASE("a push waits for its turn on the link, but not longer than the deadline", "[links]") {
  PushPair pair;
  auto first = OrFail(pair.Open(pair.Reserve()));
  const absl::Status late = pair.Open(pair.Reserve()).status();
  CHECK(absl::IsUnavailable(late));
  std::thread ends([&] {
    absl::SleepFor(PushPair::kDeadline / 4);
    first->Finish().IgnoreError();
  });
  const auto second = pair.Open(pair.Reserve());
  ends.join();
  CHECK(second.ok());
}

TEST_CASE("a stream that does not keep to the order is told so, and harms nobody", "[links]") {
  PushPair pair;
  const auto answer_to = [&](const std::vector<v1::WriteByLinkRequest>& messages) {
    grpc::ClientContext context;
    const auto stream = pair.stub->WriteByLink(&context);
    for (const auto& message : messages) stream->Write(message);
    stream->WritesDone();
    v1::WriteByLinkResponse answer;
    while (stream->Read(&answer)) continue;
    return FromGrpcStatus(stream->Finish());
  };
  v1::WriteByLinkRequest chunk;
  chunk.mutable_message()->add_chunks()->set_bytes(5);
  CHECK(FieldOf(answer_to({})) == "open");
  CHECK(FieldOf(answer_to({chunk})) == "open");
  v1::WriteByLinkRequest open;
  open.mutable_open()->set_transfer_id(std::string(200, 'x'));
  CHECK(FieldOf(answer_to({open})) == "open.transfer_id");
  open.mutable_open()->set_transfer_id(pair.Reserve());
  open.mutable_open()->set_transport("shared_memory");
  // It breaks off while the node waits for the other end of the link.
  const absl::Status broken = answer_to({open, chunk});
  CHECK_FALSE(broken.ok());
  pair.PushWell();
}

TEST_CASE("a sender that keeps checksums back, or sends too many, loses its link", "[links]") {
  PushPair pair;
  grpc::ClientContext context;
  const auto stream = pair.stub->WriteByLink(&context);
  v1::WriteByLinkRequest open;
  open.mutable_open()->set_transfer_id(pair.Reserve());
  open.mutable_open()->set_transport("shared_memory");
  REQUIRE(stream->Write(open));
  v1::WriteByLinkResponse answer;
  REQUIRE(stream->Read(&answer));
  PeerLinkOptions options;
  options.id = answer.link_id();
  options.sends = true;
  options.message_bytes = answer.message_bytes();
  options.depth = static_cast<int>(answer.depth());
  const auto link = OrFail(NewCpuPeerLinks()->Join(options));
  while (!answer.ready()) REQUIRE(stream->Read(&answer));
  v1::WriteByLinkRequest crc;
  crc.set_crc32c(7);
  std::string words, field = "crc32c";
  SECTION("one is missing at the end") {
    const LinkPush::Chunk chunk = PushPair::Chunk(0);
    v1::WriteByLinkRequest header;
    v1::LinkChunk& added = *header.mutable_message()->add_chunks();
    *added.mutable_header() = chunk.header;
    added.set_bytes(chunk.bytes);
    stream->Write(header);
    const PeerLink::Piece piece = {pair.bytes.data(), chunk.bytes};
    REQUIRE(link->Send({&piece, 1}).ok());
    v1::WriteByLinkRequest end;
    end.set_end(true);
    stream->Write(end);
    words = "is missing for a message";
  }
  SECTION("a message has too many chunks") {
    v1::WriteByLinkRequest many;
    for (int i = 0; i < 1025; ++i) many.mutable_message()->add_chunks();
    stream->Write(many);
    field = "message.chunks";
    words = "has 1025 entries";
  }
  SECTION("a message has none") {
    v1::WriteByLinkRequest none;
    none.mutable_message();
    stream->Write(none);
    field = "";
    words = "at least one byte";
  }
  SECTION("they come for no messages") {
    for (int i = 0; i < 256; ++i) stream->Write(crc);
    words = "for more messages than were sent";
  }
  while (stream->Read(&answer)) continue;
  const absl::Status status = FromGrpcStatus(stream->Finish());
  CHECK(absl::IsInvalidArgument(status));
  CHECK(FieldOf(status).value_or("") == field);
  CHECK(status.message().find(words) != std::string::npos);
  pair.PushWell();
}

}  // namespace
}  // namespace sluice
