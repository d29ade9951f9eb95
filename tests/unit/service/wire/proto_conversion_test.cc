#include "src/service/wire/proto_conversion.h"

#include <catch2/catch.hpp>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "src/base/error.h"
#include "src/service/wire/host_port.h"

namespace sluice {
namespace {

template <typename T>
std::string FieldOfError(const absl::StatusOr<T>& result) {
  CHECK(absl::IsInvalidArgument(result.status()));
  return FieldOf(result.status()).value_or("none");
}

TEST_CASE("absent sampling fields get their defaults, present ones their values") {
  const auto defaults = FromProto(v1::SamplingParams());
  REQUIRE(defaults.ok());
  CHECK(defaults->temperature == 1.0f);
  CHECK(defaults->top_p == 1.0f);
  CHECK_FALSE(defaults->max_tokens.has_value());
  CHECK_FALSE(defaults->logprobs.has_value());
  v1::SamplingParams params;
  params.set_temperature(0);
  params.set_top_k(7);
  params.set_max_tokens(0);
  params.set_logprobs(0);
  params.set_seed(0);
  params.set_ignore_eos(true);
  (*params.mutable_logit_bias())[9] = -1;
  (*params.mutable_logit_bias())[3] = 2;
  params.add_stop(std::string("end"));
  const auto set = FromProto(params);
  REQUIRE(set.ok());
  CHECK(set->temperature == 0.0f);
  CHECK(set->top_k == 7);
  CHECK(set->max_tokens == 0u);
  CHECK(set->logprobs == 0u);
  CHECK(set->seed == 0u);
  CHECK(set->ignore_eos);
  CHECK(set->logit_bias == std::vector<std::pair<uint32_t, float>>{{3, 2.0f}, {9, -1.0f}});
  CHECK(set->stop == std::vector<std::string>{"end"});
}

TEST_CASE("queries of hints go over the wire as bfloat16, or are left out") {
  SelectionHints hints;
  hints.unit_tokens = 16;
  hints.entries.push_back({2, 1, std::nullopt, {0, 3}});
  hints.queries = {1, -2.5f, 0, 1.0009765625f};  // the last one is rounded
  v1::Hints sent = ToProto(hints);
  CHECK(sent.queries() == std::string("\x80\x3f\x20\xc0\x00\x00\x80\x3f", 8));
  const auto read = FromProto(sent);
  REQUIRE(read.ok());
  CHECK(read->queries == std::vector<float>{1, -2.5f, 0, 1});
  REQUIRE(read->entries.size() == 1);
  CHECK(read->entries[0].units == hints.entries[0].units);
  CHECK(ToProto(hints, /*queries=*/false).queries().empty());
  CHECK(ToProto(hints, /*queries=*/false).entries_size() == 1);
  sent.mutable_queries()->pop_back();
  CHECK(FieldOfError(FromProto(sent)) == "hints.queries");
}

TEST_CASE("lists over their bounds name the list") {
  v1::SamplingParams params;
  for (size_t i = 0; i <= kMaxStopTokenIds; ++i) params.add_stop_token_ids(1);
  CHECK(FieldOfError(FromProto(params)) == "sampling.stop_token_ids");
  params.Clear();
  const std::string text = "x";  // a literal here trips g++ 12's -Wrestrict
  for (size_t i = 0; i <= kMaxStopStrings; ++i) params.add_stop(text);
  CHECK(FieldOfError(FromProto(params)) == "sampling.stop");
  params.Clear();
  params.add_stop(text);
  params.add_stop(std::string(kMaxStopStringBytes + 1, 'x'));
  CHECK(FieldOfError(FromProto(params)) == "sampling.stop[1]");
  params.Clear();
  for (uint32_t i = 0; i <= kMaxLogitBiasEntries; ++i) (*params.mutable_logit_bias())[i] = 1;
  CHECK(FieldOfError(FromProto(params)) == "sampling.logit_bias");
}

TEST_CASE("a Generate's wrong fields are named") {
  const auto field = [](const v1::GenerateRequest& request) {
    return FieldOfError(FromProto(request, 100, 8));
  };
  v1::GenerateRequest request;
  CHECK(field(request) == "prompt_token_ids");
  request.add_prompt_token_ids(99);
  REQUIRE(FromProto(request, 100, 8).ok());
  request.add_prompt_token_ids(100);
  CHECK(field(request) == "prompt_token_ids[1]");
  request.set_prompt_token_ids(1, std::numeric_limits<uint32_t>::max());
  CHECK(field(request) == "prompt_token_ids[1]");
  request.clear_prompt_token_ids();
  for (int i = 0; i < 9; ++i) request.add_prompt_token_ids(1);
  CHECK(field(request) == "prompt_token_ids");
  request.clear_prompt_token_ids();
  request.set_transfer_id("");
  CHECK(field(request) == "transfer_id");
  request.set_transfer_id(std::string(65, 'a'));
  CHECK(field(request) == "transfer_id");
  request.set_rendezvous_key("");
  CHECK(field(request) == "rendezvous_key");
  request.set_rendezvous_key(std::string(129, 'a'));
  CHECK(field(request) == "rendezvous_key");
  request.set_rendezvous_key("room");
  REQUIRE(FromProto(request, 100, 8).ok());
  request.set_request_id(std::string(129, 'a'));
  CHECK(field(request) == "request_id");
  request.set_request_id(std::string(128, 'a'));
  request.set_tenant(std::string(129, 'a'));
  CHECK(field(request) == "tenant");
}

TEST_CASE("a Reserve's wrong fields are named") {
  v1::ReserveRequest request;
  CHECK(FieldOfError(FromProto(request)) == "manifest");
  request.mutable_manifest()->set_tenant(std::string(129, 'a'));
  CHECK(FieldOfError(FromProto(request)) == "manifest.tenant");
  request.mutable_manifest()->set_tenant("t");
  request.mutable_lease()->set_seconds(-1);
  CHECK(FieldOfError(FromProto(request)) == "lease");
  request.mutable_lease()->set_seconds(std::numeric_limits<int64_t>::max());
  CHECK(FieldOfError(FromProto(request)) == "lease");
  request.mutable_lease()->set_seconds(1);
  request.mutable_lease()->set_nanos(1'000'000'000);
  CHECK(FieldOfError(FromProto(request)) == "lease");
  request.mutable_lease()->set_nanos(500'000'000);
  const auto manifest = FromProto(request);
  REQUIRE(manifest.ok());
  CHECK(manifest->lease == absl::Milliseconds(1500));
  v1::CacheKind* kind = request.mutable_manifest()->add_cache_kinds();
  CHECK(FieldOfError(FromProto(request)) == "manifest.cache_kinds[0].element_type");
  kind->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  CHECK(FieldOfError(FromProto(request)) == "manifest.cache_kinds[0].heads");
  for (int i = 0; i < 9; ++i) request.mutable_manifest()->add_cache_kinds();
  CHECK(FieldOfError(FromProto(request)) == "manifest.cache_kinds");
}

TEST_CASE("a cache kind comes back as it was") {
  CacheKind kind;
  kind.name = "kv";
  kind.element_type = DType::kFloat32;
  kind.heads = 3;
  kind.block_tokens = 16;
  kind.SetEqualParts(2, 512);
  const auto back = FromProto("k", ToProto(kind));
  REQUIRE(back.ok());
  CHECK(back->name == "kv");
  CHECK(back->element_type == DType::kFloat32);
  CHECK(back->heads == 3);
  CHECK(back->block_tokens == 16);
  CHECK(back->part_bytes == kind.part_bytes);
  CHECK(back->bytes_per_token == 512);
}

TEST_CASE("a token comes back as it was, and its errors name the entry") {
  OutputToken token;
  token.id = 41;
  token.logprob = -0.5f;
  token.top_logprobs = {{41, -0.5f}, {7, -1.5f}};
  const auto back = FromProto("first_tokens[0]", ToProto(token), 100);
  REQUIRE(back.ok());
  CHECK(back->id == 41);
  CHECK(back->logprob == -0.5f);
  CHECK(back->top_logprobs == token.top_logprobs);
  CHECK(FieldOfError(FromProto("t", ToProto(token), 41)) == "t.id");
  token.top_logprobs[1].first = 100;
  CHECK(FieldOfError(FromProto("t", ToProto(token), 100)) == "t.top_logprobs[1].token_id");
  v1::Token many = ToProto(token);
  while (many.top_logprobs_size() < 21) many.add_top_logprobs()->set_token_id(1);
  CHECK(FieldOfError(FromProto("t", many, 100)) == "t.top_logprobs");
  token.top_logprobs.clear();
  token.logprob = std::numeric_limits<float>::quiet_NaN();
  CHECK(FieldOfError(FromProto("t", ToProto(token), 100)) == "t.logprob");
}

TEST_CASE("durations that are endless stay within protobuf's bounds") {
  CHECK(ToProto(absl::InfiniteDuration()).seconds() == 315'576'000'000);
  CHECK(ToProto(absl::Milliseconds(1500)).nanos() == 500'000'000);
}

TEST_CASE("addresses are read as people write them") {
  const auto good = ParseHostPort("127.0.0.1:7000");
  REQUIRE(good.ok());
  CHECK(good->host == "127.0.0.1");
  CHECK(good->port == 7000);
  CHECK(good->ToString() == "127.0.0.1:7000");
  const auto six = ParseHostPort("[::1]:0");
  REQUIRE(six.ok());
  CHECK(six->host == "::1");
  CHECK(six->ToString() == "[::1]:0");
  for (const char* bad :
       {"", ":", "host", "host:", ":7000", "host:65536", "host:-1", "host:+1", "host:7000x",
        "ho st:1", "unix:/tmp/x", "dns:///host:1", "::1:7000", "[]:1", "host:1,other:2"}) {
    INFO(bad);
    CHECK(absl::IsInvalidArgument(ParseHostPort(bad).status()));
  }
  std::string long_host(300, 'a');
  long_host.append(":1");
  CHECK_FALSE(ParseHostPort(long_host).ok());
}

}  // namespace
}  // namespace sluice
