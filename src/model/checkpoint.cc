#include "src/model/checkpoint.h"

#include <sys/stat.h>

#include <set>

#include "absl/strings/match.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using nlohmann::json;

template <typename... Parts>
absl::Status Broken(const std::string& where, const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", parts...));
}

// Returns whether the file exists. A link to nowhere counts: opening it then says what is wrong.
bool Exists(const std::string& path) {
  struct stat st {};
  return lstat(path.c_str(), &st) == 0;
}

// Returns the index's weight_map: tensor name -> the shard's file name.
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(const std::string& path) {
  SLUICE_ASSIGN_OR_RETURN(const json index, ReadJsonFile(path, kMaxIndexBytes));
  if (!index.contains("weight_map") || !index["weight_map"].is_object() ||
      index["weight_map"].empty()) {
    return Broken(path, "expected \"weight_map\", an object of tensor names and file names");
  }
  std::map<std::string, std::string> out;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    if (!file.is_string()) {
      return Broken(path, "weight_map[\"", Shown(tensor), "\"]: expected a file name, found ",
                    ShownJson(file));
    }
    const auto& name = file.get_ref<const std::string&>();
    if (name.find('/') != std::string::npos || name.find('\0') != std::string::npos ||
        !absl::EndsWith(name, ".safetensors")) {
      return Broken(path, "weight_map[\"", Shown(tensor),
                    "\"]: expected the name of a .safetensors file ",
                    "in the same directory, found ", ShownJson(file));
    }
    out.emplace(tensor, name);
  }
  return out;
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& dir) {
  const std::string single = dir + "/model.safetensors";
  const std::string index_path = dir + "/model.safetensors.index.json";
  Checkpoint out;
  std::map<std::string, std::string> index;
  std::set<std::string> names;
  if (Exists(single)) {
    names.insert("model.safetensors");
  } else if (Exists(index_path)) {
    SLUICE_ASSIGN_OR_RETURN(index, ReadIndex(index_path));
    for (const auto& [tensor, file] : index) names.insert(file);
  } else {
    return absl::NotFoundError(absl::StrCat(
        dir, ": no weights: expected model.safetensors or model.safetensors.index.json",
        Exists(dir + "/pytorch_model.bin") ? " (pytorch_model.bin must be converted first)" : ""));
  }
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(dir, "/", name);
    if (!index.empty() && !Exists(path)) {
      return absl::NotFoundError(absl::StrCat(index_path, ": names the shard ", Shown(name),
                                              ", which is not in the directory"));
    }
    SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(path));
    for (const auto& [tensor, info] : file->tensors()) {
      const auto [it, inserted] = out.tensors_.emplace(tensor, Entry{file.get(), &info});
      if (!inserted) {
        return Broken(dir, "tensor ", tensor, " is in two shards, ", it->second.file->path(),
                      " and ", path);
      }
    }
    out.files_.push_back(std::move(file));
  }
  for (const auto& [tensor, file] : index) {
    const Entry* entry = out.Find(tensor);
    if (entry == nullptr || !absl::EndsWith(entry->file->path(), "/" + file)) {
      return Broken(index_path, "tensor ", Shown(tensor), " should be in ", file,
                    ", which lacks it");
    }
  }
  return out;
}

const Checkpoint::Entry* Checkpoint::Find(const std::string& name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

}  // namespace sluice
