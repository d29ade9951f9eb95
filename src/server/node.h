// The parts that a decode node and a prefill node have in common: configuration, security, device,
// model, the two ports, and the order in which a node starts.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/readiness.h"
#include "src/config/setting.h"
#include "src/device/device.h"
#include "src/metrics/metrics.h"
#include "src/metrics/process_metrics.h"
#include "src/model/model.h"
#include "src/server/ranks.h"
#include "src/server/security.h"
#include "src/server/signals.h"
#include "src/service/access/access_log.h"
#include "src/service/admin/admin_http.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/telemetry/call_spans.h"
#include "src/service/telemetry/span_exporter.h"
#include "src/service/wire/grpc_service.h"

namespace sluice {

class Node {
 public:
  virtual ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  // Serves until `signals` says stop, lets running work finish in the time that it has, and stops.
  // Returns an error if the device failed; everything that ran has ended with it.
  virtual absl::Status ServeUntil(Signals& signals) = 0;
  // The program's name, as traces have it.
  virtual const char* program() const = 0;

 protected:
  // Callers get this long to take their last messages.
  static constexpr absl::Duration kFlushTime = absl::Seconds(5);
  // A node whose work has ended gets this long on top to end its process.
  static constexpr absl::Duration kEndTime = absl::Seconds(1);

  explicit Node(const Config& config) : config_(config) {}

  // Brings the node up to ready, in the order of the hooks below. The admin port opens first, so
  // that probes find a process that answers and is not ready yet. At the end the address file is
  // written.
  absl::Status StartUp();

  // The security files have been read.
  virtual void OnSecurity() {}
  // Loads the model, which LoadModel() of this class does, makes the KV caches and starts whatever
  // computes.
  virtual absl::Status LoadModelAndMemory() = 0;
  // Computes something small end to end, to show that the node works.
  virtual absl::Status RunCanary() = 0;
  virtual absl::StatusOr<std::vector<GrpcService>> MakeServices() = 0;
  // Returns the largest message that the gRPC port has to accept.
  virtual uint64_t MaxMessageBytes() const = 0;
  // Tells health checks and /readyz that the node takes work.
  virtual void Open() = 0;
  // Brings metrics that are read on demand up to date. May be called before the model is loaded, on
  // the admin port's thread.
  virtual void UpdateMetrics() {}

  // Makes device_, ranks_ and model_, whose steps have at most `max_rows` rows, of which
  // `max_logits` want logits.
  absl::Status LoadModel(int max_rows, int max_logits);
  // Logs the sizes of the KV caches and puts them into config_ in place of auto.
  void SetSize(const char* name, uint64_t bytes, const std::string& why,
               void (Config::*set)(uint64_t));
  // Tells scrapers how many tokens the KV caches in HBM and in DRAM hold, and whether prompts share
  // them.
  void SetCacheConfig(int64_t hbm_tokens, int64_t dram_tokens, bool prefix_cache);
  // Tells health checks and callers that the device failed, gives callers kFlushTime to take the
  // error, and ends the process soon even if the GPU's memory cannot be given back. Returns the
  // device's error.
  absl::Status EndFailed();
  // Closes both ports. REQUIRES: called by the destructor of each node, whose parts the services
  // use.
  void ClosePorts();

  Config config_;
  // In the order in which they are made; each may use those before it.
  Security security_;
  Metrics metrics_;
  ProcessMetrics process_metrics_;
  Readiness readiness_;
  std::unique_ptr<Device> device_;
  NodeRanks ranks_;  // null: the node has one rank
  std::unique_ptr<Model> model_;
  std::unique_ptr<AccessLog> access_log_;  // null: no access log is kept
  std::unique_ptr<SpanExporter> spans_;    // null: calls are not traced
  std::unique_ptr<CallTracer> tracer_;     // with spans_
  std::unique_ptr<GrpcServer> grpc_;

 private:
  absl::Status StartAdminHttp();
  absl::Status StartGrpc();
  std::string RenderMetrics();

  // grpc_ once it has started, for the admin port's thread.
  std::atomic<GrpcServer*> counted_ = nullptr;
  std::unique_ptr<AdminHttp> admin_http_;
};

}  // namespace sluice
