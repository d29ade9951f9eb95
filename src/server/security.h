// A node's TLS files, and the file with its callers and tenants.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/service/access/access.h"
#include "src/service/access/tls_files.h"

namespace sluice {

struct Security {
  TlsFiles tls;
  std::unique_ptr<Access> file;  // null: no access_file
  // Checks calls; null: without TLS every caller may do everything.
  const Access* access() const { return tls.enabled() ? file.get() : nullptr; }
};

TlsFiles TlsFilesOf(const Config& config);

// Reads and checks the files. Logs a warning if the node would listen to other machines without
// TLS. The error names the setting.
absl::StatusOr<Security> SetUpSecurity(const Config& config);

}  // namespace sluice
