#include "src/service/access/credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <algorithm>

#include "src/base/status_macros.h"
#include "src/service/access/access.h"

namespace sluice {
namespace {

namespace ge = grpc::experimental;

std::shared_ptr<ge::CertificateProviderInterface> NewProvider(const TlsFiles& files) {
  const auto seconds =
      static_cast<unsigned>(std::max<int64_t>(1, absl::ToInt64Seconds(files.reload)));
  return std::make_shared<ge::FileWatcherCertificateProvider>(files.key, files.cert, files.ca,
                                                              seconds);
}

}  // namespace

std::shared_ptr<grpc::ServerCredentials> NewServerCredentials(const TlsFiles& files,
                                                              const Access* access,
                                                              AccessLog* log) {
  if (!files.enabled()) return grpc::InsecureServerCredentials();
  SLUICE_CHECK(access != nullptr);
  ge::TlsServerCredentialsOptions options(NewProvider(files));
  options.watch_identity_key_cert_pairs();
  if (files.ca.empty()) {
    options.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  } else {
    options.watch_root_certs();
    options.set_cert_request_type(files.require_client_certificate
                                      ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                      : GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  const std::shared_ptr<grpc::ServerCredentials> out = ge::TlsServerCredentials(options);
  out->SetAuthMetadataProcessor(NewAccessProcessor(access, log));
  return out;
}

std::shared_ptr<grpc::ChannelCredentials> NewChannelCredentials(const TlsFiles& files) {
  if (!files.enabled()) return grpc::InsecureChannelCredentials();
  ge::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(NewProvider(files));
  options.watch_identity_key_cert_pairs();
  if (!files.ca.empty()) options.watch_root_certs();
  return ge::TlsCredentials(options);
}

}  // namespace sluice
