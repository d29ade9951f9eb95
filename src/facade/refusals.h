// What every façade refuses alike. Pure functions.
#pragma once

#include <google/protobuf/message.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace sluice {

// INVALID_ARGUMENT if `message` has fields with numbers that its type here does not have: a newer
// peer means something by them. `path`: of the message in the request, empty for the whole.
absl::Status CheckNoUnknownFields(const std::string& path,
                                  const google::protobuf::Message& message);

// INVALID_ARGUMENT: the field "is not supported: WHY".
absl::Status NotSupported(const std::string& field, const std::string& why);

// `status` with its field in a façade's words: the first of `names` whose `first` the field is or
// begins with (a path's part ends at a dot or bracket) is replaced by its `second`.
using FieldNames = std::vector<std::pair<std::string, std::string>>;
absl::Status InWordsOf(const FieldNames& names, const absl::Status& status);

}  // namespace sluice
