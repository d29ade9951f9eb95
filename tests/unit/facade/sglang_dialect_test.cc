#include "src/facade/sglang_dialect.h"

#include <catch2/catch.hpp>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "src/base/error.h"

namespace sluice {
namespace {

namespace sg = sglang::grpc::scheduler;

sg::GenerateRequest Good() {
  sg::GenerateRequest request;
  request.set_request_id("r");
  for (const uint32_t id : {5u, 17u, 42u}) request.mutable_tokenized()->add_input_ids(id);
  sg::DisaggregatedParams* room = request.mutable_disaggregated_params();
  room->set_bootstrap_host("prefill-0");
  room->set_bootstrap_port(7000);
  room->set_bootstrap_room(77);
  return request;
}

struct Call {
  explicit Call(sg::GenerateRequest message, NodeInfo::Role role = NodeInfo::Role::kDecode)
      : request(std::move(message)) {
    options.vocab_size = 100;
    options.max_context = 64;
    dialect = NewSglangDialect(role, request, options);
  }
  sg::GenerateRequest request;
  GenerateOptions options;
  std::unique_ptr<GenerateDialectOf<sg::GenerateResponse>> dialect;
};

TEST_CASE("every parameter of SGLang's request reaches ours") {
  sg::GenerateRequest message = Good();
  sg::SamplingParams* p = message.mutable_sampling_params();
  p->set_temperature(0.5f);
  p->set_top_p(0.5f);
  p->set_top_k(7);
  p->set_min_p(0.25f);
  p->set_frequency_penalty(0.5f);
  p->set_presence_penalty(-0.5f);
  p->set_repetition_penalty(1.5f);
  p->set_max_new_tokens(9);
  p->set_min_new_tokens(2);
  p->add_stop(std::string("end"));
  p->add_stop_token_ids(3);
  p->set_ignore_eos(true);
  p->set_n(1);
  p->set_stream_interval(1);
  (*p->mutable_logit_bias())["9"] = -1;
  // The gateway handles text.
  p->set_skip_special_tokens(true);
  p->set_spaces_between_special_tokens(true);
  p->set_no_stop_trim(true);
  message.set_return_logprob(true);
  message.set_logprob_start_len(-1);
  message.set_top_logprobs_num(4);
  message.mutable_timestamp();
  message.set_log_metrics(true);
  const auto request = FromProto(message, 100, 64);
  INFO(request.status().ToString());
  REQUIRE(request.ok());
  CHECK(request->request_id == "r");
  CHECK(request->prompt == std::vector<int32_t>{5, 17, 42});
  const SamplingParams& s = request->sampling;
  CHECK(s.temperature == 0.5f);
  CHECK(s.top_p == 0.5f);
  CHECK(s.top_k == 7);
  CHECK(s.min_p == 0.25f);
  CHECK(s.frequency_penalty == 0.5f);
  CHECK(s.presence_penalty == -0.5f);
  CHECK(s.repetition_penalty == 1.5f);
  CHECK(s.max_tokens == 9u);
  CHECK(s.min_tokens == 2);
  CHECK(s.stop == std::vector<std::string>{"end"});
  CHECK(s.stop_token_ids == std::vector<uint32_t>{3});
  CHECK(s.ignore_eos);
  CHECK(s.logprobs == 4u);
  CHECK(s.logit_bias == std::vector<std::pair<uint32_t, float>>{{9, -1.0f}});
}

TEST_CASE("zero is greedy, and where it would mean nothing it was not given") {
  sg::GenerateRequest message = Good();
  message.mutable_sampling_params()->set_top_k(-1);
  const auto request = FromProto(message, 100, 64);
  REQUIRE(request.ok());
  const SamplingParams& s = request->sampling;
  CHECK(s.temperature == 0.0f);
  CHECK(s.top_p == 1.0f);
  CHECK(s.repetition_penalty == 1.0f);
  CHECK(s.top_k == 0);
  CHECK(s.n == 1);
  CHECK_FALSE(s.max_tokens.has_value());
  CHECK_FALSE(s.logprobs.has_value());  // top_logprobs_num alone asks for nothing
}

TEST_CASE("the decode leg finds the prefill node by host, port and room") {
  const std::vector<std::pair<std::string, std::string>> hosts = {{"prefill-0", "prefill-0:7000"},
                                                                  {"10.0.0.1", "10.0.0.1:7000"},
                                                                  {"fd00::1", "[fd00::1]:7000"},
                                                                  {"[fd00::1]", "[fd00::1]:7000"}};
  for (const auto& [host, address] : hosts) {
    sg::GenerateRequest message = Good();
    message.mutable_disaggregated_params()->set_bootstrap_host(host);
    const auto request = Call(message).dialect->Read();
    REQUIRE(request.ok());
    CHECK(request->handoff.source.address == address);
    CHECK(request->handoff.source.room == 77u);
    CHECK_FALSE(request->handoff.empty());
  }
  sg::GenerateRequest alone = Good();
  alone.clear_disaggregated_params();
  const auto request = Call(alone).dialect->Read();
  REQUIRE(request.ok());
  CHECK(request->handoff.empty());
}

TEST_CASE("a prefill leg computes one token, whatever its caller wants in the end") {
  sg::GenerateRequest message = Good();
  message.set_stream(true);
  message.mutable_sampling_params()->set_max_new_tokens(100);
  message.mutable_sampling_params()->set_min_new_tokens(50);
  const auto request = Call(message, NodeInfo::Role::kPrefill).dialect->Read();
  REQUIRE(request.ok());
  CHECK(request->sampling.max_tokens == 1u);
  CHECK(request->sampling.min_tokens == 1);
  CHECK(request->handoff.source.room == 77u);
  CHECK(request->handoff.source.empty());  // there is nothing to read
  message.clear_disaggregated_params();
  CHECK(FieldOf(Call(message, NodeInfo::Role::kPrefill).dialect->Read().status()) ==
        "disaggregated_params");
}

TEST_CASE("messages have the request's name, the tokens, and all of them in the last") {
  sg::GenerateRequest message = Good();
  message.set_stream(true);
  message.set_return_logprob(true);
  message.set_logprob_start_len(-1);
  Call call(message);
  REQUIRE(call.dialect->Read().ok());
  call.dialect->Begin("r");
  REQUIRE(call.dialect->SetTokens(std::vector<OutputToken>{{7, -0.5f, {{7, -0.5f}}}}));
  CHECK(call.dialect->message()->request_id() == "r");
  CHECK(call.dialect->message()->chunk().token_ids(0) == 7);
  CHECK(call.dialect->message()->chunk().output_logprobs().token_logprobs(0) == -0.5f);
  REQUIRE(call.dialect->SetTokens(std::vector<OutputToken>{{8, -0.25f, {}}}));
  CHECK(call.dialect->message()->chunk().token_ids_size() == 1);
  FinishInfo end;
  end.reason = FinishInfo::Reason::kStop;
  end.stop_string = "end";
  REQUIRE(call.dialect->SetEnd(end, false));
  CHECK(call.dialect->message()->request_id() == "r");
  const sg::GenerateComplete& complete = call.dialect->message()->complete();
  CHECK(complete.output_ids_size() == 2);
  CHECK(complete.finish_reason() == "stop");
  CHECK(complete.matched_stop_str() == "end");
  CHECK_FALSE(complete.has_output_logprobs());
}

TEST_CASE("errors name the fields of SGLang's request") {
  Call call(Good());
  const std::vector<std::pair<std::string, std::string>> names = {
      {"sampling.max_tokens", "sampling_params.max_new_tokens"},
      {"sampling.min_tokens", "sampling_params.min_new_tokens"},
      {"sampling.logprobs", "top_logprobs_num"},
      {"sampling.top_p", "sampling_params.top_p"},
      {"prompt_token_ids[3]", "tokenized.input_ids[3]"},
      {"source.address", "disaggregated_params.bootstrap_host"}};
  for (const auto& [ours, theirs] : names) {
    CHECK(FieldOf(call.dialect->Translated(InvalidField(ours, "x"))) == theirs);
  }
  const absl::Status none = call.dialect->Translated(
      WithReason(absl::FailedPreconditionError("nothing was handed over"), "NO_HANDOFF"));
  CHECK(absl::IsInvalidArgument(none));
  CHECK(FieldOf(none) == "disaggregated_params");
  CHECK(ReasonOf(none) == "NO_HANDOFF");
}

}  // namespace
}  // namespace sluice
