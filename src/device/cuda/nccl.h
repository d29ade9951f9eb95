// These are NCCL's functions, from a library that is loaded when ranks first meet: programs start
// on machines that lack it. This needs NCCL's header, but not its library, to be built.
#pragma once

#include <nccl.h>

#include <string>

#include "absl/status/statusor.h"

namespace sluice {

struct Nccl {
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRankConfig) init;
  decltype(&ncclCommGetAsyncError) async_error;
  decltype(&ncclCommAbort) abort;
  decltype(&ncclCommRegister) register_buffer;
  decltype(&ncclCommDeregister) deregister_buffer;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclBroadcast) broadcast;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) receive;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclGetErrorString) error_string;
};

// FAILED_PRECONDITION: there is no libnccl.so.2, or it lacks a function; the message has the
// remedy.
absl::StatusOr<const Nccl*> LoadNccl();

}  // namespace sluice
