#include "src/server/security.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/server/ranks.h"
#include "src/service/wire/host_port.h"

namespace sluice {
namespace {

// Logs one line at the start, so that nobody finds out later that a node was open to a network.
void WarnWhereOpen(const Config& config) {
  std::vector<std::string> open;
  const bool first = config.rank() == 0;
  const std::string leader = MeetByGrpc(config) && first ? config.leader() : "";
  for (const std::string& address :
       {first ? config.listen() : config.rank_ingest_listen(), config.admin_listen(), leader}) {
    if (address.empty()) continue;
    const auto parsed = ParseHostPort(address);
    if (parsed.ok() && !IsLoopback(parsed->host)) open.push_back(address);
  }
  if (open.empty()) return;
  Log(LogLevel::kWarn,
      "NO TLS: every machine that reaches this node may read and change everything on it; give "
      "tls_cert, tls_key, tls_ca and access_file, or listen on 127.0.0.1",
      {{"listen", absl::StrJoin(open, ", ")}});
}

}  // namespace

TlsFiles TlsFilesOf(const Config& config) {
  return {config.tls_cert(), config.tls_key(), config.tls_ca(),
          config.tls_client_certificate() == "required",
          absl::Seconds(config.security_reload_seconds())};
}

absl::StatusOr<Security> SetUpSecurity(const Config& config) {
  Security out;
  out.tls = TlsFilesOf(config);
  if (config.tls_cert().empty() != config.tls_key().empty()) {
    return absl::InvalidArgumentError("tls_cert and tls_key go together: give both or neither");
  }
  if (!out.tls.enabled() && !config.tls_ca().empty()) {
    return absl::InvalidArgumentError(
        "tls_ca needs tls_cert and tls_key: without them there is no TLS");
  }
  const bool have_file = !config.access_file().empty();
  if (out.tls.enabled()) {
    if (!have_file) {
      return absl::InvalidArgumentError(
          "access_file is required with tls_cert: it says which callers may do what, and without "
          "it nobody may do anything");
    }
    SLUICE_RETURN_IF_ERROR(CheckTlsFiles(out.tls));
  }
  if (have_file) {
    SLUICE_ASSIGN_OR_RETURN(out.file, Access::Open(config.access_file(), out.tls.reload));
    if (!out.tls.enabled() && out.file->KnowsCallers()) {
      return absl::InvalidArgumentError(
          "access_file: certificates and tokens need tls_cert and tls_key, since without TLS they "
          "would protect nothing; without TLS the file may have tenants alone");
    }
  }
  if (!out.tls.enabled()) WarnWhereOpen(config);
  return out;
}

}  // namespace sluice
