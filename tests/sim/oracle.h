// The oracle: what a request must give, computed only from its prompt and parameters, with no
// pages, no batch and no engine. It runs the simulated model's arithmetic, and the sampling
// operator, over a plain history.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "src/request/token.h"
#include "src/sampling/sampling_params.h"
#include "tests/sim/hash.h"

namespace sluice::sim {

// The caches of a history of tokens, and the state of its newest token. With `top_k` > 0 these are
// the caches of the model with latent caches, in which a token attends to `top_k` entries.
class History {
 public:
  explicit History(int top_k = 0) : top_k_(top_k) {}
  void Append(int32_t token);
  uint64_t state() const { return state_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  // Returns a chunk's payload: tokens [token_begin, token_end) of heads [head_begin, head_end).
  // A head of latent caches stands for a kind. REQUIRES: token_begin is the first token of a block
  // of `block_tokens`.
  std::vector<uint8_t> Payload(int layer, int head_begin, int head_end, size_t token_begin,
                               size_t token_end, int block_tokens) const;
  // Returns the words of one token's keys and values in a layer.
  const uint64_t* Words(int layer, size_t position) const {
    return &words_[static_cast<size_t>(layer)][position * kTokenWords];
  }

 private:
  std::vector<int32_t> tokens_;
  std::vector<uint64_t> words_[kLayers];  // [tokens][kTokenWords]
  void AppendLatents(int layer);

  int top_k_;
  uint64_t sums_[kLayers][kKvHeads] = {};
  uint64_t state_ = 0;
};

// Everything that a request emits if nothing interferes, and how it ends.
struct Expected {
  enum class End { kStop, kLength, kBadLogits };
  std::vector<OutputToken> tokens;
  End end = End::kLength;
  std::optional<int32_t> stop_token;  // set for kStop
};

// Returns what a request must give. `first` are the tokens handed over with the prompt; `top_k` is
// History's. REQUIRES: params bring a seed, or are greedy.
Expected Expect(const std::vector<int32_t>& prompt, const std::vector<OutputToken>& first,
                const SamplingParams& params, int64_t max_tokens, int top_k);

}  // namespace sluice::sim
