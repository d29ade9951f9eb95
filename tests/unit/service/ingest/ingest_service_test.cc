// Tests KvIngest over real connections: chunks that are written to a real transfer table, and what
// is refused.
#include "src/service/ingest/ingest_service.h"

#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <string>

#include "src/base/error.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/wire/status_mapping.h"
#include "tests/unit/service/ingest/decode_side_support.h"

namespace sluice {
namespace {

using testing::DecodeSide;

TEST_CASE("a bad chunk ends its stream, names what is wrong, and the next stream works") {
  DecodeSide decode;
  const auto id = decode.Reserve(32);
  REQUIRE(id.ok());
  v1::WriteRequest corrupt = DecodeSide::Chunk(*id, 0);
  (*corrupt.mutable_payload())[5] ^= 1;
  CHECK(absl::IsDataLoss(decode.Write({corrupt, DecodeSide::Chunk(*id, 1)})));
  v1::WriteRequest short_one = DecodeSide::Chunk(*id, 0);
  short_one.mutable_payload()->pop_back();
  CHECK(absl::IsInvalidArgument(decode.Write({short_one})));
  CHECK(absl::IsNotFound(decode.Write({DecodeSide::Chunk(std::string(32, '0'), 0)})));
  v1::WriteRequest no_header;
  no_header.set_payload("x");
  CHECK(FieldOf(decode.Write({no_header})) == "header");

  v1::WriteResponse response;
  REQUIRE(decode.Write({DecodeSide::Chunk(*id, 0), DecodeSide::Chunk(*id, 2)}, &response).ok());
  CHECK(response.blocks_landed() == 4);
  CHECK(response.blocks_missing() == 2);
  const std::string metrics = decode.metrics.Render();
  CHECK_THAT(metrics, Catch::Contains("sluice_ingest_checksum_failures_total 1"));
  CHECK_THAT(metrics, Catch::Contains("sluice_ingest_blocks_total 4"));
}

TEST_CASE("Commit with blocks missing lists them, and succeeds once they are sent") {
  DecodeSide decode;
  const auto id = decode.Reserve(32);
  REQUIRE(id.ok());
  REQUIRE(decode.Write({DecodeSide::Chunk(*id, 2), DecodeSide::Chunk(*id, 0)}).ok());
  const grpc::Status status = decode.Commit(*id);
  CHECK(status.error_code() == grpc::StatusCode::FAILED_PRECONDITION);
  v1::MissingBlocks missing;
  REQUIRE(DetailOf(status, &missing));
  CHECK(missing.count() == 2);
  REQUIRE(missing.ranges_size() >= 1);
  CHECK(missing.ranges(0).layer() == 1);
  CHECK(missing.ranges(0).token_end() == 32);
  REQUIRE(decode.Write({DecodeSide::Chunk(*id, 1)}).ok());
  CHECK(decode.Commit(*id).ok());
  CHECK(decode.Commit(*id).ok());  // idempotent
  CHECK_THAT(decode.metrics.Render(), Catch::Contains("sluice_ingest_seconds_count 1"));
}

TEST_CASE("a draining node refuses Reserve and says why") {
  DecodeSide decode;
  decode.readiness.SetDraining(true);
  const auto id = decode.Reserve(32);
  CHECK(absl::IsUnavailable(id.status()));
  CHECK(ReasonOf(id.status()) == "DRAINING");
}

TEST_CASE("a port that is in use is refused in one sentence that says so") {
  DecodeSide decode;
  GrpcServer::Options options;
  options.listen = decode.server->address();
  const auto second = GrpcServer::Start(options, {});
  REQUIRE_FALSE(second.ok());
  CHECK_THAT(std::string(second.status().message()),
             Catch::Contains(options.listen) && Catch::Contains("in use"));
}

}  // namespace
}  // namespace sluice
