// Requests for tests of speculation, of every kind that a step treats in its own way, and what must
// be the same with drafts and without.
#pragma once

#include <catch2/catch.hpp>
#include <cstdint>
#include <vector>

#include "src/base/rng.h"
#include "tests/support/node.h"

namespace sluice::testing {

inline constexpr int32_t kTinyVocab = 512;  // of the tiny models

inline std::vector<int32_t> DrawPrompt(SplitMix64& random) {
  std::vector<int32_t> prompt(1 + random.Below(90));
  for (int32_t& token : prompt) token = static_cast<int32_t>(random.Below(kTinyVocab));
  return prompt;
}

inline Request DrawRequest(SplitMix64& random) {
  Request request = GreedyRequest(DrawPrompt(random), static_cast<uint32_t>(1 + random.Below(60)));
  SamplingParams& sampling = request.sampling;
  if (random.Below(3) != 0) {
    sampling.temperature = static_cast<float>(0.2 + random.Uniform());
    sampling.seed = random();
    if (random.Below(2) == 0) sampling.top_k = 20;
    if (random.Below(2) == 0) sampling.top_p = 0.8f;
    if (random.Below(3) == 0) sampling.min_p = 0.02f;
  }
  if (random.Below(3) == 0) sampling.repetition_penalty = 1.3f;
  if (random.Below(3) == 0) sampling.frequency_penalty = 0.4f;
  if (random.Below(3) == 0) sampling.presence_penalty = -0.5f;
  if (random.Below(4) == 0) sampling.logit_bias = {{5, 2.0f}, {9, -4.0f}};
  if (random.Below(2) == 0) sampling.logprobs = static_cast<uint32_t>(random.Below(3));
  if (random.Below(3) == 0) {
    sampling.stop_token_ids = {static_cast<uint32_t>(random.Below(kTinyVocab))};
    sampling.min_tokens = static_cast<uint32_t>(random.Below(*sampling.max_tokens + 1));
  }
  return request;
}

inline std::vector<int32_t> Whole(const Request& request, const Generated& got) {
  std::vector<int32_t> whole = request.prompt;
  whole.insert(whole.end(), got.ids.begin(), got.ids.end());
  return whole;
}

inline void CheckSame(const Generated& got, const Generated& want) {
  REQUIRE(got.ids == want.ids);
  for (size_t i = 0; i < want.tokens.size(); ++i) {
    REQUIRE(got.tokens[i].logprob == want.tokens[i].logprob);
    REQUIRE(got.tokens[i].top_logprobs == want.tokens[i].top_logprobs);
  }
  CHECK(got.finish.reason == want.finish.reason);
  CHECK(got.finish.stop_token_id == want.finish.stop_token_id);
  CHECK(got.finish.stop_string == want.finish.stop_string);
  CHECK(got.finish.completion_tokens == want.finish.completion_tokens);
  CHECK(got.finish.exact_tokens == want.finish.exact_tokens);
  CHECK(want.finish.drafted_tokens == 0);
}

}  // namespace sluice::testing
