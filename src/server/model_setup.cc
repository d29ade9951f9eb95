#include "src/server/model_setup.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/base/logging.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/cpu_device.h"
#ifdef SLUICE_HAVE_CUDA
#include "src/device/cuda/cuda_device.h"
#endif

namespace sluice {

absl::StatusOr<std::unique_ptr<Device>> NewDevice(const Config& config) {
  if (config.device() == "cuda") {
    if (config.kernels() != "auto") {
      return absl::InvalidArgumentError(
          absl::StrCat("kernels: chooses among the CPU's: expected auto with --device cuda, found ",
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

absl::StatusOr<std::unique_ptr<Model>> LoadModel(const Config& config, int max_rows, int max_logits,
                                                 Device* device) {
  Model::Options options;
  options.directory = config.model();
  options.load_format = config.load_format();
  options.kv_dtype = KvDType(config);
  options.block_tokens = static_cast<int>(config.block_tokens());
  options.max_context = static_cast<int>(config.max_context());
  options.max_rows = max_rows;
  options.max_logits = max_logits;
  return Model::Load(options, device);
}

absl::StatusOr<NodeMemory> NewNodeMemory(const Config& config, const Model& model, Device* device) {
  NodeMemory memory;
  SLUICE_ASSIGN_OR_RETURN(Buffer hbm,
                          device->Allocate(MemoryKind::kDevice, config.hbm_bytes(), "hbm_bytes"));
  SLUICE_ASSIGN_OR_RETURN(memory.hbm, PagePool::Create("hbm", model.cache_layout(), std::move(hbm),
                                                       config.overcommit()));
  SLUICE_ASSIGN_OR_RETURN(Buffer dram,
                          device->Allocate(MemoryKind::kPinned, config.dram_bytes(), "dram_bytes"));
  SLUICE_ASSIGN_OR_RETURN(memory.dram,
                          PagePool::Create("dram", model.cache_layout(), std::move(dram)));
  FullPolicyOptions policy;
  policy.device = device;
  policy.hbm = memory.hbm.get();
  policy.slots = static_cast<int>(config.max_sequences());
  policy.max_context = model.max_context();
  policy.dram = memory.dram.get();
  SLUICE_ASSIGN_OR_RETURN(memory.policy, NewFullPolicy(policy));
  return memory;
}

absl::StatusOr<std::optional<TokenBytes>> LoadTokenBytes(const Config& config) {
  absl::StatusOr<TokenBytes> loaded =
      TokenBytes::Load(absl::StrCat(config.model(), "/tokenizer.json"));
  if (loaded.ok()) return std::optional<TokenBytes>(*std::move(loaded));
  if (absl::IsNotFound(loaded.status())) return std::optional<TokenBytes>();
  if (absl::IsUnimplemented(loaded.status())) {
    Log(LogLevel::kWarn, "stop strings are refused: the tokenizer is of an unknown kind",
        {{"error", std::string(loaded.status().message())}});
    return std::optional<TokenBytes>();
  }
  return loaded.status();
}

DType KvDType(const Config& config) {
  return config.kv_dtype() == "float32" ? DType::kFloat32 : DType::kBFloat16;
}

uint64_t SeedOf(const Config& config) { return config.seed() != 0 ? config.seed() : RandomU64(); }

int ThreadsOf(const Config& config) {
  return config.threads() != 0 ? static_cast<int>(config.threads()) : DefaultThreads();
}

std::string Version() { return SLUICE_VERSION; }

}  // namespace sluice
