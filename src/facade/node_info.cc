#include "src/facade/node_info.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "src/base/json_file.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Returns 0 if the key is absent, a list or null, as in some models: the id is for people.
int32_t TokenIdOf(const nlohmann::json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end() || !found->is_number_integer()) return 0;
  const auto id = found->get<int64_t>();
  return id > 0 && id <= INT32_MAX ? static_cast<int32_t>(id) : 0;
}

std::string NameOf(DType type) {
  switch (type) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat8E4M3:
      return "fp8";
  }
  return "";
}

}  // namespace

absl::StatusOr<NodeInfo> MakeNodeInfo(const std::string& directory,
                                      const std::string& served_model_name, const Model& model) {
  SLUICE_ASSIGN_OR_RETURN(const nlohmann::json config,
                          ReadJsonFile(absl::StrCat(directory, "/config.json"), kMaxConfigBytes));
  NodeInfo info;
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(directory, error);
  info.model_path = error ? directory : absolute.lexically_normal().string();
  info.served_model_name = served_model_name.empty() ? model.config().name : served_model_name;
  info.model_type = model.config().architecture;
  if (const auto found = config.find("architectures"); found != config.end() && found->is_array()) {
    for (const nlohmann::json& name : *found) {
      if (name.is_string()) info.architectures.push_back(name.get<std::string>());
    }
  }
  info.bos_token_id = TokenIdOf(config, "bos_token_id");
  info.pad_token_id = TokenIdOf(config, "pad_token_id");
  info.eos_token_ids = model.config().eos_token_ids;
  info.vocab_size = static_cast<uint32_t>(model.config().vocab_size);
  info.max_context = static_cast<uint32_t>(model.max_context());
  info.engine_id = absl::StrFormat("%016x%016x", RandomU64(), RandomU64());
  const CacheKind& kind = model.cache_layout().kinds.front();
  info.kv_dtype = NameOf(kind.element_type);
  info.block_tokens = static_cast<uint32_t>(kind.block_tokens);
  info.started = absl::Now();
  return info;
}

std::string IsoTime(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", time, absl::UTCTimeZone());
}

}  // namespace sluice
