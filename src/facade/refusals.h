// The refusals that all dialects share. Pure functions.
#pragma once

#include <google/protobuf/message.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace sluice {

// Returns INVALID_ARGUMENT if `message` has fields with numbers that its type here does not have,
// because a newer peer means something by them. `path` is the message's path in the request, and
// empty for the whole request.
absl::Status CheckNoUnknownFields(const std::string& path,
                                  const google::protobuf::Message& message);

// Returns INVALID_ARGUMENT if `sampling_params` has a field of its oneof `constraint`, because no
// node constrains decoding.
absl::Status CheckNotConstrained(const google::protobuf::Message& sampling_params);

// Returns INVALID_ARGUMENT that says the field "is not supported: WHY".
absl::Status NotSupported(const std::string& field, const std::string& why);

// Returns `status` with its field in a dialect's words. The first of `names` whose `first` equals
// the field or the beginning of its path (whose parts end at a dot or bracket) is replaced by its
// `second`.
using FieldNames = std::vector<std::pair<std::string, std::string>>;
absl::Status InWordsOf(const FieldNames& names, const absl::Status& status);

}  // namespace sluice
