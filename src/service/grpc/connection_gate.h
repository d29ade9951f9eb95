// Listens for a gRPC server and hands it the connections that it may have: gRPC 1.51 takes any
// number of them from anybody, and stops listening for good once the system has no file descriptor
// left for one.
//
// A peer is an IPv4 address or an IPv6 network of 64 bits, which is what one host or customer has;
// where nodes are behind a proxy that is the proxy. One connection too many is reset at once,
// before a byte of it is read: a client sees UNAVAILABLE. Thread-safe.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "src/service/wire/host_port.h"

struct sockaddr_storage;

namespace sluice {

class ConnectionGate {
 public:
  struct Options {
    int64_t most = 16384;
    int64_t most_of_peer = 1024;
  };
  // Takes over a connection; whoever has it closes it.
  using Take = std::function<void(int fd)>;

  // Takes the address, on which nobody can connect before Start: every address that a name has, and
  // IPv6 beside IPv4 where it is 0.0.0.0 or ::. UNAVAILABLE says what the system says.
  static absl::StatusOr<std::unique_ptr<ConnectionGate>> Bind(const HostPort& address,
                                                              const Options& options);
  // Stop().
  ~ConnectionGate();

  uint16_t port() const { return port_; }
  // Connections go to `take` from now on, one at a time, until Stop. UNAVAILABLE: another process
  // was faster.
  absl::Status Start(Take take);
  // Nobody can connect from now on; those who have go on. Idempotent.
  void Stop();

  struct Counts {
    int64_t open = 0;
    int64_t refused_of_peer = 0;  // since Start, as all below
    int64_t refused = 0;          // for `most`
    int64_t failed = 0;           // the system could not accept
  };
  Counts CountsNow();

 private:
  // A clock that is set back must keep nobody out.
  using Clock = std::chrono::steady_clock;

  // A connection that was handed over. Its descriptor is another's by now: it is still the same
  // socket while it has the same inode.
  struct Connection {
    int fd;
    ino_t inode;
    bool IsOpen() const;
  };
  struct Peer {
    std::vector<Connection> connections;
    Clock::time_point swept;
  };

  ConnectionGate(const Options& options, std::vector<int> listeners, uint16_t port, int wake)
      : options_(options), listeners_(std::move(listeners)), port_(port), wake_(wake) {}

  void Run();
  // One connection, if there is one; false: the system has none to give now.
  bool Accept(int listener);
  // Whether a peer may have it. Counts it, or why not.
  bool Admit(const std::string& peer, int fd);
  // Forgets connections of a peer that are closed.
  void Sweep(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SweepAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  std::vector<int> listeners_;
  const uint16_t port_;
  const int wake_;  // an eventfd: Stop was called
  Take take_;

  absl::Mutex stop_mutex_;
  std::thread thread_;  // until Stop, which one thread at a time may call

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Peer> peers_ ABSL_GUARDED_BY(mutex_);
  int64_t known_ ABSL_GUARDED_BY(mutex_) = 0;  // connections of all peers, some closed by now
  Clock::time_point swept_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point warned_ ABSL_GUARDED_BY(mutex_);
  Counts counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
