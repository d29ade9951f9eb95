#include "src/sampling/sampling_params.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <limits>

#include "src/base/error.h"

namespace sluice {
namespace {

struct Bad {
  const char* field;
  std::function<void(SamplingParams&)> spoil;
};

TEST_CASE("every value out of range is refused by the name of its field") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<Bad> table = {
      {"temperature", [=](auto& p) { p.temperature = nan; }},
      {"temperature", [](auto& p) { p.temperature = -0.1f; }},
      {"temperature", [=](auto& p) { p.temperature = infinity; }},
      {"top_p", [](auto& p) { p.top_p = 0; }},
      {"top_p", [](auto& p) { p.top_p = 1.01f; }},
      {"top_p", [=](auto& p) { p.top_p = nan; }},
      {"min_p", [](auto& p) { p.min_p = -0.1f; }},
      {"min_p", [](auto& p) { p.min_p = 1.5f; }},
      {"top_k", [](auto& p) { p.top_k = 101; }},
      {"repetition_penalty", [](auto& p) { p.repetition_penalty = 0; }},
      {"repetition_penalty", [](auto& p) { p.repetition_penalty = 1e-38f; }},
      {"repetition_penalty", [=](auto& p) { p.repetition_penalty = infinity; }},
      {"frequency_penalty", [](auto& p) { p.frequency_penalty = 2.5f; }},
      {"presence_penalty", [](auto& p) { p.presence_penalty = -2.5f; }},
      {"logit_bias",
       [](auto& p) {
         p.logit_bias = {{100, 1.0f}};
       }},
      {"logit_bias",
       [](auto& p) {
         p.logit_bias = {{1, 101.0f}};
       }},
      {"logit_bias",
       [=](auto& p) {
         p.logit_bias = {{1, nan}};
       }},
      {"stop_token_ids", [](auto& p) { p.stop_token_ids = {100}; }},
      {"stop_token_ids", [](auto& p) { p.stop_token_ids.assign(33, 1); }},
      {"stop", [](auto& p) { p.stop = {""}; }},
      {"stop", [](auto& p) { p.stop = {std::string(257, 'x')}; }},
      {"stop", [](auto& p) { p.stop.assign(17, "x"); }},
      {"max_tokens", [](auto& p) { p.max_tokens = 0; }},
      {"min_tokens", [](auto& p) { p.max_tokens = 3, p.min_tokens = 4; }},
      {"logprobs", [](auto& p) { p.logprobs = 21; }},
      {"n", [](auto& p) { p.n = 2; }},
      {"n", [](auto& p) { p.n = 0; }},
  };
  CHECK(ValidateSamplingParams({}, 100, true).ok());
  for (const Bad& bad : table) {
    SamplingParams params;
    bad.spoil(params);
    const absl::Status status = ValidateSamplingParams(params, 100, true);
    INFO(bad.field << ": " << std::string(status.ToString()));
    REQUIRE(absl::IsInvalidArgument(status));
    CHECK(FieldOf(status) == std::string("sampling.") + bad.field);
  }
}

TEST_CASE("stop strings need a tokenizer") {
  SamplingParams params;
  params.stop = {"END"};
  CHECK(ValidateSamplingParams(params, 100, true).ok());
  CHECK(FieldOf(ValidateSamplingParams(params, 100, false)) == "sampling.stop");
}

TEST_CASE("stop ids are the request's and the model's, once each") {
  SamplingParams params;
  params.stop_token_ids = {9, 2, 9};
  CHECK(StopIds(params, {2, 7}) == std::vector<int32_t>{2, 7, 9});
  params.ignore_eos = true;
  CHECK(StopIds(params, {2, 7}) == std::vector<int32_t>{2, 9});
}

TEST_CASE("the device's form keeps every value, and the request's seed before the server's") {
  SamplingParams params;
  params.temperature = 0.5f;
  params.top_k = 7;
  params.logit_bias = {{1, 2.0f}, {3, 4.0f}};
  params.logprobs = 4;
  kernels::SamplingSlot slot = MakeSamplingSlot(params, 99, 12, 3);
  CHECK(slot.seed == 99);
  CHECK(slot.temperature == 0.5f);
  CHECK(slot.top_k == 7);
  CHECK(slot.prompt_length == 12);
  CHECK(slot.stop_count == 3);
  CHECK(slot.bias_count == 2);
  CHECK(slot.top_logprobs == 4);
  CHECK(slot.logprobs == 1);
  params.seed = 5;
  params.logprobs.reset();
  slot = MakeSamplingSlot(params, 99, 12, 3);
  CHECK(slot.seed == 5);
  CHECK(slot.logprobs == 0);
}

}  // namespace
}  // namespace sluice
