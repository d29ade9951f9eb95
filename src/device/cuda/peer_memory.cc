#include "src/device/cuda/peer_memory.h"

#include <cudaTypedefs.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "src/base/status_macros.h"
#include "src/device/cuda/cuda_memory.h"

namespace sluice {
namespace {

// A wait for another rank is this long before it begins again.
constexpr absl::Duration kWait = absl::Seconds(1);

absl::Status Unreachable(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();  // clears the error, which is returned
  return absl::FailedPreconditionError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

// A handle opens a whole allocation. Returns where the one begins that `data` lies in.
absl::StatusOr<uint8_t*> BeginOf(const void* data) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  SLUICE_RETURN_IF_ERROR(Unreachable(
      "cuMemGetAddressRange", cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &entry, 3020,
                                                               cudaEnableDefault, &found)));
  const auto range = reinterpret_cast<PFN_cuMemGetAddressRange_v3020>(entry);
  CUdeviceptr begin = 0;
  size_t bytes = 0;
  if (range == nullptr || range(&begin, &bytes, reinterpret_cast<CUdeviceptr>(data)) != 0) {
    return absl::FailedPreconditionError("a buffer that is no allocation of the GPU's memory");
  }
  return reinterpret_cast<uint8_t*>(begin);
}

}  // namespace

PeerMemory::PeerMemory(HostRanks* host, Meeting* meeting, int64_t bytes)
    : host_(host), meeting_(meeting), bytes_(bytes) {}

absl::StatusOr<std::unique_ptr<PeerMemory>> PeerMemory::Make(HostRanks* host, Meeting* meeting,
                                                             int64_t bytes) {
  const int size = host->size();
  if (size < 2 || size > kernels::kMaxPeerRanks) {
    return absl::FailedPreconditionError(absl::StrCat(size, " ranks; 2 to ", kernels::kMaxPeerRanks,
                                                      " exchange by each other's memory"));
  }
  std::unique_ptr<PeerMemory> peers(new PeerMemory(host, meeting, bytes));
  kernels::PeerGroup& group = peers->group_;
  group.rank = host->rank();
  group.size = size;
  group.slot_bytes = kernels::PeerSlotBytes(bytes);
  // A rank that lacks memory comes to the exchange all the same, with nothing.
  auto area = AllocateHbm(static_cast<size_t>(kernels::PeerAreaBytes(size, group.slot_bytes)),
                          "what ranks exchange");
  if (area.ok()) peers->area_ = *std::move(area);
  void* stop = nullptr;
  if (cudaHostAlloc(&stop, sizeof(uint32_t), cudaHostAllocMapped) == cudaSuccess) {
    peers->stop_ = static_cast<uint32_t*>(stop);
    *peers->stop_ = 0;
    group.stop = peers->stop_;
  }
  const bool complete = group.stop != nullptr;
  SLUICE_ASSIGN_OR_RETURN(
      const Mapped areas,
      peers->Exchange(complete ? peers->area_.data() : nullptr, peers->area_.bytes()));
  std::memcpy(group.areas, areas.at, sizeof(group.areas));
  return peers;
}

PeerMemory::~PeerMemory() {
  Stop();
  Unmap();
  area_ = Buffer();
  if (stop_ != nullptr) cudaFreeHost(stop_);
}

void PeerMemory::Stop() {
  if (stop_ != nullptr) std::atomic_ref<uint32_t>(*stop_).store(1, std::memory_order_release);
}

void PeerMemory::Unmap() {
  if (opened_.empty()) return;
  cudaDeviceSynchronize();
  for (void* at : opened_) cudaIpcCloseMemHandle(at);
  opened_.clear();
  mapped_.clear();
}

absl::Status PeerMemory::Meet() {
  const uint32_t step = ++step_;
  HostRanks::Post(meeting_->offers[host_->rank()].step, step);
  for (int rank = 0; rank < host_->size(); ++rank) {
    for (bool there = false; !there;) {
      SLUICE_ASSIGN_OR_RETURN(there,
                              host_->AwaitFor(meeting_->offers[rank].step, step, rank, kWait));
    }
  }
  return absl::OkStatus();
}

absl::Status PeerMemory::Offer(void* data) {
  Meeting::Offer& own = meeting_->offers[host_->rank()];
  if (data == nullptr) return absl::FailedPreconditionError("no memory for what ranks exchange");
  int device = 0;
  SLUICE_RETURN_IF_ERROR(Unreachable("the device", cudaGetDevice(&device)));
  // The driver's call below needs the device's context, which this binds to the thread.
  SLUICE_RETURN_IF_ERROR(Unreachable("the device", cudaSetDevice(device)));
  SLUICE_RETURN_IF_ERROR(Unreachable(
      "the device's address", cudaDeviceGetPCIBusId(own.bus_id, sizeof(own.bus_id), device)));
  SLUICE_ASSIGN_OR_RETURN(uint8_t* const begin, BeginOf(data));
  own.offset = static_cast<uint8_t*>(data) - begin;
  return Unreachable("sharing memory", cudaIpcGetMemHandle(&own.handle, begin));
}

absl::Status PeerMemory::Open(int rank, void** at) {
  const Meeting::Offer& other = meeting_->offers[rank];
  // A device that this process does not see is reached as well; then the driver alone decides.
  int own_device = 0, device = 0, reaches = 1;
  if (cudaGetDevice(&own_device) == cudaSuccess &&
      cudaDeviceGetByPCIBusId(&device, other.bus_id) == cudaSuccess && device != own_device) {
    cudaDeviceCanAccessPeer(&reaches, own_device, device);
  }
  cudaGetLastError();  // a device that is not seen is no error
  if (reaches == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the GPU does not reach the memory of rank ", rank, "'s"));
  }
  void* begin = nullptr;
  SLUICE_RETURN_IF_ERROR(
      Unreachable("mapping another rank's memory",
                  cudaIpcOpenMemHandle(&begin, other.handle, cudaIpcMemLazyEnablePeerAccess)));
  opened_.push_back(begin);
  *at = static_cast<uint8_t*>(begin) + other.offset;
  return absl::OkStatus();
}

absl::StatusOr<PeerMemory::Mapped> PeerMemory::Exchange(void* data, size_t bytes) {
  Meeting::Offer& own = meeting_->offers[host_->rank()];
  const auto say = [&own](const absl::Status& status) {
    std::snprintf(own.why, sizeof(own.why), "%s", std::string(status.message()).c_str());
  };
  // Returns what some rank says against it.
  const auto heard = [this]() -> absl::Status {
    for (int rank = 0; rank < host_->size(); ++rank) {
      const char* const why = meeting_->offers[rank].why;
      if (why[0] != '\0') {
        return absl::FailedPreconditionError(absl::StrCat("rank ", rank, ": ", why));
      }
    }
    return absl::OkStatus();
  };
  say(Offer(data));
  SLUICE_RETURN_IF_ERROR(Meet());
  absl::Status status = heard();
  SLUICE_RETURN_IF_ERROR(Meet());  // Nobody writes before all have heard.
  if (!status.ok()) return status;

  Mapped mapped{};
  mapped.bytes = bytes;
  for (int rank = 0; rank < host_->size() && status.ok(); ++rank) {
    if (rank == host_->rank()) {
      mapped.at[rank] = data;
    } else {
      status = Open(rank, &mapped.at[rank]);
    }
  }
  say(status);
  SLUICE_RETURN_IF_ERROR(Meet());
  status = heard();
  SLUICE_RETURN_IF_ERROR(Meet());
  if (!status.ok()) return status;
  return mapped;
}

absl::Status PeerMemory::Map(void* data, size_t bytes) {
  SLUICE_ASSIGN_OR_RETURN(const Mapped mapped, Exchange(data, bytes));
  mapped_.push_back(mapped);
  return absl::OkStatus();
}

bool PeerMemory::Find(const void* data, size_t bytes, void* (&at)[kernels::kMaxPeerRanks]) const {
  const auto* const begin = static_cast<const uint8_t*>(data);
  for (const Mapped& mapped : mapped_) {
    const auto* const own = static_cast<const uint8_t*>(mapped.at[host_->rank()]);
    if (begin < own || begin + bytes > own + mapped.bytes) continue;
    for (int rank = 0; rank < host_->size(); ++rank) {
      at[rank] = static_cast<uint8_t*>(mapped.at[rank]) + (begin - own);
    }
    return true;
  }
  return false;
}

}  // namespace sluice
