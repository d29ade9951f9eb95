#include "src/service/grpc/connection_gate.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// The shortest time between two sweeps for closed connections. A sweep is a system call for every
// connection, and a refused peer may try again at once.
constexpr std::chrono::milliseconds kSweepInterval{50};
constexpr std::chrono::seconds kWarnInterval{10};
// The pause after the process ran out of file descriptors; one may come free.
constexpr int kRetryMs = 100;
// Data that nobody acknowledges for this long ends a connection, as keepalive does.
constexpr int kUnacknowledgedMs = 20'000;

void Set(int fd, int level, int option, int value) {
  // An option that the system does not have is not missed: the connection works without it.
  (void)setsockopt(fd, level, option, &value, sizeof(value));
}

void SetPort(sockaddr* address, uint16_t port) {
  if (address->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = htons(port);
  }
}

uint16_t PortOf(int fd) {
  sockaddr_storage address = {};
  socklen_t bytes = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

// Returns a bound socket, or -1 with the reason in errno.
int BoundSocket(const sockaddr* address, socklen_t bytes, bool both_families) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  Set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address->sa_family == AF_INET6) Set(fd, IPPROTO_IPV6, IPV6_V6ONLY, both_families ? 0 : 1);
  if (bind(fd, address, bytes) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

bool IsWildcard(const std::string& host) { return host == "0.0.0.0" || host == "::"; }

std::string PeerOf(const sockaddr_storage& from) {
  char text[INET6_ADDRSTRLEN] = "";
  if (from.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(from).sin_addr, text, sizeof(text));
    return text;
  }
  in6_addr address = reinterpret_cast<const sockaddr_in6&>(from).sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&address)) {
    inet_ntop(AF_INET, address.s6_addr + 12, text, sizeof(text));
    return text;
  }
  std::fill_n(address.s6_addr + 8, 8, uint8_t{0});
  inet_ntop(AF_INET6, &address, text, sizeof(text));
  return absl::StrCat(text, "/64");
}

// Closes without TIME_WAIT, which would keep memory of the port busy with refused peers.
void Reset(int fd) {
  const linger now = {1, 0};
  (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  close(fd);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ConnectionGate>> ConnectionGate::Bind(const HostPort& address,
                                                                     const Options& options) {
  const auto failed = [&](const char* why) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address.ToString(), ": ", why));
  };
  std::vector<int> listeners;
  auto close_all = absl::MakeCleanup([&] {
    for (const int fd : listeners) close(fd);
  });
  uint16_t port = address.port;
  int error = EADDRNOTAVAIL;
  const auto add = [&](sockaddr* at, socklen_t bytes, bool both_families) {
    SetPort(at, port);
    const int fd = BoundSocket(at, bytes, both_families);
    if (fd < 0) {
      error = errno;
      return false;
    }
    listeners.push_back(fd);
    if (port == 0) port = PortOf(fd);
    return true;
  };
  sockaddr_in6 any = {};
  any.sin6_family = AF_INET6;
  if (!IsWildcard(address.host) || !add(reinterpret_cast<sockaddr*>(&any), sizeof(any), true)) {
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE;
    addrinfo* found = nullptr;
    if (const int code = getaddrinfo(address.host.c_str(), nullptr, &hints, &found); code != 0) {
      return failed(gai_strerror(code));
    }
    const absl::Cleanup free_found = [&] { freeaddrinfo(found); };
    for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
      // A host may lack an address of one of a name's families. But an address that is there and
      // that another process has would give half of the callers to that process.
      if (!add(at->ai_addr, at->ai_addrlen, false) && error == EADDRINUSE) break;
    }
    if (listeners.empty() || error == EADDRINUSE) return failed(std::strerror(error));
  }
  const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake < 0) return failed(std::strerror(errno));
  std::move(close_all).Cancel();
  return std::unique_ptr<ConnectionGate>(
      new ConnectionGate(options, std::move(listeners), port, wake));
}

ConnectionGate::~ConnectionGate() {
  Stop();
  close(wake_);
}

absl::Status ConnectionGate::Start(Take take) {
  for (const int fd : listeners_) {
    if (listen(fd, SOMAXCONN) != 0) {
      return absl::UnavailableError(
          absl::StrCat("cannot listen on port ", port_, ": ", std::strerror(errno)));
    }
  }
  take_ = std::move(take);
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

void ConnectionGate::Stop() {
  absl::MutexLock lock(&stop_mutex_);
  if (thread_.joinable()) {
    const uint64_t one = 1;
    SLUICE_CHECK(write(wake_, &one, sizeof(one)) == sizeof(one));
    thread_.join();
  }
  for (const int fd : listeners_) close(fd);
  listeners_.clear();
}

void ConnectionGate::Run() {
  std::vector<pollfd> polled = {{wake_, POLLIN, 0}};
  for (const int fd : listeners_) polled.push_back({fd, POLLIN, 0});
  while (true) {
    if (poll(polled.data(), polled.size(), -1) < 0) continue;  // a signal interrupted it
    if (polled[0].revents != 0) return;
    bool accepts = true;
    for (size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents != 0) accepts = Accept(polled[i].fd) && accepts;
    }
    // Waiting peers keep the listener ready; only Stop ends the pause.
    if (!accepts) (void)poll(polled.data(), 1, kRetryMs);
  }
}

bool ConnectionGate::Accept(int listener) {
  sockaddr_storage from = {};
  socklen_t bytes = sizeof(from);
  const int fd =
      accept4(listener, reinterpret_cast<sockaddr*>(&from), &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    // Any other error means that the peer has gone, or that one connection failed.
    if (error != EMFILE && error != ENFILE && error != ENOBUFS && error != ENOMEM) return true;
    absl::MutexLock lock(&mutex_);
    ++counts_.failed;
    const Clock::time_point now = Clock::now();
    if (now - warned_ < kWarnInterval) return false;
    warned_ = now;
    Log(LogLevel::kError, "connections cannot be accepted: raise the limit of file descriptors",
        {{"error", std::strerror(error)}, {"known", known_}});
    return false;
  }
  if (!Admit(PeerOf(from), fd)) {
    Reset(fd);
    return true;
  }
  Set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  Set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kUnacknowledgedMs);
  take_(fd);
  return true;
}

bool ConnectionGate::Admit(const std::string& name, int fd) {
  struct stat socket = {};
  SLUICE_CHECK(fstat(fd, &socket) == 0);
  const Clock::time_point now = Clock::now();
  absl::MutexLock lock(&mutex_);
  if (known_ >= options_.max_connections && now - swept_ >= kSweepInterval) SweepAll();
  Peer& peer = peers_[name];
  const auto has = [&] { return static_cast<int64_t>(peer.connections.size()); };
  if (has() >= options_.max_per_peer && now - peer.swept >= kSweepInterval) {
    peer.swept = now;
    Sweep(&peer);
  }
  const bool is_full = known_ >= options_.max_connections;
  if (!is_full && has() < options_.max_per_peer) {
    peer.connections.push_back({fd, socket.st_ino});
    ++known_;
    return true;
  }
  ++(is_full ? counts_.refused : counts_.refused_for_peer);
  if (peer.connections.empty()) peers_.erase(name);
  if (now - warned_ >= kWarnInterval) {
    warned_ = now;
    Log(LogLevel::kWarn,
        is_full ? "a connection is refused: max_connections are open"
                : "a connection is refused: its peer has max_connections_per_peer open",
        {{"peer", name}, {"open", known_}});
  }
  return false;
}

bool ConnectionGate::Connection::IsOpen() const {
  struct stat now = {};
  return fstat(fd, &now) == 0 && S_ISSOCK(now.st_mode) && now.st_ino == inode;
}

void ConnectionGate::Sweep(Peer* peer) {
  const auto end = std::remove_if(peer->connections.begin(), peer->connections.end(),
                                  [](const Connection& c) { return !c.IsOpen(); });
  known_ -= peer->connections.end() - end;
  peer->connections.erase(end, peer->connections.end());
}

void ConnectionGate::SweepAll() {
  swept_ = Clock::now();
  for (auto it = peers_.begin(); it != peers_.end();) {
    Sweep(&it->second);
    if (it->second.connections.empty()) {
      peers_.erase(it++);
    } else {
      ++it;
    }
  }
}

ConnectionGate::Counts ConnectionGate::CountsNow() {
  absl::MutexLock lock(&mutex_);
  SweepAll();
  counts_.open = known_;
  return counts_;
}

}  // namespace sluice
