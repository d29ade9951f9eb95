#include "src/request/source_ref.h"

#include <catch2/catch.hpp>
#include <string>

#include "absl/strings/str_replace.h"
#include "src/base/error.h"

namespace sluice {
namespace {

SourceRef Ref() {
  return {"decode.svc:7000", std::string(32, 'a'), std::string(64, 'b'), std::string(64, '0')};
}

TEST_CASE("a prompt's digest is SHA-256 over its ids, four bytes each, the lowest first") {
  // The expected digests are those of no bytes, and of 01 00 00 00 00 01 00 00.
  CHECK(PromptDigest({}) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(PromptDigest({1, 256}) ==
        "242045e2f1bb37769b514f182fd91b3d215324cb57f187cced1e9c62921dbac3");
  CHECK(PromptDigest({1, 2}) != PromptDigest({2, 1}));
}

TEST_CASE("a reference comes back from its JSON as it was") {
  const absl::StatusOr<SourceRef> back = SourceRefFromJson(ToJson(Ref()), "params");
  REQUIRE(back.ok());
  CHECK(back->address == Ref().address);
  CHECK(back->source_id == Ref().source_id);
  CHECK(back->prompt_digest == Ref().prompt_digest);
  CHECK(back->model_fingerprint == Ref().model_fingerprint);
}

TEST_CASE("JSON that is no reference is refused by field") {
  const std::string good = ToJson(Ref());
  const auto field_of = [](const std::string& json) {
    const absl::Status status = SourceRefFromJson(json, "params").status();
    CHECK(absl::IsInvalidArgument(status));
    return FieldOf(status).value_or("");
  };
  CHECK(field_of("") == "params");
  CHECK(field_of("[1]") == "params");
  CHECK(field_of("{}") == "params.connector");
  CHECK(field_of(absl::StrReplaceAll(good, {{"SluiceConnector", "NixlConnector"}})) ==
        "params.connector");
  CHECK(field_of(absl::StrReplaceAll(good, {{std::string(32, 'a'), "12"}})) == "params.source_id");
  CHECK(field_of(absl::StrReplaceAll(good, {{std::string(32, 'a'), std::string(32, 'g')}})) ==
        "params.source_id");
  CHECK(field_of(absl::StrReplaceAll(good, {{"decode.svc:7000", ""}})) == "params.address");
  CHECK(field_of(absl::StrReplaceAll(good, {{"\"decode.svc:7000\"", "7"}})) == "params.address");
  CHECK(field_of(absl::StrReplaceAll(good, {{std::string(64, 'b'), "b"}})) ==
        "params.prompt_digest");
  CHECK(field_of(absl::StrReplaceAll(good, {{"\"address\"", "\"adress\""}})) == "params.adress");
}

}  // namespace
}  // namespace sluice
