#include "src/device/cuda/cuda_mailbox.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/device/cuda/cuda_stream.h"

namespace sluice {
namespace {

// CUDA has had both functions in this form since 11.7. They are looked up in the running driver, so
// that nothing links against libcuda.
struct StreamMemoryOps {
  PFN_cuStreamWriteValue32_v11070 write = nullptr;
  PFN_cuStreamWaitValue32_v11070 wait = nullptr;
};

template <typename Function>
absl::Status Find(const char* name, Function* function) {
  constexpr unsigned kVersion = 11070;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    return absl::FailedPreconditionError(
        absl::StrCat("a mailbox needs ", name, " of the CUDA driver, which lacks it"));
  }
  *function = reinterpret_cast<Function>(found);
  return absl::OkStatus();
}

absl::StatusOr<StreamMemoryOps> FindStreamMemoryOps() {
  StreamMemoryOps ops;
  SLUICE_RETURN_IF_ERROR(Find("cuStreamWriteValue32", &ops.write));
  SLUICE_RETURN_IF_ERROR(Find("cuStreamWaitValue32", &ops.wait));
  return ops;
}

class CudaMailbox : public Mailbox {
 public:
  CudaMailbox(Buffer pinned, const MailboxOptions& options, const StreamMemoryOps& ops)
      : Mailbox(std::move(pinned), options), ops_(ops) {}

  void Raise(Stream& stream, int channel) override {
    auto& s = static_cast<CudaStream&>(stream);
    if (!s.usable()) return;
    // The write comes behind a system-wide fence: whatever the stream did before is visible before
    // the word is.
    s.Check(
        ToRuntime(ops_.write(s.handle(), Address(channel), kAsked, CU_STREAM_WRITE_VALUE_DEFAULT)),
        "a mailbox's request");
  }

  void Await(Stream& stream, int channel) override {
    auto& s = static_cast<CudaStream&>(stream);
    if (!s.usable()) return;
    s.Check(ToRuntime(ops_.wait(s.handle(), Address(channel), kAnswered, CU_STREAM_WAIT_VALUE_EQ)),
            "a mailbox's answer");
  }

 private:
  CUdeviceptr Address(int channel) const { return reinterpret_cast<CUdeviceptr>(word(channel)); }
  // The two interfaces number their errors alike.
  static cudaError_t ToRuntime(CUresult result) { return static_cast<cudaError_t>(result); }

  const StreamMemoryOps ops_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Mailbox>> NewCudaMailbox(Buffer pinned,
                                                        const MailboxOptions& options) {
  SLUICE_ASSIGN_OR_RETURN(const StreamMemoryOps ops, FindStreamMemoryOps());
  return std::make_unique<CudaMailbox>(std::move(pinned), options, ops);
}

}  // namespace sluice
