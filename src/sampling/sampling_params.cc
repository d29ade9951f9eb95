#include "src/sampling/sampling_params.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

absl::Status CheckRange(const char* field, float value, float min, float max, bool open_below) {
  const bool inside =
      std::isfinite(value) && value <= max && (open_below ? value > min : value >= min);
  if (inside) return absl::OkStatus();
  return InvalidField(absl::StrCat("sampling.", field),
                      absl::StrCat("must be ", open_below ? "above " : "at least ", min,
                                   " and at most ", max, ", found ", value));
}

absl::Status CheckTokenIds(const char* field, const std::vector<uint32_t>& ids, size_t most,
                           uint32_t vocab_size) {
  if (ids.size() > most) {
    return InvalidField(absl::StrCat("sampling.", field),
                        absl::StrCat("at most ", most, " entries, found ", ids.size()));
  }
  for (const uint32_t id : ids) {
    if (id >= vocab_size) {
      return InvalidField(
          absl::StrCat("sampling.", field),
          absl::StrCat("token id ", id, " is outside the vocabulary of ", vocab_size));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLogitBias(const SamplingParams& params, uint32_t vocab_size) {
  std::vector<uint32_t> ids;
  for (const auto& [id, value] : params.logit_bias) {
    ids.push_back(id);
    SLUICE_RETURN_IF_ERROR(CheckRange("logit_bias", value, -100.0f, 100.0f, false));
  }
  return CheckTokenIds("logit_bias", ids, kMaxLogitBiasEntries, vocab_size);
}

absl::Status CheckStopStrings(const SamplingParams& params, bool supported) {
  if (params.stop.empty()) return absl::OkStatus();
  if (!supported) {
    return InvalidField("sampling.stop",
                        "this server has no tokenizer.json in its model directory; use "
                        "stop_token_ids, or match the text on your side");
  }
  if (params.stop.size() > kMaxStopStrings) {
    return InvalidField("sampling.stop", absl::StrCat("at most ", kMaxStopStrings,
                                                      " strings, found ", params.stop.size()));
  }
  for (const std::string& text : params.stop) {
    if (text.empty() || text.size() > kMaxStopStringBytes) {
      return InvalidField("sampling.stop",
                          absl::StrCat("each string has 1 to ", kMaxStopStringBytes,
                                       " bytes, found ", text.size()));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateSamplingParams(const SamplingParams& params, uint32_t vocab_size,
                                    bool stop_strings_supported) {
  SLUICE_RETURN_IF_ERROR(CheckRange("temperature", params.temperature, 0.0f, 100.0f, false));
  SLUICE_RETURN_IF_ERROR(CheckRange("top_p", params.top_p, 0.0f, 1.0f, true));
  SLUICE_RETURN_IF_ERROR(CheckRange("min_p", params.min_p, 0.0f, 1.0f, false));
  SLUICE_RETURN_IF_ERROR(
      CheckRange("repetition_penalty", params.repetition_penalty, 0.01f, 100.0f, false));
  SLUICE_RETURN_IF_ERROR(
      CheckRange("frequency_penalty", params.frequency_penalty, -2.0f, 2.0f, false));
  SLUICE_RETURN_IF_ERROR(
      CheckRange("presence_penalty", params.presence_penalty, -2.0f, 2.0f, false));
  if (params.top_k > vocab_size) {
    return InvalidField("sampling.top_k", absl::StrCat("must be at most the vocabulary of ",
                                                       vocab_size, ", found ", params.top_k));
  }
  SLUICE_RETURN_IF_ERROR(CheckLogitBias(params, vocab_size));
  SLUICE_RETURN_IF_ERROR(
      CheckTokenIds("stop_token_ids", params.stop_token_ids, kMaxStopTokenIds, vocab_size));
  SLUICE_RETURN_IF_ERROR(CheckStopStrings(params, stop_strings_supported));
  if (params.max_tokens.has_value() && *params.max_tokens == 0) {
    return InvalidField("sampling.max_tokens", "must be at least 1");
  }
  if (params.max_tokens.has_value() && params.min_tokens > *params.max_tokens) {
    return InvalidField("sampling.min_tokens",
                        absl::StrCat("must be at most max_tokens (", *params.max_tokens,
                                     "), found ", params.min_tokens));
  }
  if (params.logprobs.has_value() && *params.logprobs > kernels::kMaxTopLogprobs) {
    return InvalidField("sampling.logprobs", absl::StrCat("at most ", kernels::kMaxTopLogprobs,
                                                          ", found ", *params.logprobs));
  }
  if (params.n != 1) {
    return InvalidField("sampling.n",
                        absl::StrCat("only 1 is supported, found ", params.n,
                                     "; send one request per completion, each with its own seed"));
  }
  return absl::OkStatus();
}

std::vector<int32_t> StopIds(const SamplingParams& params, const std::vector<int32_t>& eos_ids) {
  std::vector<int32_t> ids;
  if (!params.ignore_eos) ids = eos_ids;
  for (const uint32_t id : params.stop_token_ids) ids.push_back(static_cast<int32_t>(id));
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  SLUICE_CHECK(ids.size() <= kernels::kMaxStopIds);
  return ids;
}

kernels::SamplingSlot MakeSamplingSlot(const SamplingParams& params, uint64_t seed,
                                       int32_t prompt_length, int32_t stop_count) {
  kernels::SamplingSlot slot{};
  slot.seed = params.seed.value_or(seed);
  slot.temperature = params.temperature;
  slot.top_p = params.top_p;
  slot.min_p = params.min_p;
  slot.repetition_penalty = params.repetition_penalty;
  slot.frequency_penalty = params.frequency_penalty;
  slot.presence_penalty = params.presence_penalty;
  slot.top_k = static_cast<int32_t>(params.top_k);
  slot.prompt_length = prompt_length;
  slot.min_tokens = static_cast<int32_t>(params.min_tokens);
  slot.stop_count = stop_count;
  slot.bias_count = static_cast<int32_t>(params.logit_bias.size());
  slot.top_logprobs = static_cast<int32_t>(params.logprobs.value_or(0));
  slot.logprobs = params.logprobs.has_value() ? 1 : 0;
  return slot;
}

}  // namespace sluice
