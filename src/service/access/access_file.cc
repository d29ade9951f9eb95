#include "src/service/access/access_file.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "src/base/json_file.h"
#include "src/base/nearest_name.h"
#include "src/base/status_macros.h"
#include "src/config/units.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr size_t kMaxTextBytes = 512;    // maximum of an identity or a name
constexpr size_t kMaxTenantBytes = 128;  // as in messages: kMaxNameBytes of the transfer table

absl::Status Wrong(const std::string& where, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", what));
}

absl::Status CheckKeys(const std::string& where, const json& object,
                       std::initializer_list<const char*> known) {
  if (!object.is_object()) return Wrong(where, "expected an object");
  for (const auto& [key, value] : object.items()) {
    const std::vector<std::string> names(known.begin(), known.end());
    if (std::find(names.begin(), names.end(), key) == names.end()) {
      return Wrong(where, absl::StrCat("unknown key ", Shown(key), DidYouMean(key, names)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Text(const std::string& where, const json& object, const char* key,
                                 bool required, size_t max_bytes) {
  const auto found = object.find(key);
  if (found == object.end() && !required) return std::string();
  const bool good = found != object.end() && found->is_string() &&
                    !found->get_ref<const std::string&>().empty() &&
                    found->get_ref<const std::string&>().size() <= max_bytes;
  if (!good) {
    return Wrong(absl::StrCat(where, ".", key),
                 absl::StrCat("expected a text of 1 to ", max_bytes, " bytes"));
  }
  return found->get<std::string>();
}

// Returns the roles and the tenant of an entry.
absl::StatusOr<Caller> ReadCaller(const std::string& where, const json& entry) {
  Caller out;
  const auto roles = entry.find("roles");
  if (roles == entry.end() || !roles->is_array() || roles->empty()) {
    return Wrong(absl::StrCat(where, ".roles"),
                 absl::StrCat("expected a list of ", Roles::All().ToString()));
  }
  for (const json& role : *roles) {
    const std::optional<Role> known =
        role.is_string() ? ParseRole(role.get_ref<const std::string&>()) : std::nullopt;
    if (!known.has_value()) {
      return Wrong(absl::StrCat(where, ".roles"),
                   absl::StrCat("a role is one of ", Roles::All().ToString()));
    }
    out.roles.Add(*known);
  }
  SLUICE_ASSIGN_OR_RETURN(out.tenant, Text(where, entry, "tenant", false, kMaxTenantBytes));
  if (out.tenant.find('/') != std::string::npos) {
    return Wrong(absl::StrCat(where, ".tenant"), "a tenant has no slash in its name");
  }
  return out;
}

absl::StatusOr<AccessRules::Certificate> ReadCertificate(const std::string& where,
                                                         const json& entry) {
  SLUICE_RETURN_IF_ERROR(CheckKeys(where, entry, {"identity", "roles", "tenant"}));
  AccessRules::Certificate out;
  SLUICE_ASSIGN_OR_RETURN(out.pattern, Text(where, entry, "identity", true, kMaxTextBytes));
  constexpr std::array<std::string_view, 5> kKinds = {"cn:", "dns:", "uri:", "ip:", "email:"};
  if (std::none_of(kKinds.begin(), kKinds.end(), [&](std::string_view kind) {
        return out.pattern.starts_with(kind) && out.pattern.size() > kind.size();
      })) {
    return Wrong(absl::StrCat(where, ".identity"),
                 "expected cn:, dns:, uri:, ip: or email: and a pattern");
  }
  SLUICE_ASSIGN_OR_RETURN(out.caller, ReadCaller(where, entry));
  return out;
}

absl::StatusOr<std::pair<std::string, Caller>> ReadToken(const std::string& where,
                                                         const json& entry) {
  if (entry.is_object() && entry.contains("token")) {
    return Wrong(where, "a token itself does not belong here: give its \"sha256\", in hex digits");
  }
  SLUICE_RETURN_IF_ERROR(CheckKeys(where, entry, {"name", "sha256", "roles", "tenant"}));
  SLUICE_ASSIGN_OR_RETURN(const std::string name, Text(where, entry, "name", true, kMaxTextBytes));
  SLUICE_ASSIGN_OR_RETURN(const std::string hex, Text(where, entry, "sha256", true, 64));
  if (hex.size() != 64 || hex.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
    return Wrong(absl::StrCat(where, ".sha256"), "expected 64 hex digits");
  }
  SLUICE_ASSIGN_OR_RETURN(Caller caller, ReadCaller(where, entry));
  caller.identity = absl::StrCat("token:", name);
  return std::pair(absl::AsciiStrToLower(hex), std::move(caller));
}

absl::StatusOr<uint64_t> Count(const std::string& where, const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return 0;
  if (!found->is_number_unsigned() || found->get<uint64_t>() == 0) {
    return Wrong(absl::StrCat(where, ".", key), "expected a whole number above 0");
  }
  return found->get<uint64_t>();
}

absl::StatusOr<TenantQuota> ReadQuota(const std::string& where, const json& entry) {
  SLUICE_RETURN_IF_ERROR(CheckKeys(where, entry, {"sequences", "dram_bytes", "tokens_per_second"}));
  TenantQuota out;
  SLUICE_ASSIGN_OR_RETURN(out.sequences, Count(where, entry, "sequences"));
  SLUICE_ASSIGN_OR_RETURN(out.tokens_per_second, Count(where, entry, "tokens_per_second"));
  const auto bytes = entry.find("dram_bytes");
  if (bytes != entry.end() && bytes->is_string()) {
    const std::optional<uint64_t> parsed = ParseBytes(bytes->get_ref<const std::string&>());
    if (!parsed.has_value() || *parsed == 0) {
      return Wrong(absl::StrCat(where, ".dram_bytes"), "expected a count of bytes, such as 4GiB");
    }
    out.dram_bytes = *parsed;
  } else {
    SLUICE_ASSIGN_OR_RETURN(out.dram_bytes, Count(where, entry, "dram_bytes"));
  }
  return out;
}

// Returns the list under `key`, or an empty one.
absl::StatusOr<json> List(const std::string& name, const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return json::array();
  if (!found->is_array()) return Wrong(absl::StrCat(name, ": ", key), "expected a list");
  return *found;
}

absl::StatusOr<AccessRules> FromJson(const json& object, const std::string& name) {
  SLUICE_RETURN_IF_ERROR(CheckKeys(name, object, {"certificates", "tokens", "tenants"}));
  AccessRules out;
  SLUICE_ASSIGN_OR_RETURN(const json certificates, List(name, object, "certificates"));
  for (size_t i = 0; i < certificates.size(); ++i) {
    SLUICE_ASSIGN_OR_RETURN(
        AccessRules::Certificate certificate,
        ReadCertificate(absl::StrCat(name, ": certificates[", i, "]"), certificates[i]));
    out.certificates.push_back(std::move(certificate));
  }
  SLUICE_ASSIGN_OR_RETURN(const json tokens, List(name, object, "tokens"));
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string where = absl::StrCat(name, ": tokens[", i, "]");
    SLUICE_ASSIGN_OR_RETURN(auto token, ReadToken(where, tokens[i]));
    if (!out.tokens.insert(std::move(token)).second) {
      return Wrong(absl::StrCat(where, ".sha256"), "is the hash of a token before it");
    }
  }
  if (const auto tenants = object.find("tenants"); tenants != object.end()) {
    if (!tenants->is_object()) return Wrong(absl::StrCat(name, ": tenants"), "expected an object");
    for (const auto& [tenant, quota] : tenants->items()) {
      const std::string where = absl::StrCat(name, ": tenants.", Shown(tenant));
      if (tenant.size() > kMaxTenantBytes) {
        return Wrong(where, absl::StrCat("a tenant has at most ", kMaxTenantBytes, " bytes"));
      }
      SLUICE_ASSIGN_OR_RETURN(out.tenants[tenant], ReadQuota(where, quota));
    }
  }
  return out;
}

}  // namespace

absl::StatusOr<AccessRules> ParseAccessRules(const std::string& text, const std::string& name) {
  SLUICE_ASSIGN_OR_RETURN(const json object,
                          ParseJsonObject(text.data(), static_cast<int64_t>(text.size()), name));
  return FromJson(object, name);
}

absl::StatusOr<AccessRules> ReadAccessFile(const std::string& path) {
  SLUICE_ASSIGN_OR_RETURN(const json object, ReadJsonFile(path, kMaxAccessFileBytes));
  return FromJson(object, path);
}

bool MatchesPattern(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0;
  size_t star = std::string_view::npos, taken = 0;  // the last *, and how far it has been tried
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++taken;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace sluice
