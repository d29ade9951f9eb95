// Tests pushes over links of the CPU device, between a LinkPush and a real ingest service: what
// lands, and what becomes of the push, its link and the next push after an error.
#include "src/service/ingest/link_push.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/cpu_peer_link.h"
#include "tests/support/eventually.h"
#include "tests/support/or_fail.h"
#include "tests/unit/service/ingest/link_push_support.h"

namespace sluice {
namespace {

using testing::PushPair;

// Links of the CPU whose receiving ends are slow, and note how many messages are under way each
// time that they wait for one.
class SlowLinks : public PeerLinks {
 public:
  explicit SlowLinks(std::vector<int>* moving) : moving_(moving) {}
  const char* transport() const override { return links_->transport(); }
  absl::StatusOr<std::string> NewId() override { return links_->NewId(); }
  absl::Status CheckId(const std::string& id) const override { return links_->CheckId(id); }
  absl::StatusOr<std::unique_ptr<PeerLink>> Join(const PeerLinkOptions& options) override {
    SLUICE_ASSIGN_OR_RETURN(auto link, links_->Join(options));
    return std::make_unique<Link>(options, std::move(link), moving_);
  }

 private:
  class Link : public PeerLink {
   public:
    Link(const PeerLinkOptions& options, std::unique_ptr<PeerLink> link, std::vector<int>* moving)
        : PeerLink(options.message_bytes, options.depth), link_(std::move(link)), moving_(moving) {}
    absl::StatusOr<uint32_t> Sent() override { return link_->Sent(); }
    absl::Status Flush() override { return link_->Flush(); }
    absl::StatusOr<uint32_t> Await() override {
      moving_->push_back(asked_--);
      absl::SleepFor(absl::Milliseconds(10));
      return link_->Await();
    }
    void Abort(const std::string& why) override { link_->Abort(why); }

   protected:
    absl::Status SendMessage(absl::Span<const Piece> pieces, size_t, bool checksum) override {
      return link_->Send(pieces, checksum);
    }
    absl::Status ReceiveMessage(absl::Span<const Piece> pieces, size_t) override {
      ++asked_;
      return link_->Receive(pieces);
    }

   private:
    const std::unique_ptr<PeerLink> link_;
    std::vector<int>* const moving_;
    int asked_ = 0;
  };

  const std::shared_ptr<PeerLinks> links_ = NewCpuPeerLinks();
  std::vector<int>* const moving_;
};

TEST_CASE("chunks land over a link byte for byte, and count as those of a stream", "[links]") {
  PushPair pair;
  pair.PushWell();
  const std::string link = pair.Link();
  CHECK_FALSE(link.empty());
  pair.PushWell();
  CHECK(pair.Link() == link);
  const std::string metrics = pair.metrics.Render();
  CHECK(metrics.find("sluice_ingest_bytes_total " +
                     std::to_string(2 * PushPair::kLayers * PushPair::kChunkBytes)) !=
        std::string::npos);
  CHECK(metrics.find("sluice_ingest_blocks_total " + std::to_string(4 * PushPair::kLayers) +
                     "\n") != std::string::npos);
}

TEST_CASE("an error about a chunk is that of Write, and leaves the link to the next push",
          "[links]") {
  PushPair pair;
  pair.PushWell();
  const std::string link = pair.Link();
  const std::string id = pair.Reserve();
  auto push = OrFail(pair.Open(id));
  REQUIRE(pair.Send(*push, 0).ok());
  absl::Status status;
  SECTION("the transfer has ended") {
    REQUIRE(pair.table->Abort(id, "test").ok());
    status = pair.Land(*push, 1);
    CHECK(absl::IsNotFound(status));
    CHECK(ReasonOf(status) == "TRANSFER_NOT_FOUND");
  }
  SECTION("it is another stream's") {
    ChunkHeader header;
    header.transfer_id = id;
    header.layer = 1;
    header.kind = "kv";
    header.head_end = 1;
    header.token_end = 32;
    const auto claimed = OrFail(pair.table->BeginChunk(header, PushPair::kChunkBytes / 2));
    status = pair.Land(*push, 1);
    CHECK(absl::IsAborted(status));
    CHECK(ReasonOf(status) == "BLOCK_BUSY");
  }
  SECTION("it does not fit the transfer") {
    LinkPush::Chunk chunk = PushPair::Chunk(PushPair::kLayers);
    // It is heard of while others are sent, or at the end.
    std::vector<LinkPush::Chunk> chunks(12, PushPair::Chunk(1));
    chunks[0] = chunk;
    status = push->Send(chunks, {absl::MakeConstSpan(pair.bytes)});
    if (status.ok()) status = push->Finish();
    CHECK(absl::IsInvalidArgument(status));
    CHECK(FieldOf(status) == "header.layer");
  }
#ifndef SLUICE_NO_FAILPOINTS
  SECTION("its checksum is wrong") {
    REQUIRE(push->Finish().ok());
    CHECK(push->bytes_landed() == PushPair::kChunkBytes);
    push = OrFail(pair.Open(id));
    ScopedFailpoints armed("ingest.checksum=error*1");
    status = pair.Land(*push, 1);
    CHECK(absl::IsDataLoss(status));
    CHECK(ReasonOf(status) == "CHECKSUM_MISMATCH");
    CHECK(OrFail(pair.table->Get(id, 8)).blocks_landed == 2);
    CHECK(push->bytes_landed() == 0);
  }
#endif
  CHECK_FALSE(status.ok());
  push.reset();
  CHECK(pair.Link() == link);
  pair.table->Abort(id, "test").IgnoreError();
  pair.PushWell();
  CHECK(pair.Link() == link);
}

TEST_CASE("chunks share a message as far as they fit, and land each by itself", "[links]") {
  PushPair pair(/*linked=*/true, NewCpuPeerLinks(), 4 * PushPair::kChunkBytes);
#ifndef SLUICE_NO_FAILPOINTS
  {
    // Eleven chunks are three messages.
    ScopedFailpoints armed("link.send=error*1@4");
    pair.PushWell();
  }
#endif
  const std::string id = pair.Reserve();
  const auto push = OrFail(pair.Open(id));
  absl::Status status =
      push->Send({PushPair::Chunk(0), PushPair::Chunk(PushPair::kLayers), PushPair::Chunk(1)},
                 {absl::MakeConstSpan(pair.bytes)});
  if (status.ok()) status = push->Finish();
  CHECK(absl::IsInvalidArgument(status));
  CHECK(FieldOf(status) == "header.layer");
  CHECK(push->bytes_landed() == 0);
  CHECK(OrFail(pair.table->Get(id, 8)).blocks_landed == 4);
  pair.PushWell();
}

TEST_CASE("the next messages move while one lands", "[links]") {
  std::vector<int> moving;
  {
    PushPair pair(/*linked=*/true, NewCpuPeerLinks(), PushPair::kChunkBytes,
                  std::make_shared<SlowLinks>(&moving));
    pair.PushWell();
  }
  REQUIRE(moving.size() == PushPair::kLayers);
  // The first four are there before anything has to land for another one.
  CHECK(*std::max_element(moving.begin() + 4, moving.end()) > 1);
}

TEST_CASE("blocks that have landed are counted once", "[links]") {
  PushPair pair;
  const std::string id = pair.Reserve();
  for (int i = 0; i < 2; ++i) REQUIRE(pair.Land(*OrFail(pair.Open(id)), 1).ok());
  CHECK(OrFail(pair.table->Get(id, 8)).blocks_landed == 2);
}

TEST_CASE("a push that is given up ends its link, and the next one makes another", "[links]") {
  PushPair pair;
  const std::string id = pair.Reserve();
  {
    const auto push = OrFail(pair.Open(id));
    REQUIRE(pair.Send(*push, 0).ok());
  }
  CHECK(pair.Link().empty());
  // Its checksum had not been sent.
  CHECK(OrFail(pair.table->Get(id, 8)).blocks_landed == 0);
  pair.PushWell();
}

#ifndef SLUICE_NO_FAILPOINTS
TEST_CASE("a link that fails in the middle of a push fails it in time", "[links]") {
  PushPair pair;
  const std::string id = pair.Reserve();
  auto push = OrFail(pair.Open(id));
  REQUIRE(pair.Send(*push, 0).ok());
  {
    // The link breaks, or its sender stands still for longer than the deadline.
    ScopedFailpoints armed(
        GENERATE(as<std::string>{}, "link.send=error*1", "link.send=delay(2500ms)*1"));
    const absl::Time begin = absl::Now();
    CHECK(absl::IsUnavailable(pair.Land(*push, 1)));
    CHECK(absl::Now() - begin < absl::Seconds(8));
  }
  push.reset();
  pair.table->Abort(id, "test").IgnoreError();
  // Nothing of the failed push holds the transfer's memory.
  CHECK(testing::Eventually(absl::Seconds(5),
                            [&] { return pair.dram->UsageOf(0).reserved_bytes == 0; }));
  pair.PushWell();
}
#endif

TEST_CASE("a decode node that forgets a link is given another", "[links]") {
  PushPair pair;
  pair.PushWell();
  const std::string link = pair.Link();
  // Eight links of other nodes push the first one out. Nobody joins them.
  for (int i = 0; i < 8; ++i) {
    PeerLinkOptions options;
    options.id = OrFail(NewCpuPeerLinks()->NewId());
    // The thread of the first one may still be about to end its last use.
    REQUIRE(testing::Eventually(absl::Seconds(5),
                                [&] { return pair.link_server->Make(options).ok(); }));
  }
  absl::SleepFor(2 * PushPair::kDeadline + absl::Milliseconds(500));
  pair.PushWell();
  CHECK(pair.Link() != link);
}

}  // namespace
}  // namespace sluice
