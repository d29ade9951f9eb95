#include "src/server/plan.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/attention/latent/draft_window.h"
#include "src/attention/policy_factory.h"
#include "src/base/bisect.h"
#include "src/base/status_macros.h"
#include "src/device/cpu_topology.h"
#include "src/device/host_placement.h"
#include "src/device/kernel_set.h"
#include "src/device/planning_device.h"
#include "src/engine/batch_state.h"
#include "src/model/policy_forecast.h"
#include "src/model/policy_model.h"
#include "src/model/weight_source.h"
#include "src/server/auto_policy.h"
#include "src/server/expert_plan.h"
#include "src/server/model_setup.h"
#include "src/server/plan_text.h"
#include "src/server/ranks.h"
#include "src/server/speculation.h"

namespace sluice {
namespace {

constexpr char kFull[] = "full";

// A pool loses up to this much to the alignment of each kind.
constexpr int64_t kAlignment = 4096;

int64_t Usable(const CacheLayout& layout, int64_t bytes) {
  return std::max<int64_t>(bytes - kAlignment * static_cast<int64_t>(layout.kinds.size()), 0);
}

}  // namespace

int64_t SequencesThatFit(const CacheLayout& layout, int64_t bytes, const TokensByKind& context) {
  return Usable(layout, bytes) / std::max<int64_t>(layout.BytesFor(context), 1);
}

int64_t TokensThatFit(const CacheLayout& layout, int64_t bytes) {
  // A token takes at least a byte.
  const int64_t usable = Usable(layout, bytes);
  return LargestThat(0, usable, [&](int64_t tokens) { return layout.BytesFor(tokens) <= usable; });
}

namespace {

struct Made {
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<AttentionPolicy> policy;
};

// Makes a policy as a node with these settings makes it.
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
  for (const int64_t context : PlannedContexts(in.max_context)) {
    const Footprint footprint = made->policy->FootprintOf(context, context);
    PlanInput::Policy::Headroom room;
    room.context = context;
    const PagePool &hbm_pool = *made->hbm, &dram_pool = *made->dram;
    room.hbm_bytes = hbm_pool.layout().BytesFor(footprint.hbm_tokens);
    room.dram_bytes = dram_pool.layout().BytesFor(footprint.dram_tokens);
    if (hbm_pool.layout().kinds.size() > 1)
      room.kinds = absl::StrCat("HBM: ", BytesByKind(hbm_pool.layout(), footprint.hbm_tokens),
                                "; DRAM: ", BytesByKind(dram_pool.layout(), footprint.dram_tokens));
    // A cache that was handed over leaves DRAM, apart from `running`, before the next one comes in.
    const TokensByKind running = made->policy->FootprintOf(0, context).dram_tokens;
    room.running = std::min({hbm_pool.SequencesThatFit(footprint.hbm_tokens),
                             dram_pool.SequencesThatFit(running, footprint.dram_tokens - running),
                             in.max_sequences});
    out.rooms.push_back(room);
  }
  out.exact_tokens = made->policy->exact_tokens();
  const auto context = static_cast<double>(in.max_context);
  out.step_bytes = BytesOfStep({in.model, in.layout, in.weight_bytes}, *made->policy,
                               ExpectedStatistics(options, in.layout, context),
                               static_cast<int>(out.rooms.back().running), context);
  out.workers = static_cast<int>(made->policy->Workers().workers);
  if (const int mover = made->policy->Link().mover; mover >= 0) {
    out.mover = options.ess.mover == PolicyOptions::Mover::kAuto
                    ? "auto, measured when the node starts"
                    : LinkStatistics::kNames[static_cast<size_t>(mover)];
  }
  out.one = made->policy->DescribeSteps(1);
  out.all = made->policy->DescribeSteps(static_cast<int32_t>(in.max_sequences));
  return out;
}

// Returns the parts of a plan that the model and the settings give.
PlanInput InputOf(const Config& config, const Model& model) {
  PlanInput in;
  in.model = model.config();
  in.layout = model.cache_layout();
  in.max_context = model.max_context();
  in.max_sequences = config.max_sequences();
  in.draft_tokens = DraftTokensOf(config);
  in.drafts_on_device = in.draft_tokens > 0 && model.drafts();
  in.weight_bytes = model.weight_bytes();
  in.workspace_bytes = model.workspace_bytes();
  in.policy = config.policy();
  return in;
}

// Returns where pinned memory lies on the host, and which cpus `workers` workers take.
std::string PlacementOf(const Device& device, int workers) {
  const HostPlacement placement = device.Placement();
  std::string out = absl::StrCat("pinned memory: ", DescribePlacement(placement));
  if (workers == 0) return out;
  std::vector<int> cpus = PlaceWorkers(UsableCpus(), device.HostThreads(), workers, placement.node);
  std::sort(cpus.begin(), cpus.end());
  return absl::StrCat(out, "; ", workers, " policy workers: ",
                      cpus.empty() ? "not pinned, there are too few cpus"
                                   : absl::StrCat("cpus ", FormatCpuList(cpus)));
}

// Returns the bytes of the draft layer's caches.
int64_t DraftCacheBytes(const PlanInput& in) {
  DraftWindow::Options window;
  window.layout = &in.layout;
  window.slots = static_cast<int>(in.max_sequences);
  window.max_context = in.max_context;
  return in.drafts_on_device ? DraftWindow::CacheBytes(window) : 0;
}

// Adds the memory of the running batch.
absl::Status AddBatch(const Model& model, PlanningDevice* device, PlanInput* in) {
  const int64_t hbm = device->asked(MemoryKind::kDevice), dram = device->asked(MemoryKind::kPinned);
  SLUICE_RETURN_IF_ERROR(
      BatchState::Create({static_cast<int>(in->max_sequences), static_cast<int>(in->max_context),
                          static_cast<int>(in->draft_tokens), in->drafts_on_device},
                         device, model)
          .status());
  in->batch_bytes = device->asked(MemoryKind::kDevice) - hbm;
  in->draft_cache_bytes = DraftCacheBytes(*in);
  in->pinned_bytes = device->asked(MemoryKind::kPinned) - dram;
  return absl::OkStatus();
}

// Returns the options of the configured policy over pools of the planned sizes.
absl::StatusOr<PolicyOptions> OptionsOf(const Config& config, const Model& model,
                                        const PlanInput& in) {
  SLUICE_ASSIGN_OR_RETURN(PolicyOptions options,
                          PolicyOptionsOf(config, /*fingerprint=*/"", in.layout, &model));
  options.slots = static_cast<int>(in.max_sequences);
  options.hbm_bytes = in.hbm_bytes;
  options.dram_bytes = in.dram_bytes;
  DecideByProfile(in.layout, &options);
  return options;
}

// Returns the policies beside full that a node of such a model can be given: benches have more.
std::vector<std::string> ServedPolicies(const CacheLayout& layout) {
  const auto& served = FindSetting("policy")->options().choices();
  std::vector<std::string> names = OffloadingPolicies(layout);
  std::erase_if(names, [&](const std::string& name) {
    return std::find(served.begin(), served.end(), name) == served.end();
  });
  return names;
}

}  // namespace

absl::StatusOr<DecodeCacheSizes> ChooseDecodeSizes(const Config& config, const Model& model,
                                                   const MemoryFound& found, Device* device) {
  DecodeCacheSizes sizes;
  sizes.dram = DecodeDramSize(config.dram_bytes(), found);
  sizes.hbm = DecodeHbmSize(config.hbm_bytes(), found, /*beside_bytes=*/0);
  if (!found.gpu) return sizes;
  // The policy's tables grow with the pools, so what it takes beside them is found for the largest.
  const std::unique_ptr<PlanningDevice> planning = NewPlanningDevice(device);
  PlanInput in = InputOf(config, model);
  in.hbm_bytes = static_cast<int64_t>(sizes.hbm.bytes);
  in.dram_bytes = static_cast<int64_t>(sizes.dram.bytes);
  SLUICE_RETURN_IF_ERROR(AddBatch(model, planning.get(), &in));
  SLUICE_ASSIGN_OR_RETURN(PolicyOptions options, OptionsOf(config, model, in));
  // A policy that cannot be made is refused with its reason when the node makes it.
  const PlanInput::Policy policy = PlanPolicy(options, in, config.overcommit(), planning.get());
  sizes.beside_bytes = in.batch_bytes + policy.beside_hbm_bytes;
  sizes.hbm = DecodeHbmSize(config.hbm_bytes(), found, sizes.beside_bytes);
  return sizes;
}

absl::StatusOr<PlanInput::Policy> PlanConfiguredPolicy(const Config& config, const Model& model,
                                                       const MemoryFound& found, Device* device) {
  SLUICE_ASSIGN_OR_RETURN(const DecodeCacheSizes sizes,
                          ChooseDecodeSizes(config, model, found, device));
  PlanInput in = InputOf(config, model);
  in.hbm_bytes = static_cast<int64_t>(sizes.hbm.bytes);
  in.dram_bytes = static_cast<int64_t>(sizes.dram.bytes);
  SLUICE_ASSIGN_OR_RETURN(const PolicyOptions options, OptionsOf(config, model, in));
  const std::unique_ptr<PlanningDevice> planning = NewPlanningDevice(device);
  return PlanPolicy(options, in, config.overcommit(), planning.get());
}

absl::StatusOr<PlanInput> PlanOf(const Config& given) {
  SLUICE_RETURN_IF_ERROR(CheckSpeculation(given));
  Config config = given;
  SLUICE_RETURN_IF_ERROR(ResolveSpeculation(&config));
  std::string why;
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Device> real, NewDevice(config, &why));
  const std::unique_ptr<PlanningDevice> device = NewPlanningDevice(real.get());
  const StepRows step = StepRowsOf(config);
  SLUICE_ASSIGN_OR_RETURN(Model::Options model_options,
                          ModelOptionsOf(config, step.rows, step.logits));
  model_options.weights = [](const ModelConfig& shape) { return WeightShapes(shape); };
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model,
                          Model::Load(model_options, device.get()));
  SLUICE_ASSIGN_OR_RETURN(MemoryFound found, FindMemory(config, *real));
  if (found.gpu) found.gpu_free_bytes -= model->weight_bytes() + model->workspace_bytes();
  std::string auto_text;
  if (config.policy() == kAutoPolicy) {
    SLUICE_ASSIGN_OR_RETURN(ResolvedPolicy resolved,
                            ResolvePolicy(config, *model, found, real.get()));
    config = std::move(resolved.config);
    auto_text = std::move(resolved.text);
  }
  SettleSpeculation(*model, &config);
  PlanInput in = InputOf(config, *model);
  in.auto_text = std::move(auto_text);
  in.max_rows = step.rows;
  in.device = real->Memory();
  in.device_name = real->name();
  in.activation_type = real->kernels().activation_type();
  in.device_why = why;
  in.host = found.host;
  SLUICE_ASSIGN_OR_RETURN(const DecodeCacheSizes sizes,
                          ChooseDecodeSizes(config, *model, found, real.get()));
  in.hbm_bytes = static_cast<int64_t>(sizes.hbm.bytes);
  in.dram_bytes = static_cast<int64_t>(sizes.dram.bytes);
  in.hbm_why = sizes.hbm.why;
  in.dram_why = sizes.dram.why;

  SLUICE_RETURN_IF_ERROR(AddBatch(*model, device.get(), &in));
  SLUICE_ASSIGN_OR_RETURN(PolicyOptions options, OptionsOf(config, *model, in));
  std::vector<std::string> names = ServedPolicies(in.layout);
  names.insert(names.begin(), kFull);
  for (const std::string& name : names) {
    options.name = name;
    PlanInput::Policy policy = PlanPolicy(options, in, config.overcommit(), device.get());
    if (name == in.policy) {
      in.batch_bytes += policy.beside_hbm_bytes;
      in.pinned_bytes += policy.beside_pinned_bytes;
      in.placement = PlacementOf(*real, policy.workers);
    }
    if (name != kFull) in.policies.push_back(std::move(policy));
  }
  return in;
}

absl::StatusOr<std::string> CheckedPolicy(const Config& config) {
  if (config.policy() != kAutoPolicy) return "";
  SLUICE_ASSIGN_OR_RETURN(const PlanInput in, PlanOf(config));
  return in.auto_text;
}

namespace {

// Returns where each rank takes KV caches, if all have the setting that this one has; nothing where
// ranks share memory.
absl::StatusOr<std::string> RankIngestText(Config config) {
  if (!MeetByGrpc(config)) return "";
  std::string out =
      absl::StrFormat("ingest      rank 0 takes KV caches at %s%s\n", config.listen(),
                      config.rank_ingest_listen().empty()
                          ? ", and sends on what is for other ranks (no rank_ingest_listen)"
                          : "");
  if (config.rank_ingest_listen().empty()) return out;
  for (int rank = 1; rank < RanksOf(config); ++rank) {
    config.set_rank(static_cast<uint32_t>(rank));
    SLUICE_ASSIGN_OR_RETURN(const std::string listen,
                            AddressOfRank(config, config.rank_ingest_listen()));
    absl::StrAppendFormat(&out, "            rank %d takes its own at %s\n", rank, listen);
  }
  return out;
}

}  // namespace

absl::StatusOr<std::string> PrintPlan(const Config& given) {
  Config config = given;
  SLUICE_RETURN_IF_ERROR(ApplyWorkerSet(&config));
  SLUICE_RETURN_IF_ERROR(CheckRanks(&config));
  SLUICE_ASSIGN_OR_RETURN(const std::string ingest, RankIngestText(config));
  if (DividesExperts(config)) {
    config.set_rank(0);
    SLUICE_ASSIGN_OR_RETURN(const PlanInput in, PlanOf(config));
    SLUICE_ASSIGN_OR_RETURN(const std::string ranks, ExpertRanksText(config, in));
    SLUICE_ASSIGN_OR_RETURN(const std::string gpus, ExpertGpusText(config));
    return absl::StrCat(ranks, ingest, FormatPlan(in), gpus);
  }
  std::string text;
  for (int rank = 0; rank < RanksOf(config); ++rank) {
    config.set_rank(static_cast<uint32_t>(rank));
    SLUICE_ASSIGN_OR_RETURN(const PlanInput in, PlanOf(config));
    if (RanksOf(config) > 1) {
      SLUICE_ASSIGN_OR_RETURN(const ModelConfig model, LoadModelConfig(config.model()));
      SLUICE_ASSIGN_OR_RETURN(const std::string part,
                              RankText(model, rank, RanksOf(config), config.max_sequences()));
      absl::StrAppend(&text, rank > 0 ? "\n" : "", part, rank == 0 ? ingest : "");
    }
    absl::StrAppend(&text, FormatPlan(in));
  }
  return text;
}

}  // namespace sluice
