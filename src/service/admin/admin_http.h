// The admin port: HTTP for people and machines that watch. /metrics (Prometheus text), /healthz
// (the process answers), /readyz (it takes work); over TLS where the
// node has certificates. One thread; thread-safe callbacks are asked for
// each call.
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
    std::string listen;  // host:port, port 0: any free one
    // Called on the server's thread; they must not block for long.
    std::function<std::string()> metrics;  // text format 0.0.4
    std::function<bool()> ready;
    // With TLS: /metrics is for callers whom `access`, which outlives this, lets in. The files are
    // read again when they change, for new connections.
    TlsFiles tls;
    const Access* access = nullptr;
    // One more closes the one that has been without a whole request for longest, so that idle
    // peers cannot keep out those who ask whether the node lives.
    size_t max_connections = 64;
    absl::Duration timeout = absl::Seconds(10);  // to send a request, or to take the answer
    size_t max_header_bytes = 8 << 10;
  };
  static absl::StatusOr<std::unique_ptr<AdminHttp>> Start(Options options);
  // Closes every connection.
  virtual ~AdminHttp() = default;
  // With the port that was chosen.
  virtual const std::string& address() const = 0;
};

}  // namespace sluice
