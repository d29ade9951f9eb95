// The fingerprint says which model a node has, in 64 hexadecimal digits. A prefill node and a
// decode node compare theirs before KV changes hands.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "src/model/model_config.h"
#include "src/model/weight_source.h"

namespace sluice {

// Returns the SHA-256 over the config fields that enter the computation, the name and shape of
// every expected tensor, and up to 64 windows of 32 consecutive bf16 values of each tensor, spread
// evenly from its first value to its last (all of it if it has no more than 2048 elements). A
// matrix of a routed expert, of which there are many, has 4 such windows. An fp8 matrix and its
// scales are two tensors.
//
// It catches another architecture, shape or RoPE setting, and any training that moves a tensor's
// values broadly, as every fine-tune and every merged adapter does. It does not catch an edit of a
// few values between the windows, nor changes below bf16's precision, and it is no proof against
// somebody who means to deceive. It is the same for one file and shards, and for F32 or F16 copies
// that round to the same bf16 values. The model's name, its EOS ids and max_position_embeddings do
// not enter. Reads a few KiB per tensor; fails as WeightSource::ReadBFloat16 does.
absl::StatusOr<std::string> Fingerprint(const ModelConfig& config, WeightSource& weights);

}  // namespace sluice
