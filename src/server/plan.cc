#include "src/server/plan.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/attention/policy_factory.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/engine/batch_state.h"
#include "src/model/policy_model.h"
#include "src/model/weight_source.h"
#include "src/server/model_setup.h"
#include "src/server/planning_device.h"

namespace sluice {
namespace {

constexpr char kFull[] = "full";

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

// Lines about a device with memory of its own.
std::string DeviceLines(const PlanInput& in) {
  // For CUDA's own needs: the programs of steps, and what its libraries keep.
  constexpr int64_t kAside = int64_t{512} << 20;
  if (in.device.total_bytes == 0) return "";
  const int64_t beside = in.weight_bytes + in.workspace_bytes + in.batch_bytes;
  const int64_t most = in.device.free_bytes - kAside - beside;
  std::string out = absl::StrFormat("device      %s, %s free; ", Bytes(in.device.total_bytes),
                                    Bytes(in.device.free_bytes));
  if (most <= 0) {
    absl::StrAppend(&out, "too small: ", Bytes(beside),
                    " are needed beside the caches; lower --max-sequences, --max-context or "
                    "--chunk-tokens, or take a smaller model\n");
  } else if (in.hbm_bytes > most) {
    absl::StrAppendFormat(&out, "hbm_bytes of %s do not fit, %s would\n", Bytes(in.hbm_bytes),
                          Bytes(most));
  } else {
    absl::StrAppendFormat(&out, "hbm_bytes may be up to %s\n", Bytes(most));
  }
  return out;
}

// "latent 1.50 GiB, index 300.0 MiB": of a sequence with so many tokens of each kind.
std::string BytesByKind(const CacheLayout& layout, const TokensByKind& tokens) {
  std::string out;
  for (size_t kind = 0; kind < layout.kinds.size(); ++kind) {
    absl::StrAppend(&out, kind == 0 ? "" : ", ", layout.kinds[kind].name, " ",
                    Bytes(layout.PagesFor(kind, tokens[kind]) * layout.kinds[kind].page_bytes()));
  }
  return out;
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

// 512, 1024, ... and the longest.
std::vector<int64_t> Contexts(int64_t max_context) {
  std::vector<int64_t> out;
  for (int64_t context = 512; context < max_context; context *= 4) out.push_back(context);
  out.push_back(max_context);
  return out;
}

}  // namespace

int64_t SequencesThatFit(const CacheLayout& layout, int64_t bytes, const TokensByKind& context) {
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

namespace {

struct Made {
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<AttentionPolicy> policy;
};

// A policy as a node of these settings has it.
absl::StatusOr<Made> MakePolicy(PolicyOptions options, const PlanInput& in, double overcommit,
                                PlanningDevice* device) {
  const auto pool = [&](const char* name, const TierShape& shape, MemoryKind kind, int64_t bytes,
                        double promises) -> absl::StatusOr<std::unique_ptr<PagePool>> {
    SLUICE_ASSIGN_OR_RETURN(Buffer arena, device->Allocate(kind, static_cast<size_t>(bytes), name));
    return PagePool::Create(name, shape, std::move(arena), promises);
  };
  const TierShapes shapes = TierShapesOf(options, in.layout);
  Made made;
  SLUICE_ASSIGN_OR_RETURN(made.hbm,
                          pool("hbm", shapes.hbm, MemoryKind::kDevice, in.hbm_bytes, overcommit));
  SLUICE_ASSIGN_OR_RETURN(made.dram,
                          pool("dram", shapes.dram, MemoryKind::kPinned, in.dram_bytes, 1));
  options.device = device;
  options.hbm = made.hbm.get();
  options.dram = made.dram.get();
  SLUICE_ASSIGN_OR_RETURN(made.policy, NewPolicy(options));
  return made;
}

PlanInput::Policy PlanPolicy(const PolicyOptions& options, const PlanInput& in, double overcommit,
                             PlanningDevice* device) {
  PlanInput::Policy out;
  out.name = options.name;
  const int64_t hbm = device->asked(MemoryKind::kDevice), dram = device->asked(MemoryKind::kPinned);
  const absl::StatusOr<Made> made = MakePolicy(options, in, overcommit, device);
  out.status = made.status();
  if (!made.ok()) return out;
  out.beside_hbm_bytes = device->asked(MemoryKind::kDevice) - hbm - in.hbm_bytes;
  out.beside_pinned_bytes = device->asked(MemoryKind::kPinned) - dram - in.dram_bytes;
  for (const int64_t context : Contexts(in.max_context)) {
    const Footprint footprint = made->policy->FootprintOf(context, context);
    PlanInput::Policy::Headroom room;
    room.context = context;
    const PagePool &hbm_pool = *made->hbm, &dram_pool = *made->dram;
    room.hbm_bytes = hbm_pool.layout().BytesFor(footprint.hbm_tokens);
    room.dram_bytes = dram_pool.layout().BytesFor(footprint.dram_tokens);
    if (hbm_pool.layout().kinds.size() > 1)
      room.kinds = absl::StrCat("HBM: ", BytesByKind(hbm_pool.layout(), footprint.hbm_tokens),
                                "; DRAM: ", BytesByKind(dram_pool.layout(), footprint.dram_tokens));
    // What only a handed-over cache needs leaves DRAM before the next sequence comes in.
    const TokensByKind running = made->policy->FootprintOf(0, context).dram_tokens;
    room.running = std::min({hbm_pool.SequencesThatFit(footprint.hbm_tokens),
                             dram_pool.SequencesThatFit(running, footprint.dram_tokens - running),
                             in.max_sequences});
    out.rooms.push_back(room);
  }
  out.one = made->policy->DescribeSteps(1);
  out.all = made->policy->DescribeSteps(static_cast<int32_t>(in.max_sequences));
  return out;
}

std::string PolicyLines(const PlanInput::Policy& policy) {
  std::string out =
      absl::StrFormat("\npolicy %s: its home in DRAM, a part of it in HBM\n", policy.name);
  if (!policy.status.ok()) {
    absl::StrAppend(&out, "  none: ", std::string(policy.status.message()), "\n");
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
  if (!policy.rooms.empty() && !policy.rooms.back().kinds.empty()) {
    absl::StrAppendFormat(&out, "  of a sequence of %d tokens, %s\n", policy.rooms.back().context,
                          policy.rooms.back().kinds);
  }
  if (!policy.one.empty()) {
    absl::StrAppendFormat(&out,
                          "  beneath the fetching, by layer, until misses say otherwise: %s with "
                          "one sequence, %s with max_sequences\n",
                          policy.one, policy.all);
  }
  return out;
}

}  // namespace

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
  absl::StrAppend(&out, DeviceLines(in), "\n");

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
  for (const PlanInput::Policy& policy : in.policies) absl::StrAppend(&out, PolicyLines(policy));
  return out;
}

absl::StatusOr<PlanInput> PlanOf(const Config& config) {
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Device> real, NewDevice(config));
  const std::unique_ptr<PlanningDevice> device = NewPlanningDevice(real.get());
  const auto sequences = static_cast<int>(config.max_sequences());
  PlanInput in;
  in.device = real->Memory();
  in.max_rows = int64_t{config.max_sequences()} + config.chunk_tokens();
  SLUICE_ASSIGN_OR_RETURN(Model::Options model_options,
                          ModelOptionsOf(config, static_cast<int>(in.max_rows), sequences));
  model_options.weights = [](const ModelConfig& shape) { return WeightShapes(shape); };
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model,
                          Model::Load(model_options, device.get()));
  in.model = model->config();
  in.layout = model->cache_layout();
  in.hbm_bytes = static_cast<int64_t>(config.hbm_bytes());
  in.dram_bytes = static_cast<int64_t>(config.dram_bytes());
  in.max_context = model->max_context();
  in.max_sequences = sequences;
  in.weight_bytes = model->weight_bytes();
  in.workspace_bytes = model->workspace_bytes();

  in.policy = config.policy();
  const int64_t hbm = device->asked(MemoryKind::kDevice), dram = device->asked(MemoryKind::kPinned);
  SLUICE_ASSIGN_OR_RETURN(
      const std::unique_ptr<BatchState> batch,
      BatchState::Create({sequences, model->max_context()}, device.get(), *model));
  in.batch_bytes = device->asked(MemoryKind::kDevice) - hbm;
  in.pinned_bytes = device->asked(MemoryKind::kPinned) - dram;
  SLUICE_ASSIGN_OR_RETURN(PolicyOptions options,
                          PolicyOptionsOf(config, /*fingerprint=*/"", in.layout));
  DescribeModel(*model, &options);
  options.slots = sequences;
  options.hbm_bytes = in.hbm_bytes;
  options.dram_bytes = in.dram_bytes;
  std::vector<std::string> names = OffloadingPolicies(in.layout);
  names.insert(names.begin(), kFull);
  for (const std::string& name : names) {
    options.name = name;
    PlanInput::Policy policy = PlanPolicy(options, in, config.overcommit(), device.get());
    if (name == in.policy) {
      in.batch_bytes += policy.beside_hbm_bytes;
      in.pinned_bytes += policy.beside_pinned_bytes;
    }
    if (name != kFull) in.policies.push_back(std::move(policy));
  }
  return in;
}

absl::StatusOr<std::string> PrintPlan(const Config& config) {
  SLUICE_ASSIGN_OR_RETURN(const PlanInput in, PlanOf(config));
  return FormatPlan(in);
}

}  // namespace sluice
