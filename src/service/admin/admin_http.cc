// This is the only file that includes Boost.Beast, which takes a minute to compile.
#include "src/service/admin/admin_http.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/ssl/ssl_stream.hpp>
#include <chrono>
#include <exception>
#include <list>
#include <optional>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/service/access/access.h"
#include "src/service/access/access_rules.h"
#include "src/service/wire/host_port.h"

namespace sluice {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using tcp = asio::ip::tcp;
using boost::system::error_code;

// Returns OK if the caller may read `path`. Probes always may, because they come without a
// certificate.
absl::Status MayRead(const http::request<http::empty_body>& request, const std::string& path,
                     const AdminHttp::Options& options,
                     const std::vector<std::string>& identities) {
  if (options.access == nullptr || path != "/metrics") return absl::OkStatus();
  Access::Shown shown;
  shown.identities = identities;
  shown.authorization = std::string(request[http::field::authorization]);
  return options.access->Check(shown, kMetricsRoles, path);
}

// Answers one request. `identities` are those of the caller's certificate.
http::response<http::string_body> Handle(const http::request<http::empty_body>& request,
                                         const AdminHttp::Options& options,
                                         const std::vector<std::string>& identities) {
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
  } else if (const absl::Status allowed = MayRead(request, path, options, identities);
             !allowed.ok()) {
    text(absl::IsUnauthenticated(allowed) ? http::status::unauthorized : http::status::forbidden,
         absl::StrCat(allowed.message(), "\n"));
    if (absl::IsUnauthenticated(allowed)) response.set(http::field::www_authenticate, "Bearer");
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

// Returns an answer whatever a handler throws, because the one thread serves all connections.
http::response<http::string_body> Answer(const http::request<http::empty_body>& request,
                                         const AdminHttp::Options& options,
                                         const std::vector<std::string>& identities) {
  try {
    return Handle(request, options, identities);
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

using Tls = beast::ssl_stream<beast::tcp_stream>;

// One connection. `open` lists all connections, and the one that has been without a whole request
// for longest comes first.
class Connection {
 public:
  explicit Connection(std::list<Connection*>* open) : open_(open) {
    place_ = open_->insert(open_->end(), this);
  }
  virtual ~Connection() { open_->erase(place_); }

  // Closes the connection at once, whatever is under way.
  void Drop() {
    // The connection is no longer the first to drop, although it is there until its operation has
    // ended.
    MoveToEnd();
    Abort();
  }

 protected:
  void MoveToEnd() { open_->splice(open_->end(), *open_, place_); }
  virtual void Abort() = 0;

 private:
  std::list<Connection*>* const open_;
  std::list<Connection*>::iterator place_;
};

// A session that its pending operation keeps alive. Stream is beast::tcp_stream, or Tls upon it.
template <typename Stream>
class Session : public Connection, public std::enable_shared_from_this<Session<Stream>> {
 public:
  template <typename... TlsContext>
  Session(tcp::socket socket, const AdminHttp::Options& options, std::list<Connection*>* open,
          TlsContext&... context)
      : Connection(open), stream_(std::move(socket), context...), options_(options) {}

  void Start() {
    if constexpr (std::is_same_v<Stream, Tls>) {
      Expire();
      stream_.async_handshake(
          asio::ssl::stream_base::server, [self = this->shared_from_this()](error_code error) {
            if (error) return;  // plain text, another authority's certificate, or nothing in time
            X509* certificate = SSL_get0_peer_certificate(self->stream_.native_handle());
            if (certificate != nullptr) self->identities_ = IdentitiesOf(certificate);
            self->Read();
          });
    } else {
      Read();
    }
  }

 private:
  void Read() {
    MoveToEnd();
    parser_.emplace();
    parser_->header_limit(static_cast<uint32_t>(options_.max_header_bytes));
    parser_->body_limit(0);
    Expire();
    http::async_read(
        stream_, buffer_, *parser_,
        [self = this->shared_from_this()](error_code error, size_t) { self->OnRead(error); });
  }

  void Expire() {
    beast::get_lowest_layer(stream_).expires_after(absl::ToChronoMilliseconds(options_.timeout));
  }

  void Abort() override { beast::get_lowest_layer(stream_).close(); }

  void OnRead(error_code error) {
    if (error && error.category() != http::make_error_code(http::error::bad_target).category()) {
      return;  // closed or timed out: there is nobody to answer
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
      response_ = Answer(parser_->get(), options_, identities_);
    }
    Expire();
    http::async_write(stream_, response_,
                      [self = this->shared_from_this()](error_code failed, size_t) {
                        if (failed) return;
                        if (self->response_.keep_alive()) {
                          self->Read();
                        } else {
                          self->Close();
                        }
                      });
  }

  void Close() {
    if constexpr (std::is_same_v<Stream, Tls>) {
      Expire();
      stream_.async_shutdown([self = this->shared_from_this()](error_code) {});
    } else {
      error_code ignored;
      stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
    }
  }

  Stream stream_;
  const AdminHttp::Options& options_;
  std::vector<std::string> identities_;  // from the caller's certificate
  beast::flat_buffer buffer_{16 << 10};  // at most: a header and what is read ahead of the next
  std::optional<http::request_parser<http::empty_body>> parser_;
  http::response<http::string_body> response_;
};

// The certificates as they are on disk. If they cannot be used, the last ones that could.
class TlsContexts {
 public:
  explicit TlsContexts(const TlsFiles& files) : files_(files) {}

  // Loads the files. The error names the file.
  absl::Status Load() {
    looked_ = absl::Now();
    seen_ = Version();
    SLUICE_RETURN_IF_ERROR(CheckTlsFiles(files_));
    auto context = std::make_shared<asio::ssl::context>(asio::ssl::context::tls_server);
    SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
    error_code error;
    context->use_certificate_chain_file(files_.cert, error);
    if (!error) context->use_private_key_file(files_.key, asio::ssl::context::pem, error);
    if (!error && !files_.ca.empty()) {
      context->load_verify_file(files_.ca, error);
      // A certificate is asked for and not required, since probes have none.
      context->set_verify_mode(asio::ssl::verify_peer);
    }
    if (error) return absl::InvalidArgumentError(absl::StrCat("TLS: ", error.message()));
    context_ = std::move(context);
    return absl::OkStatus();
  }

  std::shared_ptr<asio::ssl::context> Get() {
    if (absl::Now() - looked_ >= files_.reload) {
      looked_ = absl::Now();
      if (Version() != seen_) {
        const absl::Status loaded = Load();
        if (!loaded.ok()) {
          Log(LogLevel::kError, "new certificates cannot be used: those before them stay",
              {{"error", std::string(loaded.message())}});
        }
      }
    }
    return context_;
  }

 private:
  std::string Version() const {
    std::string out;
    for (const std::string& path : {files_.cert, files_.key, files_.ca}) {
      absl::StrAppend(&out, FileVersion(path), " ");
    }
    return out;
  }

  const TlsFiles files_;
  absl::Time looked_;
  std::string seen_;
  std::shared_ptr<asio::ssl::context> context_;
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
    if (options_.tls.enabled()) {
      contexts_.emplace(options_.tls);
      SLUICE_RETURN_IF_ERROR(contexts_->Load());
    }
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
        // The process is most likely out of file descriptors. One will come back, but not by asking
        // at once.
        pause_.expires_after(std::chrono::milliseconds(100));
        pause_.async_wait([this](error_code ended) {
          if (!ended) Accept();
        });
        return;
      }
      // Its operation ends with an error, and with that the session.
      if (open_.size() >= options_.max_connections) open_.front()->Drop();
      if (contexts_.has_value()) {
        // A connection has what it needs of its context, which may go when another comes.
        std::make_shared<Session<Tls>>(std::move(socket), options_, &open_, *contexts_->Get())
            ->Start();
      } else {
        std::make_shared<Session<beast::tcp_stream>>(std::move(socket), options_, &open_)->Start();
      }
      Accept();
    });
  }

  const Options options_;
  std::string address_;
  std::optional<TlsContexts> contexts_;
  std::list<Connection*> open_;  // before io_, whose pending operations own them
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
