#include "src/service/admin/admin_http.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "src/service/wire/host_port.h"

namespace sluice {
namespace {

// A plain socket, so that the server is judged by its bytes and not by the library that it is made
// of.
class Client {
 public:
  explicit Client(const std::string& address) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    const auto parsed = ParseHostPort(address);
    REQUIRE(parsed.ok());
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(parsed->port);
    inet_pton(AF_INET, parsed->host.c_str(), &to.sin_addr);
    timeval timeout = {5, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    REQUIRE(connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0);
  }
  ~Client() { close(fd_); }
  void Send(const std::string& bytes) {
    (void)!send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  // Returns everything up to the end of an answer that has a Content-Length, or until the server
  // closes.
  std::string Receive() {
    std::string all;
    char buffer[4096];
    for (;;) {
      const size_t head = all.find("\r\n\r\n");
      const size_t length = all.find("Content-Length: ");
      if (head != std::string::npos && length != std::string::npos && length < head &&
          all.size() >= head + 4 + std::stoul(all.substr(length + 16))) {
        return all;
      }
      const ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
      if (got <= 0) return all;
      all.append(buffer, static_cast<size_t>(got));
    }
  }
  bool Closed() {
    char byte;
    return recv(fd_, &byte, 1, 0) == 0;
  }

 private:
  const int fd_;
};

struct Server {
  explicit Server(AdminHttp::Options options = {}) {
    options.listen = "127.0.0.1:0";
    options.metrics = [] { return std::string("sluice_up 1\n"); };
    options.ready = [this] { return ready.load(); };
    auto started = AdminHttp::Start(options);
    REQUIRE(started.ok());
    http = *std::move(started);
  }
  std::string Get(const std::string& request) {
    Client client(http->address());
    client.Send(request);
    return client.Receive();
  }
  std::atomic<bool> ready = false;
  std::unique_ptr<AdminHttp> http;
};

std::string Request(const std::string& path, const std::string& method = "GET") {
  return method + " " + path + " HTTP/1.1\r\nHost: x\r\n\r\n";
}

TEST_CASE("the three paths answer, and readiness follows its callback") {
  Server server;
  const std::string metrics = server.Get(Request("/metrics"));
  CHECK_THAT(metrics, Catch::StartsWith("HTTP/1.1 200 OK\r\n"));
  CHECK_THAT(metrics, Catch::Contains("text/plain; version=0.0.4"));
  CHECK_THAT(metrics, Catch::EndsWith("\r\n\r\nsluice_up 1\n"));
  CHECK_THAT(server.Get(Request("/healthz")), Catch::StartsWith("HTTP/1.1 200"));
  CHECK_THAT(server.Get(Request("/readyz")), Catch::StartsWith("HTTP/1.1 503"));
  server.ready = true;
  CHECK_THAT(server.Get(Request("/readyz?verbose")), Catch::StartsWith("HTTP/1.1 200"));
}

TEST_CASE("other paths, methods and bytes get 404, 405 and 400") {
  Server server;
  CHECK_THAT(server.Get(Request("/")), Catch::StartsWith("HTTP/1.1 404"));
  CHECK_THAT(server.Get(Request("/metricsx")), Catch::StartsWith("HTTP/1.1 404"));
  CHECK_THAT(server.Get(Request("/metrics", "DELETE")), Catch::StartsWith("HTTP/1.1 405"));
  CHECK_THAT(server.Get("what is this\r\n\r\n"), Catch::StartsWith("HTTP/1.1 400"));
  CHECK_THAT(server.Get("\x16\x03\x01\x02 tls hello\r\n\r\n"), Catch::StartsWith("HTTP/1.1 400"));
  CHECK_THAT(server.Get("POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"),
             Catch::Contains(" 4"));
}

TEST_CASE("HEAD gives the length and no body") {
  Server server;
  Client client(server.http->address());
  client.Send("HEAD /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  std::string answer;
  // Content-Length promises bytes that must not come, so read until the server closes.
  answer = client.Receive();
  CHECK_THAT(answer, Catch::StartsWith("HTTP/1.1 200"));
  CHECK_THAT(answer, Catch::Contains("Content-Length: 3"));
  CHECK_THAT(answer, Catch::EndsWith("\r\n\r\n"));
}

TEST_CASE("one connection serves several requests, also when they come at once") {
  Server server;
  Client client(server.http->address());
  for (int i = 0; i < 3; ++i) {
    client.Send(Request("/healthz"));
    CHECK_THAT(client.Receive(), Catch::EndsWith("ok\n"));
  }
  client.Send(Request("/healthz") + Request("/nowhere"));
  std::string both = client.Receive();
  if (both.find("404") == std::string::npos) both += client.Receive();
  CHECK_THAT(both, Catch::Contains("200 OK"));
  CHECK_THAT(both, Catch::Contains("404"));
}

TEST_CASE("a header over the limit is refused and the connection closed") {
  Server server;
  Client client(server.http->address());
  client.Send("GET /healthz HTTP/1.1\r\nX: " + std::string(9000, 'a') + "\r\n\r\n");
  CHECK_THAT(client.Receive(), Catch::StartsWith("HTTP/1.1 431"));
}

TEST_CASE("a connection that sends nothing is closed after the timeout") {
  AdminHttp::Options options;
  options.timeout = absl::Milliseconds(100);
  Server server(options);
  Client client(server.http->address());
  client.Send("GET /healthz HTT");
  const absl::Time start = absl::Now();
  CHECK(client.Closed());
  CHECK(absl::Now() - start < absl::Seconds(4));
}

TEST_CASE("one connection over the limit closes the one that has been idle for longest") {
  AdminHttp::Options options;
  options.max_connections = 3;
  Server server(options);
  Client slow(server.http->address());
  slow.Send("GET /heal");
  Client idle(server.http->address());
  Client busy(server.http->address());
  // An answer proves that all three have been accepted.
  busy.Send(Request("/healthz"));
  CHECK_THAT(busy.Receive(), Catch::EndsWith("ok\n"));
  CHECK_THAT(server.Get(Request("/healthz")), Catch::EndsWith("ok\n"));
  CHECK(slow.Closed());
  busy.Send(Request("/healthz"));
  CHECK_THAT(busy.Receive(), Catch::EndsWith("ok\n"));
}

TEST_CASE("a hundred silent connections keep nobody out") {
  AdminHttp::Options options;
  options.max_connections = 8;
  Server server(options);
  std::vector<std::unique_ptr<Client>> silent;
  for (int i = 0; i < 100; ++i) {
    silent.push_back(std::make_unique<Client>(server.http->address()));
    if (i % 3 == 0) silent.back()->Send("GET /he");
    if (i % 10 == 0) CHECK_THAT(server.Get(Request("/healthz")), Catch::EndsWith("ok\n"));
  }
  CHECK_THAT(server.Get(Request("/healthz")), Catch::EndsWith("ok\n"));
}

TEST_CASE("an address in use is refused in one sentence that says so") {
  Server server;
  AdminHttp::Options options;
  options.listen = server.http->address();
  const auto second = AdminHttp::Start(options);
  REQUIRE_FALSE(second.ok());
  CHECK_THAT(std::string(second.status().message()),
             Catch::Contains(server.http->address()) && Catch::Contains("in use"));
}

}  // namespace
}  // namespace sluice
