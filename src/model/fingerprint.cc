#include "src/model/fingerprint.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "src/model/tensor_list.h"

namespace sluice {
namespace {

constexpr int64_t kWindows = 64;
constexpr int64_t kExpertWindows = 4;    // in a matrix of a routed expert
constexpr int64_t kWindowElements = 32;  // 64 bytes of bf16

// This version changes with the meaning of the text below, so that an old and a new build do not
// agree by chance.
constexpr char kVersion[] = "sluice model fingerprint 1";

std::string CanonicalLatent(const LatentConfig& l) {
  const ExpertConfig& e = l.experts;
  const IndexerConfig indexer = l.indexer.value_or(IndexerConfig{});
  std::string out;
  absl::StrAppendFormat(&out, "latent q_rank %d rank %d nope %d rope %d v %d scale %a fp8 %d\n",
                        l.q_rank, l.rank, l.nope_dim, l.rope_dim, l.v_dim, l.softmax_scale,
                        l.fp8_weights);
  absl::StrAppendFormat(&out, "indexer heads %d top_k %d\n", indexer.heads, indexer.top_k);
  absl::StrAppendFormat(&out, "experts %d shared %d per_token %d groups %d top_groups %d\n",
                        e.routed, e.shared, e.per_token, e.groups, e.top_groups);
  absl::StrAppendFormat(&out, "experts' size %d normalise %d scaling %a dense layers %d\n",
                        e.intermediate, e.normalise, e.scaling, l.dense_layers);
  return out;
}

// Writes one field to a line, and floating numbers in hexadecimal, which is exact.
std::string CanonicalConfig(const ModelConfig& c) {
  const RopeConfig& r = c.rope;
  std::string out;
  absl::StrAppendFormat(&out, "%s\narchitecture %s\n", kVersion, c.architecture);
  absl::StrAppendFormat(&out, "hidden %d intermediate %d layers %d heads %d kv_heads %d\n",
                        c.hidden_size, c.intermediate_size, c.layers, c.heads, c.kv_heads);
  absl::StrAppendFormat(&out, "head_dim %d vocabulary %d rms_norm_eps %a\n", c.head_dim,
                        c.vocab_size, c.rms_norm_eps);
  absl::StrAppendFormat(&out, "tied %d qkv_bias %d o_bias %d mlp_bias %d qk_norm %d\n",
                        c.tie_word_embeddings, c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm);
  absl::StrAppendFormat(&out, "rope %s theta %a factor %a original %d\n", RopeKindName(r.kind),
                        r.theta, r.factor, r.original_max_position_embeddings);
  absl::StrAppendFormat(&out, "rope low %a high %a fast %a slow %a truncate %d attention %a\n",
                        r.low_freq_factor, r.high_freq_factor, r.beta_fast, r.beta_slow, r.truncate,
                        r.attention_factor);
  if (c.latent.has_value()) absl::StrAppend(&out, CanonicalLatent(*c.latent));
  return out;
}

absl::Status AddTensor(const TensorSpec& spec, WeightSource& weights, Sha256* sha) {
  const std::string head =
      absl::StrFormat("tensor %s %s\n", spec.name, absl::StrJoin(spec.shape, "x"));
  sha->Update(head.data(), head.size());
  const int64_t n = spec.elements();
  const int64_t windows = absl::StrContains(spec.name, ".experts.") ? kExpertWindows : kWindows;
  const bool whole = n <= windows * kWindowElements;
  std::vector<uint16_t> window(static_cast<size_t>(whole ? n : kWindowElements));
  for (int64_t w = 0; w < (whole ? 1 : windows); ++w) {
    const int64_t first = w * (n - static_cast<int64_t>(window.size())) / (windows - 1);
    SLUICE_RETURN_IF_ERROR(
        weights.ReadBFloat16(spec.name, spec.shape, first, absl::MakeSpan(window)));
    sha->Update(window.data(), window.size() * sizeof(uint16_t));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> Fingerprint(const ModelConfig& config, WeightSource& weights) {
  Sha256 sha;
  const std::string text = CanonicalConfig(config);
  sha.Update(text.data(), text.size());
  for (const TensorSpec& spec : ExpectedTensors(config)) {
    SLUICE_RETURN_IF_ERROR(AddTensor(spec, weights, &sha));
  }
  return sha.Hex();
}

}  // namespace sluice
