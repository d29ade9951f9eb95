// The files from which a node takes its certificates, and a look at them before they are used.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

struct x509_st;
using X509 = x509_st;

namespace sluice {

struct TlsFiles {
  std::string cert;  // PEM: this node's certificate, then those that issued it; empty: no TLS
  std::string key;   // PEM: the private key of it, without a passphrase
  // PEM: who issues the certificates of callers, and of the nodes that this one calls. Empty:
  // callers are not asked for one, and the nodes called must be known to the system's own list.
  std::string ca;
  bool require_client_certificate = true;  // false: callers may come with a token instead
  // How often the files are looked at.
  absl::Duration reload = absl::Seconds(10);
  bool enabled() const { return !cert.empty(); }
};

// Whether a server can be started with them: PEM that can be read, a key that belongs to the
// certificate, a certificate that is in its time. The error names the file; it never has its text.
absl::Status CheckTlsFiles(const TlsFiles& files);

// What a certificate calls its owner: "cn:", "dns:", "uri:", "email:" and the name, of its subject
// and its subject alternative names. Names with a zero byte are left out.
std::vector<std::string> IdentitiesOf(X509* certificate);

// What tells one version of a file from another; empty: it is not there.
std::string FileVersion(const std::string& path);

// Whether nobody but this machine reaches the host: 127.0.0.0/8, ::1, localhost.
bool IsLoopback(const std::string& host);

}  // namespace sluice
