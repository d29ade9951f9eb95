// Prefill: computes prompts and hands them to decode nodes. Run() blocks for as long as a prompt
// takes, so it runs on a small queue of threads. While one prompt computes, another may finish its
// push.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "sluice/v1/prefill.pb.h"
#include "src/base/readiness.h"
#include "src/metrics/metrics.h"
#include "src/prefill/held_prompts.h"
#include "src/prefill/prefiller.h"
#include "src/service/access/caller.h"
#include "src/service/prefill/prompt_counts.h"
#include "src/service/wire/grpc_service.h"

namespace sluice {

class Channels;
class LinkPeers;

struct PrefillServiceOptions {
  v1::GetPrefillModelResponse model;  // the answer of GetModel
  // These outlive the service.
  Prefiller* prefiller = nullptr;
  const Readiness* readiness = nullptr;
  PromptCounts* counts = nullptr;
  Channels* channels = nullptr;    // to decode nodes
  const Access* access = nullptr;  // null without TLS
  Metrics* metrics = nullptr;
  LinkPeers* links = nullptr;  // to decode nodes; null: all goes over gRPC (kv_transport grpc)
  int threads = 2;
  // Holds the prompts for which no decode node is named. Null if such a call is refused. `address`
  // returns the address where decode nodes find this node, once it serves.
  HeldPrompts* held = nullptr;
  std::function<std::string()> address;
  // Maximum calls that wait for a thread. More are refused with RESOURCE_EXHAUSTED.
  size_t max_queued = 64;
  // The timeouts of calls to the decode node. The caller's deadline applies if it is earlier.
  absl::Duration call_timeout = absl::Seconds(20);
  absl::Duration push_timeout = absl::Minutes(10);
  // The limit for each running prompt, and each address that it goes to, of the chunks kept in case
  // a broken stream loses them; see KvPusher.
  uint64_t max_kept_bytes = uint64_t{48} << 20;
};

GrpcService NewPrefillService(PrefillServiceOptions options);

}  // namespace sluice
