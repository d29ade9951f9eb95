#include "src/server/kv_links.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/cpu_peer_link.h"
#ifdef SLUICE_HAVE_CUDA
#include "src/device/cuda/nccl_peer_link.h"
#endif

namespace sluice {
namespace {

absl::StatusOr<std::unique_ptr<PeerLinks>> LinksOf(Device* device) {
#ifdef SLUICE_HAVE_CUDA
  if (device->name() == "cuda") return NewNcclPeerLinks(device);
#endif
  SLUICE_CHECK(device->name() == "cpu");
  return NewCpuPeerLinks();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerLinks>> NewKvLinks(const Config& config, Device* device) {
  if (config.kv_transport() != "nccl") return nullptr;
  absl::StatusOr<std::unique_ptr<PeerLinks>> links = LinksOf(device);
  if (!links.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "kv_transport: nccl: ", links.status().message(), "; or run with --kv-transport grpc"));
  }
  Log(LogLevel::kInfo, "links between devices carry caches where both nodes have them",
      {{"transport", (*links)->transport()}});
  return links;
}

}  // namespace sluice
