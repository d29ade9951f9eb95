#include "src/server/plan_text.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/attention/latent/draft_window.h"
#include "src/base/status_macros.h"
#include "src/config/units.h"
#include "src/model/shard.h"
#include "src/server/plan.h"

namespace sluice {
namespace {

std::string Bytes(int64_t bytes) { return ApproximateBytes(bytes); }

// Returns a line about the memory of a device that has its own.
std::string GpuLine(const PlanInput& in) {
  const int64_t beside = in.weight_bytes + in.workspace_bytes + in.batch_bytes;
  MemoryFound found;
  found.gpu = true;
  found.gpu_free_bytes = in.device.free_bytes;
  const int64_t most = LargestHbmBytes(found, beside);
  std::string out = absl::StrFormat("HBM         %s, %s free; ", Bytes(in.device.total_bytes),
                                    Bytes(in.device.free_bytes));
  if (most <= 0) {
    absl::StrAppend(&out, "too small: ", Bytes(beside),
                    " are needed beside the KV caches; lower --max-sequences, --max-context or "
                    "--chunk-tokens, or take a smaller model, until they are ",
                    Bytes(1 - most), " less\n");
  } else if (in.hbm_bytes > most) {
    absl::StrAppendFormat(&out, "hbm_bytes of %s does not fit: lower it by %s to %s\n",
                          Bytes(in.hbm_bytes), Bytes(in.hbm_bytes - most), Bytes(most));
  } else {
    absl::StrAppendFormat(&out, "hbm_bytes may be up to %s\n", Bytes(most));
  }
  return out;
}

// Returns a line about the memory of the host.
std::string HostLine(const PlanInput& in) {
  if (in.host.total_bytes == 0) return "";
  std::string out = absl::StrFormat("DRAM        %s, %s available", Bytes(in.host.total_bytes),
                                    Bytes(in.host.available_bytes));
  if (!in.host.limit_file.empty()) absl::StrAppend(&out, " (by ", in.host.limit_file, ")");
  int64_t wanted = in.dram_bytes + in.pinned_bytes;
  const bool gpu = in.device.total_bytes > 0;
  if (!gpu) wanted += in.weight_bytes + in.workspace_bytes + in.batch_bytes + in.hbm_bytes;
  const int64_t over = wanted - in.host.available_bytes;
  if (over > 0) {
    absl::StrAppendFormat(&out, "; %s are needed: lower %s by %s", Bytes(wanted),
                          gpu ? "dram_bytes" : "dram_bytes or hbm_bytes", Bytes(over));
  }
  return out + "\n";
}

std::string ChoiceLine(const char* name, const std::string& value, const std::string& why) {
  if (why.empty()) return "";
  return absl::StrFormat("%-12s%s, %s\n", name, value, why);
}

std::string ModelLine(const ModelConfig& m) {
  std::string out = absl::StrFormat("model       %s: %s, %d layers, %d heads", m.name,
                                    m.architecture, m.layers, m.heads);
  if (!m.latent.has_value()) {
    absl::StrAppendFormat(&out, " and %d KV heads of %d\n", m.kv_heads, m.head_dim);
    return out;
  }
  const LatentConfig& latent = *m.latent;
  absl::StrAppendFormat(&out, ", entries of %d + %d", latent.rank, latent.rope_dim);
  if (latent.indexer.has_value()) {
    absl::StrAppendFormat(&out, ", %d selected by an indexer of %d heads", latent.indexer->top_k,
                          latent.indexer->heads);
  }
  return out + "\n";
}

std::string PolicyLines(const PlanInput::Policy& policy, int64_t max_context) {
  std::string out =
      absl::StrFormat("\npolicy %s: sequences in DRAM, a part of each in HBM\n", policy.name);
  if (!policy.status.ok()) {
    absl::StrAppend(&out, "  refused: ", std::string(policy.status.message()), "\n");
    return out;
  }
  absl::StrAppendFormat(&out, "  beside its sequences: %s of HBM, %s of DRAM\n",
                        Bytes(policy.beside_hbm_bytes), Bytes(policy.beside_pinned_bytes));
  absl::StrAppendFormat(&out, "  %10s  %12s  %12s  %16s\n", "context", "HBM", "DRAM",
                        "running (both)");
  for (const PlanInput::Policy::Headroom& room : policy.rooms) {
    absl::StrAppendFormat(&out, "  %10d  %12s  %12s  %16d\n", room.context, Bytes(room.hbm_bytes),
                          Bytes(room.dram_bytes), room.running);
  }
  absl::StrAppendFormat(&out, "  exact: sequences of up to %d tokens of prompt and output%s\n",
                        policy.exact_tokens,
                        policy.exact_tokens < max_context ? "" : ", all of them");
  if (!policy.rooms.empty() && !policy.rooms.back().kinds.empty()) {
    absl::StrAppendFormat(&out, "  of a sequence of %d tokens, %s\n", policy.rooms.back().context,
                          policy.rooms.back().kinds);
  }
  if (!policy.one.empty()) {
    absl::StrAppendFormat(
        &out,
        "  beneath the fetching, by layer, until measured misses say otherwise: %s "
        "with one sequence, %s with max_sequences\n",
        policy.one, policy.all);
  }
  if (!policy.mover.empty()) {
    absl::StrAppendFormat(&out, "  what a step misses comes over the link by ess_mover %s\n",
                          policy.mover);
  }
  return out;
}

}  // namespace

std::vector<int64_t> PlannedContexts(int64_t max_context) {
  std::vector<int64_t> out;
  for (int64_t context = 512; context < max_context; context *= 4) out.push_back(context);
  out.push_back(max_context);
  return out;
}

std::string BytesByKind(const CacheLayout& layout, const TokensByKind& tokens) {
  std::string out;
  for (size_t kind = 0; kind < layout.kinds.size(); ++kind) {
    absl::StrAppend(&out, kind == 0 ? "" : ", ", layout.kinds[kind].name, " ",
                    Bytes(layout.PagesFor(kind, tokens[kind]) * layout.kinds[kind].page_bytes()));
  }
  return out;
}

std::string FormatPlan(const PlanInput& in) {
  const ModelConfig& m = in.model;
  int64_t token_bytes = 0;
  for (const CacheKind& kind : in.layout.kinds) {
    token_bytes += kind.bytes_per_token * kind.heads * in.layout.layers;
  }
  const CacheKind& kind = in.layout.kinds.front();
  std::string out;
  absl::StrAppend(&out, ModelLine(m));
  absl::StrAppendFormat(&out, "weights     %s\n", Bytes(in.weight_bytes));
  absl::StrAppendFormat(&out, "workspace   %s (steps of up to %d rows)\n",
                        Bytes(in.workspace_bytes), in.max_rows);
  absl::StrAppendFormat(&out,
                        "batch       %s (histories, tables and logits of %d sequences, and what "
                        "policy %s needs beside them); %s of DRAM\n",
                        Bytes(in.batch_bytes), in.max_sequences, in.policy, Bytes(in.pinned_bytes));
  if (in.drafts_on_device) {
    absl::StrAppendFormat(&out,
                          "drafts      up to %d of the next-token layer; its caches of the newest "
                          "%d tokens are %s of the batch\n",
                          in.draft_tokens, std::min(in.max_context, kDraftWindow),
                          Bytes(in.draft_cache_bytes));
  }
  absl::StrAppendFormat(&out, "caches      %s a token (%s, blocks of %d tokens, all layers)\n",
                        Bytes(token_bytes), std::string(DTypeName(kind.element_type)),
                        kind.block_tokens);
  if (in.layout.kinds.size() > 1) {
    absl::StrAppendFormat(&out, "            of a sequence of %d tokens: %s\n", in.max_context,
                          BytesByKind(in.layout, in.max_context));
  }
  absl::StrAppendFormat(&out, "memory      %s: weights, workspace, batch, HBM and DRAM together\n",
                        Bytes(in.weight_bytes + in.workspace_bytes + in.batch_bytes +
                              in.pinned_bytes + in.hbm_bytes + in.dram_bytes));
  absl::StrAppend(&out, ChoiceLine("hbm_bytes", Bytes(in.hbm_bytes), in.hbm_why),
                  ChoiceLine("dram_bytes", Bytes(in.dram_bytes), in.dram_why),
                  ChoiceLine("device", in.device_name, in.device_why));
  if (in.device.total_bytes > 0) absl::StrAppend(&out, GpuLine(in));
  absl::StrAppend(&out, HostLine(in));
  if (!in.placement.empty()) absl::StrAppend(&out, "placement   ", in.placement, "\n");
  if (!in.auto_text.empty()) absl::StrAppend(&out, "\n", in.auto_text);
  out += "\n";

  // Under policy full a running sequence lies wholly in HBM, with room to grow. DRAM holds caches
  // that were handed over until their sequences run.
  absl::StrAppendFormat(&out, "policy full: every running sequence wholly in HBM, and exact\n");
  absl::StrAppendFormat(&out, "  HBM   %10s  %10d tokens\n", Bytes(in.hbm_bytes),
                        TokensThatFit(in.layout, in.hbm_bytes));
  absl::StrAppendFormat(&out, "  DRAM  %10s  %10d tokens\n\n", Bytes(in.dram_bytes),
                        TokensThatFit(in.layout, in.dram_bytes));
  absl::StrAppendFormat(&out, "  %10s  %12s  %16s  %16s\n", "context", "one sequence",
                        "running (HBM)", "waiting (DRAM)");
  for (const int64_t context : PlannedContexts(in.max_context)) {
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
  for (const PlanInput::Policy& policy : in.policies) {
    absl::StrAppend(&out, PolicyLines(policy, in.max_context));
  }
  return out;
}

absl::StatusOr<std::string> RankText(const ModelConfig& config, int rank, int ranks, int64_t rows) {
  SLUICE_ASSIGN_OR_RETURN(const Shard shard, ShardOf(config, rank, ranks));
  const StepExchange step = ExchangeOf(config, shard, rows, rows);
  const auto numbers = [](const ShardPart& part, int all) {
    return absl::StrFormat("%d to %d of %d", part.first, part.first + part.count - 1, all);
  };
  return absl::StrCat(
      absl::StrFormat("rank        %d of %d: heads %s, KV heads %s, FFN columns %s\n", rank, ranks,
                      numbers(shard.heads, config.heads), numbers(shard.kv_heads, config.kv_heads),
                      numbers(shard.inner, config.intermediate_size)),
      absl::StrFormat("exchange    a step of %d rows: %d all-reduces of %s, %d all-gathers of %s\n",
                      rows, step.all_reduces, Bytes(step.all_reduce_bytes), step.all_gathers,
                      Bytes(step.all_gather_bytes)));
}

}  // namespace sluice
