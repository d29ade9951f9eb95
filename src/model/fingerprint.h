// Which model this is, in 64 hexadecimal digits: a prefill node and a decode node compare them
// before a cache changes hands.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "src/model/model_config.h"
#include "src/model/weight_source.h"

namespace sluice {

// SHA-256 over the config fields that enter the computation, the name and shape of every expected
// tensor, and of each tensor up to 64 windows of 32 consecutive bf16 values spread evenly from its
// first to its last (all of it where it has no more than 2048 elements); 4 such windows of a matrix
// of a routed expert, of which there are many. An fp8 matrix and its scales are two tensors.
//
// It catches another architecture, shape or RoPE setting, and any training that moves a tensor's
// values broadly, as every fine-tune and every merged adapter does. It does not catch an edit of a
// few values between the windows, nor changes below bf16's precision; it is no proof against
// someone who means to deceive. It is the same for one file and shards, and for F32 or F16 copies
// that round to the same bf16 values. The model's name, its EOS ids and max_position_embeddings do
// not enter. Reads a few KiB per tensor; fails as WeightSource::ReadBFloat16 does.
absl::StatusOr<std::string> Fingerprint(const ModelConfig& config, WeightSource& weights);

}  // namespace sluice
