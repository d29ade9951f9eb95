#include "src/request/source_ref.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr size_t kMaxAddressBytes = 256;
constexpr size_t kIdDigits = 32;
constexpr size_t kDigestDigits = 64;

absl::Status CheckHex(const std::string& field, const std::string& value, size_t digits) {
  if (value.size() == digits && std::all_of(value.begin(), value.end(), absl::ascii_isxdigit)) {
    return absl::OkStatus();
  }
  return InvalidField(field,
                      absl::StrCat("expected ", digits, " hexadecimal digits, found ", value.size(),
                                   " bytes: pass on what the prefill node "
                                   "answered, as it is"));
}

}  // namespace

std::string PromptDigest(absl::Span<const int32_t> prompt) {
  Sha256 sha;
  for (const int32_t id : prompt) {
    const auto value = static_cast<uint32_t>(id);
    const uint8_t bytes[] = {static_cast<uint8_t>(value), static_cast<uint8_t>(value >> 8),
                             static_cast<uint8_t>(value >> 16), static_cast<uint8_t>(value >> 24)};
    sha.Update(bytes, sizeof bytes);
  }
  return sha.Hex();
}

absl::Status CheckSourceRef(const SourceRef& ref, const std::string& field) {
  if (ref.address.empty()) return InvalidField(absl::StrCat(field, ".address"), "is missing");
  if (ref.address.size() > kMaxAddressBytes) {
    return InvalidField(
        absl::StrCat(field, ".address"),
        absl::StrCat("at most ", kMaxAddressBytes, " bytes, found ", ref.address.size()));
  }
  if (!ref.room.has_value()) {
    SLUICE_RETURN_IF_ERROR(CheckHex(absl::StrCat(field, ".source_id"), ref.source_id, kIdDigits));
  }
  if (!ref.prompt_digest.empty()) {
    SLUICE_RETURN_IF_ERROR(
        CheckHex(absl::StrCat(field, ".prompt_digest"), ref.prompt_digest, kDigestDigits));
  }
  if (!ref.model_fingerprint.empty()) {
    SLUICE_RETURN_IF_ERROR(
        CheckHex(absl::StrCat(field, ".model_fingerprint"), ref.model_fingerprint, kDigestDigits));
  }
  return absl::OkStatus();
}

std::string ToJson(const SourceRef& ref) {
  return nlohmann::json({{"connector", kSourceConnector},
                         {"address", ref.address},
                         {"source_id", ref.source_id},
                         {"prompt_digest", ref.prompt_digest},
                         {"model_fingerprint", ref.model_fingerprint}})
      .dump();
}

absl::StatusOr<SourceRef> SourceRefFromJson(const std::string& json, const std::string& field) {
  const nlohmann::json parsed = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) {
    return InvalidField(field, "is no JSON object: pass on what the prefill node answered");
  }
  const auto connector = parsed.find("connector");
  if (connector == parsed.end() || !connector->is_string() || *connector != kSourceConnector) {
    return InvalidField(
        absl::StrCat(field, ".connector"),
        absl::StrCat("expected \"", kSourceConnector, "\", found ",
                     connector == parsed.end()
                         ? "none"
                         : connector->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)
                               .substr(0, 64),
                     ": this handoff does not come from sluice-prefill"));
  }
  SourceRef ref;
  const std::vector<std::pair<const char*, std::string*>> fields = {
      {"address", &ref.address},
      {"source_id", &ref.source_id},
      {"prompt_digest", &ref.prompt_digest},
      {"model_fingerprint", &ref.model_fingerprint}};
  for (const auto& [key, value] : parsed.items()) {
    if (key == "connector") continue;
    const auto known = std::find_if(fields.begin(), fields.end(),
                                    [k = &key](const auto& entry) { return *k == entry.first; });
    if (known == fields.end()) {
      return InvalidField(absl::StrCat(field, ".", key.substr(0, 64)), "is not known here");
    }
    if (!value.is_string()) {
      return InvalidField(absl::StrCat(field, ".", key), "is not a string");
    }
    *known->second = value.get<std::string>();
  }
  SLUICE_RETURN_IF_ERROR(CheckSourceRef(ref, field));
  return ref;
}

}  // namespace sluice
