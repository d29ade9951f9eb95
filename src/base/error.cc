#include "src/base/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"

namespace sluice {
namespace {

constexpr char kField[] = "sluice/field";
constexpr char kReason[] = "sluice/reason";
constexpr char kRetryAfterNs[] = "sluice/retry_after_ns";

std::optional<std::string> Payload(const absl::Status& status, const char* key) {
  const auto payload = status.GetPayload(key);
  if (!payload.has_value()) return std::nullopt;
  return std::string(*payload);
}

}  // namespace

absl::Status InvalidField(const std::string& field, const std::string& what) {
  absl::Status status = absl::InvalidArgumentError(absl::StrCat(field, ": ", what));
  status.SetPayload(kField, absl::Cord(field));
  return status;
}

absl::Status WithField(const absl::Status& status, const std::string& field) {
  const std::optional<std::string> old = FieldOf(status);
  if (!old.has_value()) return status;
  absl::string_view what = status.message();
  absl::ConsumePrefix(&what, absl::StrCat(*old, ": "));
  absl::Status out(status.code(), absl::StrCat(field, ": ", what));
  status.ForEachPayload(
      [&](absl::string_view key, const absl::Cord& value) { out.SetPayload(key, value); });
  out.SetPayload(kField, absl::Cord(field));
  return out;
}

absl::Status WithReason(absl::Status status, const std::string& reason) {
  status.SetPayload(kReason, absl::Cord(reason));
  return status;
}

absl::Status ResourceExhausted(const std::string& reason, const std::string& what,
                               absl::Duration retry_after) {
  absl::Status status = WithReason(absl::ResourceExhaustedError(what), reason);
  status.SetPayload(kRetryAfterNs, absl::Cord(absl::StrCat(absl::ToInt64Nanoseconds(retry_after))));
  return status;
}

std::optional<std::string> FieldOf(const absl::Status& status) { return Payload(status, kField); }

std::optional<std::string> ReasonOf(const absl::Status& status) { return Payload(status, kReason); }

std::optional<absl::Duration> RetryAfterOf(const absl::Status& status) {
  const std::optional<std::string> text = Payload(status, kRetryAfterNs);
  int64_t ns = 0;
  if (!text.has_value() || !absl::SimpleAtoi(*text, &ns)) return std::nullopt;
  return absl::Nanoseconds(ns);
}

}  // namespace sluice
