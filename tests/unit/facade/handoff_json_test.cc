#include "src/facade/handoff_json.h"

#include <catch2/catch.hpp>
#include <string>
#include <utility>
#include <vector>

#include "src/base/error.h"

namespace sluice {
namespace {

absl::Status Decode(const std::string& text) {
  Request request;
  return ReadDecodeLeg({"kv", true, text}, &request);
}
absl::Status Prefill(const std::string& text) { return CheckAsksToHold({"kv", true, text}); }

TEST_CASE("a decode leg may come without a handoff, in any of its forms") {
  for (const std::string text : {"", "{}", R"({"do_remote_prefill": false})",
                                 R"({"do_remote_prefill": null, "do_remote_decode": false})"}) {
    INFO(text);
    CHECK(Decode(text).ok());
  }
  Request request;
  CHECK(ReadDecodeLeg({"kv", false, ""}, &request).ok());
}

TEST_CASE("what is no handoff of ours is refused, and the field is named") {
  for (const std::string text :
       {R"([])", R"({"do_remote_prefill": 1})", R"({"do_remote_decode": true})",
        R"({"remote_block_ids": [1]})", R"({"do_remote_prefill": true, "remote_engine_id": "x"})",
        R"({"do_remote_prefill": true})", "{", "nonsense"}) {
    INFO(text);
    const absl::Status status = Decode(text);
    CHECK(absl::IsInvalidArgument(status));
    // If the JSON is no handoff at all, the error names the whole field; otherwise it names the
    // part that is missing.
    const std::string field = FieldOf(status).value_or("");
    CHECK((field == "kv" || field == "kv.connector"));
  }
  const absl::Status status = Decode(std::string(5000, ' '));
  CHECK(FieldOf(status) == "kv");
}

TEST_CASE("a decode leg names the transfer that vLLM's connector pushed, or why there is none") {
  Request request;
  const std::string id(32, 'a');
  REQUIRE(
      ReadDecodeLeg(
          {"kv", true,
           R"({"connector": "SluiceConnector", "decode": "host:1", "transfer_id": ")" + id + "\"}"},
          &request)
          .ok());
  CHECK(request.handoff.transfer_id == id);
  CHECK(request.handoff.source.empty());
  CHECK(request.handoff_error.empty());
  Request failed;
  REQUIRE(ReadDecodeLeg({"kv", true, R"({"connector": "SluiceConnector", "error": "no room"})"},
                        &failed)
              .ok());
  CHECK(failed.handoff.empty());
  CHECK(failed.handoff_error == "no room");
  for (const auto& [text, field] : std::vector<std::pair<std::string, std::string>>{
           {R"({"transfer_id": "a"})", "kv.connector"},
           {R"({"connector": "NixlConnector", "transfer_id": "a"})", "kv.connector"},
           {R"({"connector": "SluiceConnector", "transfer_id": ""})", "kv.transfer_id"},
           {R"({"connector": "SluiceConnector", "transfer_id": 1})", "kv.transfer_id"},
           {R"({"connector": "SluiceConnector", "error": []})", "kv.error"},
           {R"({"connector": "SluiceConnector", "error": "x", "other": "y"})", "kv.other"}}) {
    INFO(text);
    CHECK(FieldOf(ReadDecodeLeg({"kv", true, text}, &request)) == field);
  }
}

TEST_CASE("a prefill leg asks that its caches be held, or says nothing") {
  CHECK(Prefill("").ok());
  CHECK(Prefill("{}").ok());
  CHECK(Prefill(R"({"do_remote_decode": true, "do_remote_prefill": false})").ok());
  for (const std::string text : {R"({"do_remote_decode": false})", R"({"do_remote_decode": "yes"})",
                                 R"({"do_remote_decode": true, "do_remote_prefill": true})"}) {
    INFO(text);
    const absl::Status status = Prefill(text);
    CHECK(absl::IsInvalidArgument(status));
    CHECK(FieldOf(status) == "kv");
  }
}

}  // namespace
}  // namespace sluice
