// The hash matrices of policy clo: [layers][kv_heads][head_dim][bits], applied to queries and keys
// after RoPE. A bit of a code is the sign of a product with a column (kernels/hash_params.h).
#pragma once

#include <cstdint>
#include <vector>

namespace sluice {

struct HashShape {
  int64_t layers = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t bits = 0;
  // Where the model is divided, the heads are [first_kv_head, first_kv_head + kv_heads) of
  // `all_kv_heads`; 0: they are all.
  int64_t first_kv_head = 0;
  int64_t all_kv_heads = 0;
  int64_t elements() const { return layers * kv_heads * head_dim * bits; }
};

// Returns matrices of random directions, for use without a profile. Each run of head_dim columns is
// orthogonal, so that its bits say more of a vector than independent directions do; a column has
// the length 1. A head has the same matrix wherever the model is divided. The share of bits in
// which two codes differ is, on average, the angle of the two vectors over pi.
std::vector<float> RandomHash(const HashShape& shape, uint64_t seed);

}  // namespace sluice
