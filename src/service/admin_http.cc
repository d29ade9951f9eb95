// The only file that includes Boost.Beast, which takes a minute to compile.
#include "src/service/admin_http.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <exception>
#include <list>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/service/host_port.h"

namespace sluice {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using tcp = asio::ip::tcp;
using boost::system::error_code;

http::response<http::string_body> Handle(const http::request<http::empty_body>& request,
                                         const AdminHttp::Options& options) {
  if (SLUICE_FAILPOINT(kAdminHttp)) throw std::runtime_error("failpoint admin.http");
  http::response<http::string_body> response;
  response.version(request.version());
  response.keep_alive(request.keep_alive());
  const auto text = [&](http::status status, std::string body) {
    response.result(status);
    response.set(http::field::content_type, "text/plain; charset=utf-8");
    response.body() = std::move(body);
  };
  const std::string target(request.target());
  const std::string path = target.substr(0, target.find('?'));
  const bool known = path == "/metrics" || path == "/healthz" || path == "/readyz";
  if (!known) {
    text(http::status::not_found, "not found: /metrics, /healthz and /readyz are\n");
  } else if (request.method() != http::verb::get && request.method() != http::verb::head) {
    text(http::status::method_not_allowed, "use GET\n");
    response.set(http::field::allow, "GET, HEAD");
  } else if (path == "/metrics") {
    text(http::status::ok, options.metrics());
    response.set(http::field::content_type, "text/plain; version=0.0.4; charset=utf-8");
  } else if (path == "/healthz") {
    text(http::status::ok, "ok\n");
  } else if (options.ready()) {
    text(http::status::ok, "ready\n");
  } else {
    text(http::status::service_unavailable, "not ready\n");
  }
  response.prepare_payload();
  if (request.method() == http::verb::head) response.body().clear();  // the length stays
  return response;
}

// An answer, whatever a handler throws: the one thread serves all connections.
http::response<http::string_body> Answer(const http::request<http::empty_body>& request,
                                         const AdminHttp::Options& options) {
  try {
    return Handle(request, options);
  } catch (const std::exception& error) {
    Log(LogLevel::kError, "an admin request failed",
        {{"target", std::string(request.target())}, {"error", error.what()}});
    http::response<http::string_body> response(http::status::internal_server_error,
                                               request.version());
    response.set(http::field::content_type, "text/plain; charset=utf-8");
    response.keep_alive(request.keep_alive());
    if (request.method() != http::verb::head) response.body() = "internal error: see the log\n";
    response.prepare_payload();
    return response;
  }
}

// One connection; kept alive by its pending operation. `open` lists all of them, the one that has
// been without a whole request for longest first.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(tcp::socket socket, const AdminHttp::Options& options, std::list<Session*>* open)
      : stream_(std::move(socket)), options_(options), open_(open) {
    place_ = open_->insert(open_->end(), this);
  }
  ~Session() { open_->erase(place_); }

  void Read() {
    open_->splice(open_->end(), *open_, place_);
    parser_.emplace();
    parser_->header_limit(static_cast<uint32_t>(options_.max_header_bytes));
    parser_->body_limit(0);
    stream_.expires_after(absl::ToChronoMilliseconds(options_.timeout));
    http::async_read(
        stream_, buffer_, *parser_,
        [self = shared_from_this()](error_code error, size_t) { self->OnRead(error); });
  }

  // Closes the connection at once, whatever is under way.
  void Drop() {
    // No longer the one to drop, although it is there until its operation has ended.
    open_->splice(open_->end(), *open_, place_);
    stream_.close();
  }

 private:
  void OnRead(error_code error) {
    if (error && error.category() != http::make_error_code(http::error::bad_target).category()) {
      return;  // closed, timed out: nobody to answer
    }
    if (error == http::error::end_of_stream || error == http::error::partial_message) {
      return Close();
    }
    if (error) {
      response_ = {};
      response_.result(error == http::error::body_limit ? http::status::payload_too_large
                       : error == http::error::header_limit
                           ? http::status::request_header_fields_too_large
                           : http::status::bad_request);
      response_.set(http::field::content_type, "text/plain; charset=utf-8");
      response_.keep_alive(false);
      response_.body() = absl::StrCat("bad request: ", error.message(), "\n");
      response_.prepare_payload();
    } else {
      response_ = Answer(parser_->get(), options_);
    }
    stream_.expires_after(absl::ToChronoMilliseconds(options_.timeout));
    http::async_write(stream_, response_, [self = shared_from_this()](error_code failed, size_t) {
      if (failed) return;
      if (self->response_.keep_alive()) {
        self->Read();
      } else {
        self->Close();
      }
    });
  }

  void Close() {
    error_code ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
  }

  beast::tcp_stream stream_;
  const AdminHttp::Options& options_;
  std::list<Session*>* const open_;
  std::list<Session*>::iterator place_;
  beast::flat_buffer buffer_{16 << 10};  // at most: a header and what is read ahead of the next
  std::optional<http::request_parser<http::empty_body>> parser_;
  http::response<http::string_body> response_;
};

class BeastAdminHttp final : public AdminHttp {
 public:
  explicit BeastAdminHttp(Options options) : options_(std::move(options)), acceptor_(io_) {}

  ~BeastAdminHttp() override {
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Listen() {
    SLUICE_ASSIGN_OR_RETURN(HostPort address, ParseHostPort(options_.listen));
    const auto fail = [&](const error_code& error) {
      return absl::UnavailableError(
          absl::StrCat("cannot listen on ", address.ToString(), ": ", error.message()));
    };
    error_code error;
    tcp::resolver resolver(io_);
    const auto found =
        resolver.resolve(address.host, std::to_string(address.port), tcp::resolver::passive, error);
    if (error) return fail(error);
    const tcp::endpoint endpoint = found.begin()->endpoint();
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error) return fail(error);
    address.port = acceptor_.local_endpoint().port();
    address_ = address.ToString();
    Accept();
    thread_ = std::thread([this] { io_.run(); });
    return absl::OkStatus();
  }

  const std::string& address() const override { return address_; }

 private:
  void Accept() {
    acceptor_.async_accept([this](error_code error, tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (error) {
        // Out of file descriptors, most likely: one will come back, but not by asking at once.
        pause_.expires_after(std::chrono::milliseconds(100));
        pause_.async_wait([this](error_code ended) {
          if (!ended) Accept();
        });
        return;
      }
      // Its operation ends with an error, and with that the session.
      if (open_.size() >= options_.max_connections) open_.front()->Drop();
      std::make_shared<Session>(std::move(socket), options_, &open_)->Read();
      Accept();
    });
  }

  const Options options_;
  std::string address_;
  std::list<Session*> open_;  // before io_, whose pending operations own them
  asio::io_context io_{1};
  tcp::acceptor acceptor_;
  asio::steady_timer pause_{io_};  // before the next accept, after one failed
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<AdminHttp>> AdminHttp::Start(Options options) {
  auto out = std::make_unique<BeastAdminHttp>(std::move(options));
  SLUICE_RETURN_IF_ERROR(out->Listen());
  return out;
}

}  // namespace sluice
