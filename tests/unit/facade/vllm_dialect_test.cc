#include "src/facade/vllm_dialect.h"

#include <catch2/catch.hpp>
#include <functional>
#include <string>
#include <vector>

#include "src/base/error.h"

namespace sluice {
namespace {

namespace ve = vllm::grpc::engine;

ve::GenerateRequest Good() {
  ve::GenerateRequest request;
  request.set_request_id("r");
  for (const uint32_t id : {5u, 17u, 42u}) request.mutable_tokenized()->add_input_ids(id);
  return request;
}

TEST_CASE("what a request leaves out has vLLM's defaults") {
  const auto request = FromProto(Good(), 100, 64);
  REQUIRE(request.ok());
  CHECK(request->request_id == "r");
  CHECK(request->prompt == std::vector<int32_t>{5, 17, 42});
  CHECK(request->handoff.empty());
  const SamplingParams& s = request->sampling;
  CHECK(s.temperature == 1.0f);
  CHECK(s.top_p == 1.0f);
  CHECK(s.repetition_penalty == 1.0f);
  CHECK(s.top_k == 0);
  CHECK(s.n == 1);
  CHECK_FALSE(s.max_tokens.has_value());
  CHECK_FALSE(s.logprobs.has_value());
  CHECK_FALSE(s.seed.has_value());
}

TEST_CASE("every sampling parameter reaches the request") {
  ve::GenerateRequest message = Good();
  ve::SamplingParams* p = message.mutable_sampling_params();
  p->set_temperature(0);
  p->set_top_p(0.5f);
  p->set_top_k(7);
  p->set_min_p(0.25f);
  p->set_frequency_penalty(0.5f);
  p->set_presence_penalty(-0.5f);
  p->set_repetition_penalty(1.5f);
  p->set_max_tokens(9);
  p->set_min_tokens(2);
  p->add_stop(std::string("end"));
  p->add_stop_token_ids(3);
  p->set_ignore_eos(true);
  p->set_n(1);
  p->set_logprobs(4);
  p->set_seed(-1);
  (*p->mutable_logit_bias())[9] = -1;
  // The gateway handles text.
  p->set_skip_special_tokens(true);
  p->set_spaces_between_special_tokens(true);
  p->set_include_stop_str_in_output(true);
  p->set_json_object(false);
  const auto request = FromProto(message, 100, 64);
  REQUIRE(request.ok());
  const SamplingParams& s = request->sampling;
  CHECK(s.temperature == 0.0f);
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
  CHECK(s.seed == ~uint64_t{0});
  CHECK(s.logit_bias == std::vector<std::pair<uint32_t, float>>{{9, -1.0f}});
}

TEST_CASE("what is not supported is refused by the name it has in vLLM's request") {
  const std::string text = "x";
  const std::vector<std::pair<std::string, std::function<void(ve::GenerateRequest*)>>> cases = {
      {"text", [&](auto* r) { r->set_text(text); }},
      {"tokenized.input_ids", [](auto* r) { r->clear_tokenized(); }},
      {"tokenized.input_ids[0]", [](auto* r) { r->mutable_tokenized()->set_input_ids(0, 100); }},
      {"mm_inputs", [](auto* r) { r->mutable_mm_inputs(); }},
      {"extra_mm_inputs", [](auto* r) { r->add_extra_mm_inputs(); }},
      {"media_refs", [](auto* r) { r->mutable_media_refs(); }},
      {"kv_transfer_params", [](auto* r) { r->mutable_kv_transfer_params(); }},
      {"data_parallel_rank", [](auto* r) { r->set_data_parallel_rank(1); }},
      {"request_id", [](auto* r) { r->set_request_id(std::string(129, 'x')); }},
      {"sampling_params.json_schema",
       [&](auto* r) { r->mutable_sampling_params()->set_json_schema(text); }},
      {"sampling_params.regex", [&](auto* r) { r->mutable_sampling_params()->set_regex(text); }},
      {"sampling_params.grammar",
       [&](auto* r) { r->mutable_sampling_params()->set_grammar(text); }},
      {"sampling_params.structural_tag",
       [&](auto* r) { r->mutable_sampling_params()->set_structural_tag(text); }},
      {"sampling_params.json_object",
       [](auto* r) { r->mutable_sampling_params()->set_json_object(true); }},
      {"sampling_params.choice", [](auto* r) { r->mutable_sampling_params()->mutable_choice(); }},
      {"sampling_params.grammar_from_first_token",
       [](auto* r) { r->mutable_sampling_params()->set_grammar_from_first_token(true); }},
      {"sampling_params.prompt_logprobs",
       [](auto* r) { r->mutable_sampling_params()->set_prompt_logprobs(0); }},
      {"sampling_params.truncate_prompt_tokens",
       [](auto* r) { r->mutable_sampling_params()->set_truncate_prompt_tokens(-1); }},
      {"sampling_params.logprobs", [](auto* r) { r->mutable_sampling_params()->set_logprobs(-1); }},
      {"sampling_params.logit_bias",
       [](auto* r) { (*r->mutable_sampling_params()->mutable_logit_bias())[-1] = 1; }},
      {"sampling_params.stop[0]",
       [](auto* r) { r->mutable_sampling_params()->add_stop(std::string(257, 'x')); }},
      {"message", [](auto* r) { r->GetReflection()->MutableUnknownFields(r)->AddVarint(99, 1); }},
      {"sampling_params", [](auto* r) {
         ve::SamplingParams* p = r->mutable_sampling_params();
         p->GetReflection()->MutableUnknownFields(p)->AddVarint(99, 1);
       }}};
  for (const auto& [field, change] : cases) {
    INFO(field);
    ve::GenerateRequest message = Good();
    change(&message);
    const auto request = FromProto(message, 100, 64);
    CHECK(absl::IsInvalidArgument(request.status()));
    CHECK(FieldOf(request.status()) == field);
  }
}

struct Call {
  explicit Call(const ve::GenerateRequest& message, NodeInfo::Role role = NodeInfo::Role::kDecode)
      : request(message) {
    options.vocab_size = 100;
    options.max_context = 64;
    dialect = NewVllmDialect(role, request, options);
  }
  const ve::GenerateRequest request;
  GenerateOptions options;
  std::unique_ptr<GenerateDialectOf<ve::GenerateResponse>> dialect;
};

FinishInfo Ended(FinishInfo::Reason reason) {
  FinishInfo info;
  info.reason = reason;
  info.prompt_tokens = 3;
  info.completion_tokens = 2;
  info.cached_tokens = 1;
  return info;
}

TEST_CASE("a stream has new tokens in chunks and all of them in its last message") {
  ve::GenerateRequest message = Good();
  message.set_stream(true);
  message.mutable_sampling_params()->set_logprobs(1);
  Call call(message);
  REQUIRE(call.dialect->Read().ok());
  CHECK_FALSE(call.dialect->EndHasTokens());
  REQUIRE(call.dialect->SetTokens(std::vector<OutputToken>{{7, -0.5f, {{7, -0.5f}}}}));
  CHECK(call.dialect->message()->chunk().token_ids_size() == 1);
  CHECK(call.dialect->message()->chunk().prompt_tokens() == 3);
  REQUIRE(call.dialect->SetTokens(std::vector<OutputToken>{{8, -0.25f, {}}}));
  const ve::GenerateStreamChunk& chunk = call.dialect->message()->chunk();
  CHECK(chunk.token_ids_size() == 1);
  CHECK(chunk.completion_tokens() == 2);
  CHECK(chunk.output_logprobs().token_logprobs(0) == -0.25f);
  FinishInfo end = Ended(FinishInfo::Reason::kStop);
  end.stop_token_id = 8;
  REQUIRE(call.dialect->SetEnd(end, false));
  const ve::GenerateComplete& complete = call.dialect->message()->complete();
  CHECK(std::vector<uint32_t>(complete.output_ids().begin(), complete.output_ids().end()) ==
        std::vector<uint32_t>{7, 8});
  CHECK(complete.finish_reason() == "stop");
  CHECK(complete.matched_token_id() == 8);
  CHECK(complete.completion_tokens() == 2);
  CHECK(complete.cached_tokens() == 1);
  CHECK_FALSE(complete.has_output_logprobs());
}

TEST_CASE("what is not streamed comes whole, with its log-probabilities") {
  ve::GenerateRequest message = Good();
  message.mutable_sampling_params()->set_logprobs(0);
  Call call(message);
  REQUIRE(call.dialect->Read().ok());
  CHECK_FALSE(call.dialect->SetTokens(std::vector<OutputToken>{{7, -0.5f, {}}, {8, -1.0f, {}}}));
  REQUIRE(call.dialect->SetEnd(Ended(FinishInfo::Reason::kLength), false));
  const ve::GenerateComplete& complete = call.dialect->message()->complete();
  CHECK(complete.finish_reason() == "length");
  CHECK(complete.output_ids_size() == 2);
  CHECK(complete.output_logprobs().token_logprobs(1) == -1.0f);
  CHECK(complete.matched_stop_case() == ve::GenerateComplete::MATCHED_STOP_NOT_SET);
}

TEST_CASE("an aborted request ends with a message, other errors with their status") {
  Call call(Good());
  REQUIRE(call.dialect->Read().ok());
  FinishInfo end = Ended(FinishInfo::Reason::kError);
  end.status = absl::UnavailableError("gone");
  CHECK_FALSE(call.dialect->SetEnd(end, false));
  end.status = WithReason(absl::CancelledError("aborted"), "CANCEL_CALL");
  REQUIRE(call.dialect->SetEnd(end, false));
  CHECK(call.dialect->message()->complete().finish_reason() == "abort");
}

TEST_CASE("errors of the engine name the caller's fields") {
  Call call(Good());
  const auto translated = [&](const absl::Status& status) {
    return *FieldOf(call.dialect->Translated(status));
  };
  CHECK(translated(InvalidField("sampling.max_tokens", "x")) == "sampling_params.max_tokens");
  CHECK(translated(InvalidField("prompt_token_ids[3]", "x")) == "tokenized.input_ids[3]");
  const absl::Status none = call.dialect->Translated(
      WithReason(absl::FailedPreconditionError("nothing was handed over"), "NO_HANDOFF"));
  CHECK(absl::IsInvalidArgument(none));
  CHECK(FieldOf(none) == "kv_transfer_params_json");
  CHECK(ReasonOf(none) == "NO_HANDOFF");
}

TEST_CASE("a prefill node computes one token of a prompt that a decode node goes on with") {
  ve::GenerateRequest message = Good();
  message.set_kv_transfer_params_json(R"({"do_remote_decode":true,"do_remote_prefill":false})");
  message.mutable_sampling_params()->set_max_tokens(1);
  CHECK(Call(message, NodeInfo::Role::kPrefill).dialect->Read().ok());
  message.mutable_sampling_params()->set_max_tokens(2);
  CHECK(FieldOf(Call(message, NodeInfo::Role::kPrefill).dialect->Read().status()) ==
        "sampling_params.max_tokens");
  message.mutable_sampling_params()->clear_max_tokens();
  CHECK(FieldOf(Call(message, NodeInfo::Role::kPrefill).dialect->Read().status()) ==
        "sampling_params.max_tokens");
}

}  // namespace
}  // namespace sluice
