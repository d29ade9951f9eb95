// Trains the hash matrices of policy clo (HATA): directions for whose signs the selection by codes
// holds more of a row's attention than it does for random ones.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "src/profile/query_capture.h"

namespace sluice {

struct HashTrainingOptions {
  int64_t bits = 128;
  uint64_t seed = 1;  // of the random matrices that it starts from, and of its draws
  int steps = 240;
};

// Returns the share of the attention to the tenth of the tokens with the most of it that is held by
// the tenth with the highest scores of codes: the mean over rows [first_row, tokens), as far as
// MeasuredRowStride takes them. A row's attention is the mean over its group's queries. Codes are
// those of clo: of keys less their centre, levels of queries, and the largest agreement of the
// group. `hash` is [head_dim][bits]. Returns 1 if there is no such row.
double HeldByCodes(const HeadQueries& head, int64_t head_dim, const float* hash, int64_t bits,
                   int64_t first_row);

// Trains one matrix, [head_dim][bits], in place by the queries and keys of the first `rows` tokens.
//
// HATA's own loss draws the codes of a query and of its top keys together. This one lists: over
// drawn keys, the softmax of the scores is to be that of q k / sqrt(head_dim), where keys have soft
// codes (tanh in place of the sign) and the levels of queries are not rounded. Its gradient is the
// difference of the two (Adam, columns kept at length 1).
void TrainHash(const HeadQueries& head, int64_t head_dim, int64_t rows,
               const HashTrainingOptions& options, uint64_t seed, float* hash);

struct HashQuality {
  double random = 0, trained = 0;  // HeldByCodes of the last quarter of the tokens, mean over heads
};
struct TrainedHashes {
  std::vector<float> hash;  // [layers][kv_heads][head_dim][bits]
  std::vector<HashQuality> layers;
};
// Trains a matrix for every layer and KV head by the first three quarters of the captured tokens,
// and judges it by the rest. A head whose trained matrix holds less than the random one keeps the
// random one. `progress(done, all)` gets numbers of heads, on any thread, one call at a time.
TrainedHashes TrainHashes(const CapturedQueries& captured, const HashTrainingOptions& options,
                          int threads, const std::function<void(int64_t, int64_t)>& progress);

}  // namespace sluice
