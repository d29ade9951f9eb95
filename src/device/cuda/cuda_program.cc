#include "src/device/cuda/cuda_program.h"

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

class CudaProgram : public Program {
 public:
  explicit CudaProgram(cudaGraphExec_t graph) : graph_(graph) {}
  ~CudaProgram() override { cudaGraphExecDestroy(graph_); }
  CudaProgram(const CudaProgram&) = delete;
  CudaProgram& operator=(const CudaProgram&) = delete;

  void Run(Stream& stream) override {
    auto& cuda = static_cast<CudaStream&>(stream);
    if (cuda.usable()) cuda.Check(cudaGraphLaunch(graph_, cuda.handle()), "a program");
  }

 private:
  const cudaGraphExec_t graph_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Program>> RecordCudaProgram(
    CudaStream& stream, const std::function<void(Stream&)>& enqueue) {
  SLUICE_ASSIGN_OR_RETURN(cudaGraph_t graph, stream.Capture(enqueue));
  cudaGraphExec_t exec = nullptr;
  // Kernels of branches go before those of the stream, as their streams' priorities say.
  cudaError_t error = cudaGraphInstantiate(&exec, graph, cudaGraphInstantiateFlagUseNodePriority);
  cudaGraphDestroy(graph);
  if (error == cudaSuccess) error = cudaGraphUpload(exec, stream.handle());
  if (error != cudaSuccess) {
    if (exec != nullptr) cudaGraphExecDestroy(exec);
    cudaGetLastError();  // clears the error, which is returned below
    return absl::InternalError(
        absl::StrCat("a program could not be instantiated: ", cudaGetErrorString(error)));
  }
  return std::make_unique<CudaProgram>(exec);
}

}  // namespace sluice
