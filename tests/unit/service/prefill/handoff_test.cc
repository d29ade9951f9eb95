// Tests what Prefill hands over to a decode node: a fake prefiller pushes known bytes over real
// connections into a real transfer table, whatever breaks on the way.
#include "src/service/prefill/handoff.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <string>

#include "src/base/failpoint.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/ingest/kv_pusher.h"
#include "tests/support/eventually.h"
#include "tests/unit/service/ingest/decode_side_support.h"
#include "tests/unit/service/prefill/prefill_side_support.h"

namespace sluice {
namespace {

using testing::DecodeSide;
using testing::PrefillSide;
using testing::PromptOf;

const std::string kWrites = "sluice_push_link_writes_total";
const std::string kPushBytes = "sluice_push_bytes_total";
constexpr int kTokens = 150;
const std::string kAllBytes = std::to_string(kTokens * 64 * 2 * DecodeSide::kLayers);

// Returns what a prefill node's pushes came to.
std::string Pushed(const PrefillSide& prefill, const std::string& name, const std::string& label) {
  const std::string metrics = prefill.metrics.Render();
  const std::string front = name + "{" + label + "} ";
  const size_t at = metrics.find(front);
  REQUIRE(at != std::string::npos);
  return metrics.substr(at + front.size(), metrics.find('\n', at) - at - front.size());
}

TEST_CASE("a prompt is handed over byte for byte, with its first token") {
  DecodeSide decode;
  PrefillSide prefill;
  const int tokens = GENERATE(1, 31, 64, 150);
  v1::RunResponse response;
  const absl::Status status = prefill.Run(PromptOf(tokens, decode.server->address()), &response);
  INFO(status.ToString());
  REQUIRE(status.ok());
  CHECK(response.first_token().id() == 42);
  CHECK(response.first_token().logprob() == -0.25f);
  CHECK(response.timings().bytes_pushed() ==
        static_cast<uint64_t>(tokens) * 64 * 2 * DecodeSide::kLayers);
  const ReadySequence ready = decode.Take(response.transfer_id());
  CHECK(ready.context_length == static_cast<uint32_t>(tokens));
  CHECK(ready.prompt.size() == static_cast<size_t>(tokens));
  CHECK(ready.max_new_tokens == DecodeSide::kMaxContext - static_cast<uint32_t>(tokens));
  REQUIRE(ready.first_tokens.size() == 1);
  CHECK(ready.first_tokens[0].id == 42);
  DecodeSide::CheckHome(*ready.home, tokens);
}

TEST_CASE("a prompt is handed over by link where both nodes have links", "[links]") {
  const bool decode_has = GENERATE(true, false);
  DecodeSide decode(decode_has);
  PrefillSide prefill(2, 8, kMaxKeptBytes, /*links=*/true);
  for (int round = 0; round < 2; ++round) {
    v1::RunResponse response;
    const absl::Status status = prefill.Run(PromptOf(kTokens, decode.server->address()), &response);
    INFO(status.ToString());
    REQUIRE(status.ok());
    CHECK(std::to_string(response.timings().bytes_pushed()) == kAllBytes);
    DecodeSide::CheckHome(*decode.Take(response.transfer_id()).home, kTokens);
    if (round == 0) {
      CHECK(Pushed(prefill, kPushBytes,
                   decode_has ? "transport=\"shared_memory\"" : "transport=\"grpc\"") == kAllBytes);
    }
  }
  CHECK(Pushed(prefill, kWrites, "outcome=\"done\"") == (decode_has ? "2" : "0"));
  CHECK(Pushed(prefill, kWrites, "outcome=\"refused\"") == (decode_has ? "0" : "2"));
}

#ifndef SLUICE_NO_FAILPOINTS
TEST_CASE("what a link left goes over gRPC, without computing again", "[links]") {
  const std::string terms = GENERATE(as<std::string>{}, "link.send=error*1@3", "link.send=error*1",
                                     "ingest.checksum=error*1@3");
  INFO(terms);
  DecodeSide decode(/*links=*/true);
  PrefillSide prefill(2, 8, kMaxKeptBytes, /*links=*/true);
  {
    ScopedFailpoints armed(terms);
    v1::RunResponse response;
    const absl::Status status = prefill.Run(PromptOf(kTokens, decode.server->address()), &response);
    INFO(status.ToString());
    REQUIRE(status.ok());
    DecodeSide::CheckHome(*decode.Take(response.transfer_id()).home, kTokens);
  }
  CHECK(prefill.prefiller.runs == 1);
  CHECK(Pushed(prefill, kWrites, "outcome=\"broken\"") == "1");
  v1::RunResponse response;
  REQUIRE(prefill.Run(PromptOf(kTokens, decode.server->address()), &response).ok());
  CHECK(Pushed(prefill, kWrites, "outcome=\"done\"") == "1");
}
#endif

TEST_CASE("without a first token none is handed over, and max_tokens is what is reserved") {
  DecodeSide decode;
  PrefillSide prefill;
  v1::RunRequest request = PromptOf(40, decode.server->address());
  request.set_skip_first_token(true);
  request.mutable_sampling()->set_max_tokens(7);
  v1::RunResponse response;
  REQUIRE(prefill.Run(request, &response).ok());
  CHECK_FALSE(response.has_first_token());
  const ReadySequence ready = decode.Take(response.transfer_id());
  CHECK(ready.first_tokens.empty());
  CHECK(ready.max_new_tokens == 7);
}

TEST_CASE("a broken push resumes from what has landed, on a new connection") {
  DecodeSide decode;
  // If `kept`, the sent chunks are kept and sent again; otherwise the prompt is computed once
  // more.
  const bool kept = GENERATE(true, false);
  INFO((kept ? "kept" : "not kept"));
  PrefillSide prefill(2, 8, kept ? kMaxKeptBytes : 0);
  // The decode node's server stops in the middle of the push and comes back on the same port.
  std::atomic<int> layers = 0;
  prefill.prefiller.before_layer = [&](int) {
    if (++layers != 5) return;
    const std::string address = decode.server->address();
    decode.server.reset();
    // gRPC closes the old listener in its own time.
    REQUIRE(testing::Eventually(absl::Seconds(5), [&] {
      auto again = GrpcServer::Start(DecodeSide::ServerOptions(address),
                                     {NewIngestService(decode.ServiceOptions())});
      if (again.ok()) decode.server = *std::move(again);
      return again.ok();
    }));
  };
  v1::RunResponse response;
  const absl::Status status = prefill.Run(PromptOf(150, decode.server->address()), &response);
  INFO(status.ToString());
  REQUIRE(status.ok());
  // Without `kept` the prompt is computed again, unless everything sent had landed before the
  // connection broke.
  CHECK(prefill.prefiller.runs <= (kept ? 1 : 2));
  const ReadySequence ready = decode.Take(response.transfer_id());
  DecodeSide::CheckHome(*ready.home, 150);
}

}  // namespace
}  // namespace sluice
