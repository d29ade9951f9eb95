// Tests how Prefill refuses, fails and gives up prompts, and what is left of them on the decode
// node.
#include "src/service/prefill/prefill_service.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "src/base/error.h"
#include "tests/support/eventually.h"
#include "tests/unit/service/ingest/decode_side_support.h"
#include "tests/unit/service/prefill/prefill_side_support.h"

namespace sluice {
namespace {

using testing::DecodeSide;
using testing::PrefillSide;
using testing::PromptOf;

TEST_CASE("the decode node's refusals keep their details and name its address") {
  DecodeSide decode;
  PrefillSide prefill;
  decode.readiness.SetDraining(true);
  v1::RunResponse response;
  const std::string address = decode.server->address();
  const absl::Status status = prefill.Run(PromptOf(4, address), &response);
  CHECK(absl::IsUnavailable(status));
  CHECK(ReasonOf(status) == "DRAINING");
  CHECK_THAT(std::string(status.message()), Catch::StartsWith("decode node " + address));
  CHECK(prefill.prefiller.runs == 0);  // refused before anything was computed
}

TEST_CASE("a prompt that fails gives the decode node its memory back") {
  DecodeSide decode;
  PrefillSide prefill;
  prefill.prefiller.result =
      ResourceExhausted("NO_HBM", "too long for this node", absl::Seconds(1));
  v1::RunResponse response;
  const absl::Status status = prefill.Run(PromptOf(100, decode.server->address()), &response);
  CHECK(ReasonOf(status) == "NO_HBM");
  CHECK(status.message() == "too long for this node");
  CHECK(decode.table->open_transfers() == 0);
  CHECK(decode.dram->UsageOf(0).reserved_bytes == 0);
}

TEST_CASE("a caller that goes away ends the computation and the transfer") {
  DecodeSide decode;
  PrefillSide prefill;
  std::atomic<bool> computing = false;
  std::atomic<bool> go_on = false;
  prefill.prefiller.before_layer = [&](int layer) {
    if (layer != 1) return;
    computing = true;
    while (!go_on) absl::SleepFor(absl::Milliseconds(1));
  };
  grpc::ClientContext context;
  std::thread caller([&] {
    v1::RunResponse response;
    const grpc::Status status =
        prefill.stub->Run(&context, PromptOf(100, decode.server->address()), &response);
    CHECK(status.error_code() == grpc::StatusCode::CANCELLED);
  });
  while (!computing) absl::SleepFor(absl::Milliseconds(1));
  CHECK(decode.table->open_transfers() == 1);
  context.TryCancel();
  caller.join();
  absl::SleepFor(absl::Milliseconds(500));  // until its server knows
  go_on = true;
  CHECK(testing::Eventually(absl::Seconds(3), [&] { return decode.table->open_transfers() == 0; }));
}

TEST_CASE("bad requests name the field, and nobody is called") {
  PrefillSide prefill;
  v1::RunResponse response;
  const auto field = [&](const v1::RunRequest& request) {
    const absl::Status status = prefill.Run(request, &response);
    CHECK(absl::IsInvalidArgument(status));
    return FieldOf(status).value_or("none");
  };
  CHECK(field(PromptOf(0, "127.0.0.1:1")) == "prompt_token_ids");
  CHECK(field(PromptOf(300, "127.0.0.1:1")) == "prompt_token_ids");
  CHECK(field(PromptOf(3, "")) == "decode_address");
  CHECK(field(PromptOf(3, "unix:/etc/passwd")) == "decode_address");
  CHECK(field(PromptOf(3, "127.0.0.1:0")) == "decode_address");
  v1::RunRequest request = PromptOf(3, "127.0.0.1:1");
  request.set_prompt_token_ids(2, DecodeSide::kVocab);
  CHECK(field(request) == "prompt_token_ids[2]");
  request = PromptOf(3, "127.0.0.1:1");
  request.mutable_sampling()->set_top_p(2);
  CHECK(field(request) == "sampling.top_p");
  request = PromptOf(3, "127.0.0.1:1");
  request.set_tenant(std::string(129, 'x'));
  CHECK(field(request) == "tenant");
}

TEST_CASE("a decode node that is not there is UNAVAILABLE with its address") {
  PrefillSide prefill;
  v1::RunResponse response;
  const absl::Status status = prefill.Run(PromptOf(3, "127.0.0.1:1"), &response);
  CHECK(absl::IsUnavailable(status));
  CHECK_THAT(std::string(status.message()), Catch::StartsWith("decode node 127.0.0.1:1: "));
}

TEST_CASE("a full queue refuses with a time to try again") {
  DecodeSide decode;
  PrefillSide prefill(/*threads=*/1, /*max_queued=*/1);
  std::atomic<bool> go_on = false;
  prefill.prefiller.before_layer = [&](int) {
    while (!go_on) absl::SleepFor(absl::Milliseconds(1));
  };
  std::atomic<int> served = 0;
  std::atomic<int> refused = 0;
  const auto call = [&] {
    v1::RunRequest request = PromptOf(3, decode.server->address());
    request.clear_rendezvous_key();
    v1::RunResponse response;
    const absl::Status status = prefill.Run(request, &response);
    if (status.ok()) {
      ++served;
    } else if (ReasonOf(status) == "QUEUE_FULL" && RetryAfterOf(status) > absl::ZeroDuration()) {
      ++refused;
    }
  };
  // One call computes. Of the three that come then, one waits and two are refused.
  std::vector<std::thread> callers;
  callers.emplace_back(call);
  while (prefill.prefiller.runs == 0) absl::SleepFor(absl::Milliseconds(1));
  for (int i = 0; i < 3; ++i) callers.emplace_back(call);
  CHECK(testing::Eventually(absl::Seconds(5), [&] { return refused == 2; }));
  go_on = true;
  for (std::thread& caller : callers) caller.join();
  CHECK(served == 2);
  CHECK(refused == 2);
}

}  // namespace
}  // namespace sluice
