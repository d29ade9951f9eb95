// One output token as the engine hands it to whoever reads the stream.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace sluice {

struct OutputToken {
  int32_t id = 0;
  std::optional<float> logprob;                         // natural log, raw logits
  std::vector<std::pair<int32_t, float>> top_logprobs;  // (id, logprob), best first
};

}  // namespace sluice
