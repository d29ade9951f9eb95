#include "src/facade/refusals.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/unknown_field_set.h>

#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"

namespace sluice {

absl::Status CheckNoUnknownFields(const std::string& path,
                                  const google::protobuf::Message& message) {
  const auto& unknown = message.GetReflection()->GetUnknownFields(message);
  if (unknown.empty()) return absl::OkStatus();
  return InvalidField(path.empty() ? "message" : path,
                      absl::StrCat("has a field with number ", unknown.field(0).number(),
                                   ", which this server does not know"));
}

absl::Status CheckNotConstrained(const google::protobuf::Message& sampling_params) {
  const auto* const constraint = sampling_params.GetDescriptor()->FindOneofByName("constraint");
  SLUICE_CHECK(constraint != nullptr);
  const auto* const given =
      sampling_params.GetReflection()->GetOneofFieldDescriptor(sampling_params, constraint);
  if (given == nullptr) return absl::OkStatus();
  return NotSupported(absl::StrCat("sampling_params.", given->name()),
                      "this server does not constrain decoding; ask for the form in the prompt");
}

absl::Status NotSupported(const std::string& field, const std::string& why) {
  return InvalidField(field, absl::StrCat("is not supported: ", why));
}

absl::Status InWordsOf(const FieldNames& names, const absl::Status& status) {
  const std::optional<std::string> field = FieldOf(status);
  if (!field.has_value()) return status;
  for (const auto& [ours, theirs] : names) {
    if (!absl::StartsWith(*field, ours)) continue;
    const std::string rest = field->substr(ours.size());
    if (!rest.empty() && ours.back() != '.' && rest[0] != '.' && rest[0] != '[') continue;
    return WithField(status, theirs + rest);
  }
  return status;
}

}  // namespace sluice
