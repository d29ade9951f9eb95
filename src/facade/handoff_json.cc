#include "src/facade/handoff_json.h"

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr size_t kMaxBytes = 4096;  // our own JSON has about 200

// Returns the object, which is empty if the field is absent or empty.
absl::StatusOr<nlohmann::json> Parsed(const HandoffJson& json) {
  if (!json.given || json.text.empty()) return nlohmann::json::object();
  if (json.text.size() > kMaxBytes) {
    return InvalidField(json.field,
                        absl::StrCat("at most ", kMaxBytes, " bytes, found ", json.text.size()));
  }
  auto parsed =
      ParseJsonObject(json.text.data(), static_cast<int64_t>(json.text.size()), json.field);
  if (parsed.ok()) return parsed;
  // The message begins with the field already.
  return WithField(InvalidField("", std::string(parsed.status().message())), json.field);
}

// Returns a boolean of the object, which is false if it is absent or null.
absl::StatusOr<bool> Flag(const HandoffJson& json, const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return false;
  if (found->is_boolean()) return found->get<bool>();
  return InvalidField(json.field,
                      absl::StrCat(key, ": expected true or false, found ", ShownJson(*found)));
}

// Reads what vLLM's connector answers (tools/sluice_client/vllm_connector): {"connector", "decode",
// "transfer_id"} for a prompt that it pushed to the node `decode`, and {"connector", "error"} for
// one that it could not hand over.
absl::Status ReadPushed(const HandoffJson& json, const nlohmann::json& object, Request* request) {
  for (const auto& [key, value] : object.items()) {
    if (key != "connector" && key != "decode" && key != "transfer_id" && key != "error") {
      return InvalidField(absl::StrCat(json.field, ".", key.substr(0, 64)), "is not known here");
    }
    if (!value.is_string()) {
      return InvalidField(absl::StrCat(json.field, ".", key), "is not a string");
    }
  }
  if (object.value("connector", "") != kSourceConnector) {
    return InvalidField(absl::StrCat(json.field, ".connector"),
                        absl::StrCat("expected \"", kSourceConnector, "\""));
  }
  if (object.contains("error")) {
    request->handoff_error = object["error"].get<std::string>();
    return absl::OkStatus();
  }
  request->handoff.transfer_id = object["transfer_id"].get<std::string>();
  if (!request->handoff.transfer_id.empty()) return absl::OkStatus();
  return InvalidField(absl::StrCat(json.field, ".transfer_id"), "is empty");
}

}  // namespace

absl::Status ReadDecodeLeg(const HandoffJson& json, Request* request) {
  SLUICE_ASSIGN_OR_RETURN(const nlohmann::json object, Parsed(json));
  SLUICE_ASSIGN_OR_RETURN(const bool hold, Flag(json, object, "do_remote_decode"));
  if (hold) {
    return InvalidField(json.field,
                        "do_remote_decode: this is a decode node, which hands nothing over");
  }
  SLUICE_ASSIGN_OR_RETURN(const bool pull, Flag(json, object, "do_remote_prefill"));
  const size_t flags = object.count("do_remote_decode") + object.count("do_remote_prefill");
  if (object.size() == flags && !pull) return absl::OkStatus();
  if (object.contains("transfer_id") || object.contains("error")) {
    return ReadPushed(json, object, request);
  }
  SLUICE_ASSIGN_OR_RETURN(request->handoff.source, SourceRefFromJson(json.text, json.field));
  return absl::OkStatus();
}

absl::Status CheckAsksToHold(const HandoffJson& json) {
  SLUICE_ASSIGN_OR_RETURN(const nlohmann::json object, Parsed(json));
  SLUICE_ASSIGN_OR_RETURN(const bool hold, Flag(json, object, "do_remote_decode"));
  SLUICE_ASSIGN_OR_RETURN(const bool pull, Flag(json, object, "do_remote_prefill"));
  if (pull) {
    return InvalidField(json.field,
                        "do_remote_prefill: this is a prefill node, which takes no caches");
  }
  if (hold || object.empty()) return absl::OkStatus();
  return InvalidField(json.field,
                      "this is a prefill node: it needs {\"do_remote_decode\": true}, and a decode "
                      "node that goes on with its answer");
}

}  // namespace sluice
