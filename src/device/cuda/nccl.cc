#include "src/device/cuda/nccl.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

absl::Status Load(Nccl* nccl) {
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "several ranks on GPUs, and kv_transport nccl, need libnccl.so.2: install NCCL "
        "(the package nvidia-nccl), or put it on LD_LIBRARY_PATH: ",
        dlerror()));
  }
  const bool complete = Find(library, "ncclGetUniqueId", &nccl->get_unique_id) &&
                        Find(library, "ncclCommInitRankConfig", &nccl->init) &&
                        Find(library, "ncclCommGetAsyncError", &nccl->async_error) &&
                        Find(library, "ncclCommAbort", &nccl->abort) &&
                        Find(library, "ncclCommRegister", &nccl->register_buffer) &&
                        Find(library, "ncclCommDeregister", &nccl->deregister_buffer) &&
                        Find(library, "ncclAllReduce", &nccl->all_reduce) &&
                        Find(library, "ncclAllGather", &nccl->all_gather) &&
                        Find(library, "ncclReduceScatter", &nccl->reduce_scatter) &&
                        Find(library, "ncclBroadcast", &nccl->broadcast) &&
                        Find(library, "ncclSend", &nccl->send) &&
                        Find(library, "ncclRecv", &nccl->receive) &&
                        Find(library, "ncclGroupStart", &nccl->group_start) &&
                        Find(library, "ncclGroupEnd", &nccl->group_end) &&
                        Find(library, "ncclGetErrorString", &nccl->error_string);
  if (complete) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("libnccl.so.2 is too old (2.19 and later serve): ", dlerror()));
}

}  // namespace

absl::StatusOr<const Nccl*> LoadNccl() {
  static Nccl nccl{};
  static const auto* status = new absl::Status(Load(&nccl));
  if (!status->ok()) return *status;
  return &nccl;
}

}  // namespace sluice
