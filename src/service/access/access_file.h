// The access file says who is let in with which roles, and what each tenant may have. JSON:
//
//   {"certificates": [{"identity": "cn:prefill-*", "roles": ["prefill"]},
//                     {"identity": "uri:spiffe://cluster/router", "roles": ["router"],
//                      "tenant": "acme"}],
//    "tokens":       [{"name": "alice", "sha256": "<64 hex digits>", "roles": ["router"],
//                      "tenant": "acme"}],
//    "tenants":      {"acme": {"sequences": 8, "dram_bytes": "4GiB", "tokens_per_second": 500},
//                     "*":    {"sequences": 2}}}
//
// An identity is cn:, dns:, uri:, ip: or email: and a pattern in which * stands for any characters.
// A certificate has the roles of every entry that it matches. The file holds tokens as SHA-256
// hashes only. "*" among the tenants stands for each tenant that is not named.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "src/request/tenant_quota.h"
#include "src/service/access/caller.h"

namespace sluice {

struct AccessRules {
  struct Certificate {
    std::string pattern;
    Caller caller;  // without identity
  };
  std::vector<Certificate> certificates;
  absl::flat_hash_map<std::string, Caller> tokens;  // by Sha256Hex
  std::map<std::string, TenantQuota> tenants;
};

inline constexpr int64_t kMaxAccessFileBytes = int64_t{4} << 20;

// Reads and parses the file. The error names the file and the key, and never quotes a value that
// may be a secret.
absl::StatusOr<AccessRules> ReadAccessFile(const std::string& path);
// Parses the text of an access file. `name` is for messages.
absl::StatusOr<AccessRules> ParseAccessRules(const std::string& text, const std::string& name);

// Returns whether `text` matches `pattern`, in which * stands for any number of any characters.
bool MatchesPattern(std::string_view pattern, std::string_view text);

}  // namespace sluice
