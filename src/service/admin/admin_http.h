// The admin port: HTTP for people and machines that watch a node. It serves /metrics (Prometheus
// text), /healthz (the process answers) and /readyz (the node takes work), over TLS if the node has
// certificates. One thread serves all connections, and calls thread-safe callbacks for each
// request.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/service/access/tls_files.h"

namespace sluice {

class Access;

class AdminHttp {
 public:
  struct Options {
    std::string listen;  // host:port; port 0 takes any free one
    // Both are called on the server's thread and must not block for long.
    std::function<std::string()> metrics;  // text format 0.0.4
    std::function<bool()> ready;
    // With TLS, `access` decides who may read /metrics. It outlives this object. New connections
    // use the files as they are then.
    TlsFiles tls;
    const Access* access = nullptr;
    // One connection more closes the one that has been without a whole request for longest, so that
    // idle peers cannot keep out those who ask whether the node lives.
    size_t max_connections = 64;
    absl::Duration timeout = absl::Seconds(10);  // to send a request, or to take the answer
    size_t max_header_bytes = 8 << 10;
  };
  static absl::StatusOr<std::unique_ptr<AdminHttp>> Start(Options options);
  // Closes every connection.
  virtual ~AdminHttp() = default;
  // Returns the address with the port that was chosen.
  virtual const std::string& address() const = 0;
};

}  // namespace sluice
