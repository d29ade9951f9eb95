// Listens for a gRPC server and hands it the connections that it may have. gRPC 1.51 by itself
// takes any number of connections from anybody, and stops listening for good once the system has
// no file descriptor left for one.
//
// A peer is an IPv4 address or an IPv6 network of 64 bits, which is what one host or customer has.
// Behind a proxy the peer is the proxy. One connection too many is reset at once, before a byte of
// it is read, and its client sees UNAVAILABLE. Thread-safe.
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
    int64_t max_connections = 16384;
    int64_t max_per_peer = 1024;
  };
  // Takes over a connection. The function that gets it closes it.
  using Take = std::function<void(int fd)>;

  // Binds the address, to which nobody can connect before Start. A name is bound with every address
  // that it has, and 0.0.0.0 or :: with IPv6 beside IPv4. UNAVAILABLE has the system's reason.
  static absl::StatusOr<std::unique_ptr<ConnectionGate>> Bind(const HostPort& address,
                                                              const Options& options);
  // Calls Stop().
  ~ConnectionGate();

  uint16_t port() const { return port_; }
  // Hands connections to `take` from now on, one at a time, until Stop. UNAVAILABLE if another
  // process was faster.
  absl::Status Start(Take take);
  // Makes the gate take no more connections. Those that are open go on. Idempotent.
  void Stop();

  struct Counts {
    int64_t open = 0;
    int64_t refused_for_peer = 0;  // since Start, as all below
    int64_t refused = 0;           // refused because of max_connections
    int64_t failed = 0;            // the system could not accept them
  };
  Counts CountsNow();

 private:
  // The clock is steady because a clock that is set back must keep nobody out.
  using Clock = std::chrono::steady_clock;

  // A connection that was handed over, with its descriptor. The server may have closed it and the
  // descriptor may be another's by now; it is the same socket as long as the inode is the same.
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
  // Accepts one connection if there is one. Returns false if the system cannot give one now.
  bool Accept(int listener);
  // Returns whether a peer may have the connection. Counts the connection, or the reason against
  // it.
  bool Admit(const std::string& peer, int fd);
  // Forgets the closed connections of a peer.
  void Sweep(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SweepAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  std::vector<int> listeners_;
  const uint16_t port_;
  const int wake_;  // an eventfd that Stop writes
  Take take_;

  absl::Mutex stop_mutex_;
  std::thread thread_;  // runs until Stop, which one thread at a time may call

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Peer> peers_ ABSL_GUARDED_BY(mutex_);
  // connections of all peers, of which some may be closed
  int64_t known_ ABSL_GUARDED_BY(mutex_) = 0;
  Clock::time_point swept_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point warned_ ABSL_GUARDED_BY(mutex_);
  Counts counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
