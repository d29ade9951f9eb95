// Checkpoint is the weights of a Hugging Face directory: model.safetensors, or the shards that
// model.safetensors.index.json names. It is immutable once opened, so any thread may read it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/model/safetensors.h"

namespace sluice {

class Checkpoint {
 public:
  struct Entry {
    const SafetensorsFile* file;
    const TensorInfo* tensor;
  };

  // Opens the directory. NOT_FOUND if it has neither file, or a shard is missing; INVALID_ARGUMENT
  // if the index is broken (not JSON, a file name with a path in it, a tensor that its shard lacks,
  // a tensor in two shards) or a file is (SafetensorsFile::Open).
  static absl::StatusOr<Checkpoint> Open(const std::string& dir);

  // Returns every tensor by name, including those that the index does not list.
  const std::map<std::string, Entry>& tensors() const { return tensors_; }
  // Returns null if there is no tensor of that name.
  const Entry* Find(const std::string& name) const;

 private:
  Checkpoint() = default;

  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Entry> tensors_;
};

}  // namespace sluice
