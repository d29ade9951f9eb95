// The rules by which CLO treats each head by what a profile says of it: from which similarity on it
// keeps its selection (equations 7 to 9), and which heads lie wholly in HBM (equations 11 to 13).
#pragma once

#include <cstdint>
#include <vector>

namespace sluice {

// Returns the threshold of a KV head with gate `gate` from 0 (it attends to the first and the
// newest tokens alone) to 1 (it retrieves): the cosine of the angle lambda theta + (1 - lambda) pi,
// where theta is the angle of cosine `eta`, and lambda = gate^3. Gate 1 gives eta, gate 0 gives -1,
// with which a head never selects again.
float ThresholdOf(double gate, double eta);

// Returns how much a head lacks to keep its selection, D = threshold - (similarity - 0.1), where
// `similarity` is the mean similarity of its queries in neighbouring steps.
float DifficultyOf(double threshold, double similarity);

// Returns which heads are persistent, [layers][kv_heads]; empty: none is. These are a share of all
// heads: layer 0 first, because nothing comes before it that could hide a fetch, then those of the
// largest difficulty, [layers][kv_heads], lower ones first among equals. Without a difficulty
// (empty) they lie at equal distances. REQUIRES: 0 <= share <= 1.
std::vector<uint8_t> HardestHeads(int64_t layers, int64_t kv_heads,
                                  const std::vector<float>& difficulty, double share);

}  // namespace sluice
