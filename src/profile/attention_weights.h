// Attention weights of one query, for what sluice-profile measures on captured queries and keys.
#pragma once

#include <cstdint>
#include <vector>

namespace sluice {

// Returns the softmax over the first `tokens` keys of q k^T / sqrt(head_dim). `q` is [head_dim],
// `k` is [at least tokens][head_dim].
std::vector<float> AttentionWeights(const float* q, const std::vector<float>& k, int64_t tokens,
                                    int64_t head_dim);

}  // namespace sluice
