// A caller's wishes about how tokens are chosen, checked once when the request comes in.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/params.h"

namespace sluice {

// Limits of the lists. The first two are what the device tables hold (in kernels/params.h, EOS ids
// and stop_token_ids share kMaxStopIds).
inline constexpr size_t kMaxStopTokenIds = 32;
inline constexpr size_t kMaxLogitBiasEntries = kernels::kMaxLogitBias;
// Maximum EOS ids of a model.
inline constexpr size_t kMaxEosIds = kernels::kMaxStopIds - kMaxStopTokenIds;
inline constexpr size_t kMaxStopStrings = 16;
inline constexpr size_t kMaxStopStringBytes = 256;

struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy
  uint32_t top_k = 0;        // 0: off
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  std::vector<std::pair<uint32_t, float>> logit_bias;
  uint32_t min_tokens = 0;
  std::optional<uint32_t> max_tokens;
  std::vector<uint32_t> stop_token_ids;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  std::optional<uint32_t> logprobs;  // number of alternatives for each token
  std::optional<uint64_t> seed;
  uint32_t n = 1;
};

// Returns INVALID_ARGUMENT naming the first field that is out of range, not finite, or not
// supported ("sampling.top_p: ..."). `stop_strings_supported`: the model directory had a
// tokenizer.json.
absl::Status ValidateSamplingParams(const SamplingParams& params, uint32_t vocab_size,
                                    bool stop_strings_supported);

// Returns the token ids that end a sequence: the request's and, unless it ignores them, the model's
// EOS ids. They are sorted, without repeats, and at most kernels::kMaxStopIds. REQUIRES: params
// were validated, and there are at most kMaxEosIds EOS ids.
std::vector<int32_t> StopIds(const SamplingParams& params, const std::vector<int32_t>& eos_ids);

// Returns the device's form. `seed` is used if params bring none. `stop_count` is the size of
// StopIds().
kernels::SamplingSlot MakeSamplingSlot(const SamplingParams& params, uint64_t seed,
                                       int32_t prompt_length, int32_t stop_count);

}  // namespace sluice
