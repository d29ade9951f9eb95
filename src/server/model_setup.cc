#include "src/server/model_setup.h"

#include <algorithm>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/kernel_table.h"
#include "src/attention/policies/fluxion/predictor.h"
#include "src/attention/policy_factory.h"
#include "src/attention/policy_profile.h"
#include "src/base/logging.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/base/timing.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/machine_memory.h"
#include "src/device/mailbox.h"
#include "src/model/policy_model.h"
#include "src/server/own_profile.h"
#include "src/server/ranks.h"
#include "src/server/speculation.h"
#include "src/service/wire/status_mapping.h"
#ifdef SLUICE_HAVE_CUDA
#include "src/device/cuda/cuda_device.h"
#include "src/device/cuda/read_probe.h"
#endif

namespace sluice {
namespace {

kernels::GroupReduction ReductionOf(const std::string& name) {
  if (name == "mean") return kernels::GroupReduction::kMean;
  if (name == "softmax-sum") return kernels::GroupReduction::kSoftmaxSum;
  return kernels::GroupReduction::kMax;
}

PolicyOptions::Ess::Overlap OverlapOf(const std::string& name) {
  using Overlap = PolicyOptions::Ess::Overlap;
  return name == "none"  ? Overlap::kNone
         : name == "da"  ? Overlap::kDa
         : name == "dba" ? Overlap::kDba
                         : Overlap::kLayerWise;
}

PolicyOptions::Mover MoverOf(const std::string& name) {
  using Mover = PolicyOptions::Mover;
  if (name == "cpu") return Mover::kCpu;
  return name == "auto" ? Mover::kAuto : Mover::kUva;
}

// Returns OK if device auto takes the GPU, else the reason why it takes the CPU.
absl::Status CheckGpu(const Config& config) {
  if (config.kernels() != "auto") {
    return absl::FailedPreconditionError(
        absl::StrCat("kernels ", config.kernels(), " compute on the CPU"));
  }
#ifdef SLUICE_HAVE_CUDA
  return CheckCudaDevice();
#else
  return absl::FailedPreconditionError("this build has no CUDA");
#endif
}

PolicyOptions::RecomputeLast RecomputeLastOf(const std::string& name) {
  using RecomputeLast = PolicyOptions::RecomputeLast;
  if (name == "on") return RecomputeLast::kOn;
  return name == "off" ? RecomputeLast::kOff : RecomputeLast::kAuto;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> NewDevice(const Config& config, std::string* why) {
  std::string reason = "as configured";
  bool cuda = config.device() == "cuda";
  if (config.device() == "auto") {
    const absl::Status gpu = CheckGpu(config);
    cuda = gpu.ok();
    reason = cuda ? "auto: there is a usable GPU"
                  : absl::StrCat("auto: ", absl::StripPrefix(gpu.message(), "device: cuda: "));
  }
  if (why != nullptr) *why = reason;
  if (cuda) {
    if (config.kernels() != "auto") {
      return absl::InvalidArgumentError(absl::StrCat(
          "kernels: a GPU has its own kernels: expected auto with --device cuda, found ",
          config.kernels()));
    }
#ifdef SLUICE_HAVE_CUDA
    return NewCudaDevice();
#else
    return absl::FailedPreconditionError(
        "device: cuda: this build has no CUDA: configure one with -DSLUICE_CUDA=ON where nvcc is, "
        "or run with --device cpu");
#endif
  }
  CpuDeviceOptions options;
  options.kernels = config.kernels();
  options.threads = static_cast<int>(config.threads());
  return NewCpuDevice(options);
}

absl::StatusOr<MemoryFound> FindMemory(const Config& config, const Device& device) {
  MemoryFound found;
  const Device::DeviceMemory memory = device.Memory();
  found.gpu = memory.total_bytes > 0;
  found.gpu_free_bytes = memory.free_bytes;
  SLUICE_ASSIGN_OR_RETURN(found.host, ReadMachineMemory());
  DivideMemory(config, &found);
  return found;
}

absl::StatusOr<DeviceRates> MeasureNodeRates(const Config& config, Device* device) {
  // Sizes are some times those of the caches: 50 MB of L2 on a GPU, and tens of MB a processor.
  constexpr size_t kGpuWindow = size_t{256} << 20, kHostBytes = size_t{256} << 20;
  const bool gpu = device->Memory().total_bytes > 0;
  RateOptions options;
  options.workers = WorkersOf(config);
  options.dram_bytes = kHostBytes;
  options.link_bytes = size_t{64} << 20;
  options.device_bytes = gpu ? 8 * kGpuWindow : kHostBytes;
  options.read_device = [&](size_t bytes) -> absl::StatusOr<double> {
#ifdef SLUICE_HAVE_CUDA
    if (gpu) {
      SLUICE_ASSIGN_OR_RETURN(
          const Buffer window,
          device->Allocate(MemoryKind::kDevice, kGpuWindow, "a probe of the device's memory"));
      const double rate = CudaReadRate(window.data(), kGpuWindow, bytes);
      if (rate <= 0) return absl::InternalError("the probe of the device's memory did not run");
      return rate;
    }
#endif
    const HugeBuffer buffer(bytes);
    Crew crew(ThreadsOf(config));
    return static_cast<double>(bytes) / MeasureRead(crew, buffer, bytes, 0.1).median;
  };
  return MeasureDeviceRates(*device, options);
}

absl::StatusOr<Model::Options> ModelOptionsOf(const Config& config, int max_rows, int max_logits) {
  Model::Options options;
  options.directory = config.model();
  options.load_format = config.load_format();
  SLUICE_ASSIGN_OR_RETURN(const ModelConfig shape, LoadModelConfig(config.model()));
  options.kv_dtype = KvDType(config, shape);
  options.block_tokens = static_cast<int>(config.block_tokens());
  options.max_context = static_cast<int>(config.max_context());
  options.max_rows = max_rows;
  options.max_logits = max_logits;
  options.sequence_rows = 1 + DraftTokensOf(config);
  options.look_ahead = config.policy() != "full";
  options.draft_layer = DraftLayerOf(config);
  options.tensor_parallel = std::max(1, static_cast<int>(config.tensor_parallel()));
  options.expert_parallel = std::max(1, static_cast<int>(config.expert_parallel()));
  options.halves = options.expert_parallel > 1 && config.expert_overlap() > 0;
  options.fp8_dispatch = config.expert_dispatch() == "fp8";
  options.expert_redundancy = static_cast<int>(config.expert_redundancy());
  options.count_expert_load = !config.expert_load_out().empty();
  SLUICE_ASSIGN_OR_RETURN(options.expert_load, ReadExpertLoad(config.expert_load(), shape));
  options.rank = static_cast<int>(config.rank());
  return options;
}

std::string ExpertLoadPath(const Config& config) {
  return absl::StrCat(config.expert_load_out(), ".", config.rank());
}

absl::StatusOr<std::unique_ptr<Model>> LoadModel(const Config& config, int max_rows, int max_logits,
                                                 Device* device, RankGroup* ranks) {
  SLUICE_ASSIGN_OR_RETURN(Model::Options options, ModelOptionsOf(config, max_rows, max_logits));
  options.ranks = ranks;
  if (options.count_expert_load) {
    SLUICE_RETURN_IF_ERROR(CheckExpertLoadPath(ExpertLoadPath(config)));
  }
  return Model::Load(options, device);
}

absl::StatusOr<PolicyOptions> PolicyOptionsOf(const Config& config, const std::string& fingerprint,
                                              const CacheLayout& layout, const Model* model) {
  PolicyOptions o;
  if (model != nullptr) DescribeModel(*model, &o);
  o.name = config.policy();
  o.rows_per_sequence = 1 + DraftTokensOf(config);
  o.budget_tokens = static_cast<int>(config.budget_tokens());
  o.recompute_last = RecomputeLastOf(config.recompute_last());
  o.dense_layers = static_cast<int>(config.dense_layers());
  o.reduction = ReductionOf(config.score_reduction());
  if (config.policy_workers() > Mailbox::kMaxWorkers) {
    return absl::InvalidArgumentError(absl::StrCat("policy_workers: expected at most ",
                                                   Mailbox::kMaxWorkers, ", found ",
                                                   config.policy_workers()));
  }
  o.workers = WorkersOf(config);
  // The workers compute with the configured kernels; null, for auto and on a GPU, means the best.
  o.host_kernels = kernels::FindKernelTable(config.kernels().c_str());
  o.worker_deadline = absl::Seconds(config.policy_worker_deadline_seconds());
  o.scout.key_codes = config.scout_selection() != "digests";
  o.scout.share_limit = static_cast<float>(config.scout_share_limit());
  o.recall.margin = static_cast<float>(config.recall_margin());
  o.hgca.window_tokens = static_cast<int>(config.hgca_window_tokens());
  o.hgca.beta = static_cast<float>(config.hgca_beta());
  o.hgca.alpha = static_cast<float>(config.hgca_alpha());
  o.clo.persistent_share = config.clo_persistent_share();
  o.clo.similarity = static_cast<float>(config.clo_similarity());
  o.clo.budget_divisor = static_cast<int>(config.clo_budget_divisor());
  o.ess.sparse_memory_ratio = config.ess_sparse_memory_ratio();
  o.ess.least_places = static_cast<int>(config.ess_least_places());
  o.ess.divide_places = config.ess_divide_places() == "on";
  o.ess.divide_by_profile = config.ess_divide_places() == "auto";
  o.ess.warm_up = config.ess_warm_up();
  o.ess.overlap = OverlapOf(config.ess_overlap());
  o.ess.prefetch_by_profile = config.ess_prefetch() == kAutoCount;
  if (!o.ess.prefetch_by_profile) o.ess.prefetch = static_cast<int>(config.ess_prefetch());
  o.ess.transfer_workers = static_cast<int>(config.ess_transfer_workers());
  o.ess.mover = MoverOf(config.ess_mover());
  if (config.fluxion_placement() == "pull") {
    o.fluxion.placement = PolicyOptions::Fluxion::Placement::kPull;
    // The arbiter has a thread, which needs a core like a worker.
    if (config.policy_workers() == 0) o.workers = std::max(o.workers - 1, 1);
  }
  if (!config.fluxion_predictor().empty()) {
    auto predictor = LoadFluxionPredictor(config.fluxion_predictor(), fingerprint);
    if (!predictor.ok()) return WithMessagePrefix(predictor.status(), "fluxion_predictor");
    o.fluxion.predictor = *std::move(predictor);
  }
  if (config.policy_profile().empty()) return o;
  absl::StatusOr<PolicyProfile> read = ReadPolicyProfile(config.policy_profile());
  if (!read.ok()) return WithMessagePrefix(read.status(), "policy_profile");
  const PolicyProfile profile = *std::move(read);
  SLUICE_RETURN_IF_ERROR(ApplyPolicyProfile(
      profile, fingerprint.empty() ? profile.model_fingerprint : fingerprint, layout, &o));
  return o;
}

namespace {

// Leaves out what a policy does beside placing sequences.
void PlaceAlone(PolicyOptions& options) {
  options.ess.mover = PolicyOptions::Mover::kUva;  // nothing moves, so none is measured
  options.ess.on_misses = nullptr;
}

// Makes the pools, with DRAM from `dram_arena`, and a policy of options that `settle` has seen.
absl::StatusOr<NodeMemory> MakeMemory(const Config& config, const Model& model, Device* device,
                                      absl::FunctionRef<absl::StatusOr<Buffer>()> dram_arena,
                                      absl::FunctionRef<void(PolicyOptions&)> settle) {
  NodeMemory memory;
  SLUICE_ASSIGN_OR_RETURN(PolicyOptions policy, PolicyOptionsOf(config, model.fingerprint(),
                                                                model.cache_layout(), &model));
  UseOwnProfile(config, model.fingerprint(), model.cache_layout(), &policy);
  policy.slots = static_cast<int>(config.max_sequences());
  policy.hbm_bytes = static_cast<int64_t>(config.hbm_bytes());
  policy.dram_bytes = static_cast<int64_t>(config.dram_bytes());
  DecideByProfile(model.cache_layout(), &policy);
  settle(policy);
  const TierShapes shapes = TierShapesOf(policy, model.cache_layout());
  SLUICE_ASSIGN_OR_RETURN(Buffer hbm,
                          device->Allocate(MemoryKind::kDevice, config.hbm_bytes(), "hbm_bytes"));
  SLUICE_ASSIGN_OR_RETURN(memory.hbm,
                          PagePool::Create("hbm", shapes.hbm, std::move(hbm), config.overcommit()));
  SLUICE_ASSIGN_OR_RETURN(Buffer dram, dram_arena());
  SLUICE_ASSIGN_OR_RETURN(memory.dram, PagePool::Create("dram", shapes.dram, std::move(dram)));
  policy.device = device;
  policy.hbm = memory.hbm.get();
  policy.dram = memory.dram.get();
  SLUICE_ASSIGN_OR_RETURN(memory.policy, NewPolicy(policy));
  return memory;
}

}  // namespace

absl::StatusOr<NodeMemory> NewNodeMemory(const Config& config, const Model& model, Device* device,
                                         const SharedArenas* arenas) {
  const auto dram = [&] {
    return arenas != nullptr
               ? device->Pin(arenas->own(), arenas->bytes(), "dram_bytes")
               : device->Allocate(MemoryKind::kPinned, config.dram_bytes(), "dram_bytes");
  };
  return MakeMemory(config, model, device, dram, [](PolicyOptions&) {});
}

absl::StatusOr<NodeMemory> NewMemoryOfRank(const Config& config, const Model& model,
                                           Device* planning, const SharedArenas* arenas, int rank) {
  const auto dram = [&] {
    return arenas != nullptr
               ? planning->Pin(arenas->Of(rank), arenas->bytes(), "dram_bytes")
               : planning->Allocate(MemoryKind::kPinned, config.dram_bytes(), "dram_bytes");
  };
  SLUICE_ASSIGN_OR_RETURN(NodeMemory memory, MakeMemory(config, model, planning, dram, PlaceAlone));
  memory.dram->SetRank(rank);
  return memory;
}

absl::StatusOr<std::optional<TokenBytes>> LoadTokenBytes(const Config& config) {
  absl::StatusOr<TokenBytes> loaded =
      TokenBytes::Load(absl::StrCat(config.model(), "/tokenizer.json"));
  if (loaded.ok()) return std::optional<TokenBytes>(*std::move(loaded));
  if (absl::IsNotFound(loaded.status())) return std::optional<TokenBytes>();
  if (absl::IsUnimplemented(loaded.status())) {
    Log(LogLevel::kWarn, "stop strings will be refused: the tokenizer is of an unknown kind",
        {{"error", std::string(loaded.status().message())}});
    return std::optional<TokenBytes>();
  }
  return loaded.status();
}

DType KvDType(const Config& config, const ModelConfig& model) {
  const std::string& name = config.kv_dtype();
  if (name == "float32") return DType::kFloat32;
  if (name == "bf16") return DType::kBFloat16;
  if (name == "fp8") return DType::kFloat8E4M3;
  return CacheLayoutOf(model, DType::kFloat8E4M3, 1).ok() ? DType::kFloat8E4M3 : DType::kBFloat16;
}

uint64_t SeedOf(const Config& config) { return config.seed() != 0 ? config.seed() : RandomU64(); }

int ThreadsOf(const Config& config) {
  return config.threads() != 0 ? static_cast<int>(config.threads()) : DefaultThreads();
}

int WorkersOf(const Config& config) {
  if (config.policy_workers() != 0) return static_cast<int>(config.policy_workers());
  return std::min(ThreadsOf(config), Mailbox::kMaxWorkers);
}

std::string Version() { return SLUICE_VERSION; }

}  // namespace sluice
