#include "src/server/plan.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/status_macros.h"
#include "src/model/dense_model.h"
#include "src/model/tensor_list.h"
#include "src/server/model_setup.h"

namespace sluice {
namespace {

// What a pool loses to alignment, for each kind.
constexpr int64_t kAlignment = 4096;

std::string Bytes(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= int64_t{1} << 30) return absl::StrFormat("%.2f GiB", value / (1 << 30));
  if (bytes >= 1 << 20) return absl::StrFormat("%.1f MiB", value / (1 << 20));
  if (bytes >= 1 << 10) return absl::StrFormat("%.1f KiB", value / (1 << 10));
  return absl::StrCat(bytes, " B");
}

int64_t Usable(const CacheLayout& layout, int64_t bytes) {
  return std::max<int64_t>(bytes - kAlignment * static_cast<int64_t>(layout.kinds.size()), 0);
}

int64_t WeightBytes(const ModelConfig& model) {
  int64_t bytes = 0;
  // Matrices are bf16 in memory, vectors float32.
  for (const TensorSpec& tensor : ExpectedTensors(model)) {
    bytes += tensor.elements() * (tensor.shape.size() > 1 ? 2 : 4);
  }
  return bytes;
}

// Activations of a step's rows in float32, the widest they get; logits of every sequence. The model
// adds a few megabytes of scratch for split attention.
int64_t WorkspaceBytes(const PlanInput& in) {
  const ModelConfig& m = in.model;
  const int64_t per_row = 2 * int64_t{m.hidden_size} + 2 * int64_t{m.q_size()} +
                          2 * int64_t{m.kv_size()} + 3 * int64_t{m.intermediate_size} + m.head_dim;
  return 4 * (in.max_rows * per_row + in.max_sequences * int64_t{m.vocab_size});
}

// 512, 1024, ... and the longest.
std::vector<int64_t> Contexts(int64_t max_context) {
  std::vector<int64_t> out;
  for (int64_t context = 512; context < max_context; context *= 4) out.push_back(context);
  out.push_back(max_context);
  return out;
}

}  // namespace

int64_t SequencesThatFit(const CacheLayout& layout, int64_t bytes, int64_t context) {
  return Usable(layout, bytes) / std::max<int64_t>(layout.BytesFor(context), 1);
}

int64_t TokensThatFit(const CacheLayout& layout, int64_t bytes) {
  int64_t low = 0;
  int64_t high = Usable(layout, bytes);  // a token takes a byte at least
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (layout.BytesFor(middle) <= Usable(layout, bytes)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

std::string FormatPlan(const PlanInput& in) {
  const ModelConfig& m = in.model;
  int64_t token_bytes = 0;
  for (const CacheKind& kind : in.layout.kinds) {
    token_bytes += kind.bytes_per_token * kind.heads * in.layout.layers;
  }
  const CacheKind& kind = in.layout.kinds.front();
  std::string out;
  absl::StrAppendFormat(&out, "model       %s: %s, %d layers, %d heads and %d KV heads of %d\n",
                        m.name, m.architecture, m.layers, m.heads, m.kv_heads, m.head_dim);
  absl::StrAppendFormat(&out, "weights     %s in bf16\n", Bytes(WeightBytes(m)));
  absl::StrAppendFormat(&out, "workspace   about %s (steps of up to %d rows)\n",
                        Bytes(WorkspaceBytes(in)), in.max_rows);
  absl::StrAppendFormat(&out, "caches      %s a token (%s, blocks of %d tokens, all layers)\n",
                        Bytes(token_bytes), std::string(DTypeName(kind.element_type)),
                        kind.block_tokens);
  absl::StrAppendFormat(&out, "memory      %s: weights, workspace, HBM and DRAM together\n\n",
                        Bytes(WeightBytes(m) + WorkspaceBytes(in) + in.hbm_bytes + in.dram_bytes));

  // Policy full: a running sequence is wholly in HBM with its growth; DRAM holds what was handed
  // over until then.
  absl::StrAppendFormat(&out, "policy full: every running sequence wholly in HBM\n");
  absl::StrAppendFormat(&out, "  HBM   %10s  %10d tokens\n", Bytes(in.hbm_bytes),
                        TokensThatFit(in.layout, in.hbm_bytes));
  absl::StrAppendFormat(&out, "  DRAM  %10s  %10d tokens\n\n", Bytes(in.dram_bytes),
                        TokensThatFit(in.layout, in.dram_bytes));
  absl::StrAppendFormat(&out, "  %10s  %12s  %16s  %16s\n", "context", "one sequence",
                        "running (HBM)", "waiting (DRAM)");
  for (const int64_t context : Contexts(in.max_context)) {
    absl::StrAppendFormat(
        &out, "  %10d  %12s  %16d  %16d\n", context, Bytes(in.layout.BytesFor(context)),
        std::min(SequencesThatFit(in.layout, in.hbm_bytes, context), in.max_sequences),
        SequencesThatFit(in.layout, in.dram_bytes, context));
  }
  const int64_t longest = std::min({TokensThatFit(in.layout, in.hbm_bytes),
                                    TokensThatFit(in.layout, in.dram_bytes), in.max_context});
  absl::StrAppendFormat(&out,
                        "\n  longest sequence: %d tokens of prompt and output (max_context %d)\n",
                        longest, in.max_context);
  absl::StrAppendFormat(&out, "  running sequences are capped by max_sequences (%d)\n",
                        in.max_sequences);
  return out;
}

absl::StatusOr<std::string> PrintPlan(const Config& config) {
  PlanInput in;
  SLUICE_ASSIGN_OR_RETURN(in.model, LoadModelConfig(config.model()));
  if (config.max_context() > static_cast<uint32_t>(in.model.max_position_embeddings)) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_context: the model's max_position_embeddings is ",
                     in.model.max_position_embeddings, ", found ", config.max_context()));
  }
  in.layout = DenseCacheLayout(in.model, KvDType(config), static_cast<int>(config.block_tokens()));
  in.hbm_bytes = static_cast<int64_t>(config.hbm_bytes());
  in.dram_bytes = static_cast<int64_t>(config.dram_bytes());
  in.max_context =
      config.max_context() > 0 ? config.max_context() : in.model.max_position_embeddings;
  in.max_sequences = config.max_sequences();
  in.max_rows = int64_t{config.max_sequences()} + config.chunk_tokens();
  return FormatPlan(in);
}

}  // namespace sluice
