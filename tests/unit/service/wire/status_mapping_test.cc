#include "src/service/wire/status_mapping.h"

#include <grpcpp/support/status.h>

#include <catch2/catch.hpp>

#include "google/rpc/error_details.pb.h"
#include "sluice/v1/ingest.pb.h"
#include "src/base/error.h"

namespace sluice {
namespace {

TEST_CASE("a field's error carries a BadRequest that names the field") {
  const grpc::Status status = ToGrpcStatus(InvalidField("sampling.top_p", "expected (0, 1]"));
  CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  CHECK(status.error_message() == "sampling.top_p: expected (0, 1]");
  google::rpc::BadRequest detail;
  REQUIRE(DetailOf(status, &detail));
  REQUIRE(detail.field_violations_size() == 1);
  CHECK(detail.field_violations(0).field() == "sampling.top_p");
  CHECK(detail.field_violations(0).description() == "expected (0, 1]");
}

TEST_CASE("no room carries a reason in our domain and a RetryInfo") {
  const grpc::Status status =
      ToGrpcStatus(ResourceExhausted("NO_DRAM", "no room", absl::Milliseconds(1500)));
  google::rpc::ErrorInfo info;
  google::rpc::RetryInfo retry;
  REQUIRE(DetailOf(status, &info));
  CHECK(info.reason() == "NO_DRAM");
  CHECK(info.domain() == "sluice");
  REQUIRE(DetailOf(status, &retry));
  CHECK(retry.retry_delay().seconds() == 1);
  CHECK(retry.retry_delay().nanos() == 500'000'000);
}

TEST_CASE("every status comes back as it was, payloads included") {
  const absl::Status statuses[] = {
      absl::OkStatus(),
      absl::NotFoundError("no such transfer"),
      InvalidField("prompt_token_ids", "is empty"),
      ResourceExhausted("QUEUE_FULL", "later", absl::Seconds(2)),
      WithReason(absl::AbortedError("too slow"), "SLOW_READER"),
      WithReason(InvalidField("a.b", "both"), "BOTH"),
  };
  for (const absl::Status& status : statuses) {
    INFO(status.ToString());
    const absl::Status back = FromGrpcStatus(ToGrpcStatus(status));
    CHECK(back == status);
    CHECK(FieldOf(back) == FieldOf(status));
    CHECK(ReasonOf(back) == ReasonOf(status));
    CHECK(RetryAfterOf(back) == RetryAfterOf(status));
  }
}

TEST_CASE("an extra detail travels beside the others") {
  v1::MissingBlocks missing;
  missing.set_count(7);
  missing.add_ranges()->set_layer(3);
  const grpc::Status status = ToGrpcStatus(
      WithReason(absl::FailedPreconditionError("missing"), "MISSING_BLOCKS"), &missing);
  v1::MissingBlocks found;
  REQUIRE(DetailOf(status, &found));
  CHECK(found.count() == 7);
  CHECK(found.ranges(0).layer() == 3);
  CHECK(ReasonOf(FromGrpcStatus(status)) == "MISSING_BLOCKS");
  google::rpc::RetryInfo retry;
  CHECK_FALSE(DetailOf(status, &retry));
}

TEST_CASE("a prefix keeps code and payloads") {
  const absl::Status status =
      WithMessagePrefix(ResourceExhausted("NO_DRAM", "no room", absl::Seconds(1)), "node x:1");
  CHECK(absl::IsResourceExhausted(status));
  CHECK(status.message() == "node x:1: no room");
  CHECK(ReasonOf(status) == "NO_DRAM");
  CHECK(RetryAfterOf(status) == absl::Seconds(1));
}

TEST_CASE("details that are no google.rpc.Status, or of another domain, are passed over") {
  const grpc::Status broken(grpc::StatusCode::INTERNAL, "text", "\xff\xff\xff");
  CHECK(FromGrpcStatus(broken) == absl::InternalError("text"));
}

TEST_CASE("a long message is cut between characters") {
  std::string text(kMaxStatusMessageBytes - 1, 'a');
  text += "\xc3\xa9tail";  // an e with an accent, across the limit
  const grpc::Status status = ToGrpcStatus(absl::InternalError(text));
  CHECK(status.error_message() == std::string(kMaxStatusMessageBytes - 1, 'a'));
}

}  // namespace
}  // namespace sluice
