#include "src/service/grpc/connection_gate.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace sluice {
namespace {

// A client's socket.
class Client {
 public:
  // Connects from one of this machine's own addresses.
  Client(const std::string& from, uint16_t port) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    const timeval timeout = {5, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    sockaddr_in mine = Address(from, 0), to = Address("127.0.0.1", port);
    REQUIRE(bind(fd_, reinterpret_cast<sockaddr*>(&mine), sizeof(mine)) == 0);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0;
  }
  ~Client() { close(fd_); }
  bool connected() const { return connected_; }
  // Returns whether the other side greets. If it does not, it has reset the connection.
  bool Greeted() {
    char byte = 0;
    const ssize_t got = recv(fd_, &byte, 1, 0);
    if (got < 0) REQUIRE(errno == ECONNRESET);
    return got == 1;
  }

 private:
  static sockaddr_in Address(const std::string& text, uint16_t port) {
    sockaddr_in out = {};
    out.sin_family = AF_INET;
    out.sin_port = htons(port);
    REQUIRE(inet_pton(AF_INET, text.c_str(), &out.sin_addr) == 1);
    return out;
  }
  const int fd_;
  bool connected_ = false;
};

// Greets every connection that it gets, and closes one when it is told to.
class Server {
 public:
  explicit Server(ConnectionGate::Options options) {
    auto bound = ConnectionGate::Bind({"127.0.0.1", 0}, options);
    REQUIRE(bound.ok());
    gate_ = *std::move(bound);
    REQUIRE(gate_
                ->Start([this](int fd) {
                  absl::MutexLock lock(&mutex_);
                  (void)!write(fd, "!", 1);
                  fds_.push_back(fd);
                })
                .ok());
  }
  ~Server() {
    gate_->Stop();
    for (const int fd : fds_) close(fd);
  }
  ConnectionGate& gate() { return *gate_; }
  void CloseOldest() {
    {
      absl::MutexLock lock(&mutex_);
      close(fds_.front());
      fds_.erase(fds_.begin());
    }
    absl::SleepFor(absl::Milliseconds(60));  // longer than the sweep interval
  }
  std::unique_ptr<Client> From(const std::string& address) {
    return std::make_unique<Client>(address, gate_->port());
  }

 private:
  absl::Mutex mutex_;
  std::vector<int> fds_;
  std::unique_ptr<ConnectionGate> gate_;
};

ConnectionGate::Options Bounds(int64_t max_connections, int64_t max_per_peer) {
  ConnectionGate::Options options;
  options.max_connections = max_connections;
  options.max_per_peer = max_per_peer;
  return options;
}

TEST_CASE(
    "a peer has so many connections, another one its own, and what is closed counts no more") {
  Server server(Bounds(100, 2));
  const auto a = server.From("127.0.0.1"), b = server.From("127.0.0.1");
  REQUIRE((a->Greeted() && b->Greeted()));
  REQUIRE_FALSE(server.From("127.0.0.1")->Greeted());
  REQUIRE(server.From("127.0.0.2")->Greeted());
  CHECK(server.gate().CountsNow().open == 3);
  CHECK(server.gate().CountsNow().refused_for_peer == 1);
  CHECK(server.gate().CountsNow().refused == 0);
  server.CloseOldest();
  const auto c = server.From("127.0.0.1");
  REQUIRE(c->Greeted());
  REQUIRE_FALSE(server.From("127.0.0.1")->Greeted());
  CHECK(server.gate().CountsNow().open == 3);
}

TEST_CASE("all peers have so many connections together") {
  Server server(Bounds(3, 2));
  std::vector<std::unique_ptr<Client>> clients;
  for (const char* from : {"127.0.0.1", "127.0.0.2", "127.0.0.3"}) {
    clients.push_back(server.From(from));
    REQUIRE(clients.back()->Greeted());
  }
  REQUIRE_FALSE(server.From("127.0.0.4")->Greeted());
  CHECK(server.gate().CountsNow().refused == 1);
  CHECK(server.gate().CountsNow().refused_for_peer == 0);
  server.CloseOldest();
  REQUIRE(server.From("127.0.0.4")->Greeted());
}

TEST_CASE("a descriptor that is another socket's by now does not hold the old one's place") {
  Server server(Bounds(100, 1));
  for (int i = 0; i < 20; ++i) {
    const auto client = server.From("127.0.0.1");
    REQUIRE(client->Greeted());
    server.CloseOldest();
  }
  CHECK(server.gate().CountsNow().open == 0);
  CHECK(server.gate().CountsNow().refused_for_peer == 0);
}

TEST_CASE("after Stop nobody can connect, and those who have go on") {
  Server server(Bounds(100, 100));
  const auto client = server.From("127.0.0.1");
  const uint16_t port = server.gate().port();
  REQUIRE(client->Greeted());
  server.gate().Stop();
  server.gate().Stop();
  CHECK_FALSE(Client("127.0.0.1", port).connected());
  CHECK(server.gate().CountsNow().open == 1);
}

TEST_CASE("an address that is taken, or no machine's, is refused by what the system says") {
  Server server(Bounds(1, 1));
  const auto again = ConnectionGate::Bind({"127.0.0.1", server.gate().port()}, {});
  CHECK(absl::IsUnavailable(again.status()));
  CHECK_THAT(std::string(again.status().message()), Catch::Contains("Address already in use"));
  // Another process has part of what the name stands for.
  CHECK_FALSE(ConnectionGate::Bind({"localhost", server.gate().port()}, {}).ok());
  CHECK_THAT(std::string(ConnectionGate::Bind({"203.0.113.7", 0}, {}).status().message()),
             Catch::Contains("203.0.113.7:0") && Catch::Contains("assign requested address"));
  CHECK_FALSE(ConnectionGate::Bind({"no-such-host.invalid", 0}, {}).ok());
}

TEST_CASE("every address listens") {
  auto gate = *ConnectionGate::Bind({"0.0.0.0", 0}, {});
  REQUIRE(gate->Start([](int fd) {
                (void)!write(fd, "!", 1);
                close(fd);
              })
              .ok());
  CHECK(Client("127.0.0.1", gate->port()).Greeted());
}

}  // namespace
}  // namespace sluice
