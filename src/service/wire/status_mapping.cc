#include "src/service/wire/status_mapping.h"

#include <google/protobuf/any.pb.h>
#include <grpcpp/support/status.h>

#include <algorithm>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "src/base/error.h"

namespace sluice {
namespace {

constexpr char kDomain[] = "sluice";

void CopyPayloads(const absl::Status& from, absl::Status* to) {
  from.ForEachPayload(
      [to](absl::string_view url, const absl::Cord& payload) { to->SetPayload(url, payload); });
}

// Returns at most `limit` bytes of `text`, cut before a UTF-8 sequence and not inside it, because
// protobuf strings must be UTF-8.
std::string Cut(absl::string_view text, size_t limit) {
  if (text.size() <= limit) return std::string(text);
  while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0) == 0x80) --limit;
  return std::string(text.substr(0, limit));
}

bool ParseDetails(const grpc::Status& status, google::rpc::Status* details) {
  return !status.error_details().empty() && details->ParseFromString(status.error_details());
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status, const google::protobuf::Message* extra) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message = Cut(status.message(), kMaxStatusMessageBytes);
  google::rpc::Status details;
  if (const auto field = FieldOf(status)) {
    google::rpc::BadRequest bad_request;
    auto* violation = bad_request.add_field_violations();
    violation->set_field(*field);
    const std::string prefix = *field + ": ";
    violation->set_description(message.rfind(prefix, 0) == 0 ? message.substr(prefix.size())
                                                             : message);
    details.add_details()->PackFrom(bad_request);
  }
  if (const auto reason = ReasonOf(status)) {
    google::rpc::ErrorInfo info;
    info.set_reason(*reason);
    info.set_domain(kDomain);
    details.add_details()->PackFrom(info);
  }
  if (const auto retry_after = RetryAfterOf(status)) {
    google::rpc::RetryInfo retry;
    absl::Duration rest = std::max(*retry_after, absl::ZeroDuration());
    retry.mutable_retry_delay()->set_seconds(absl::IDivDuration(rest, absl::Seconds(1), &rest));
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(rest)));
    details.add_details()->PackFrom(retry);
  }
  if (extra != nullptr) details.add_details()->PackFrom(*extra);
  const auto code = static_cast<grpc::StatusCode>(status.code());
  if (details.details().empty()) return grpc::Status(code, message);
  details.set_code(static_cast<int32_t>(status.code()));
  details.set_message(message);
  return grpc::Status(code, message, details.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status out(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (!ParseDetails(status, &details)) return out;
  for (const google::protobuf::Any& any : details.details()) {
    google::rpc::BadRequest bad_request;
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (any.UnpackTo(&bad_request)) {
      if (bad_request.field_violations_size() > 0) {
        CopyPayloads(InvalidField(bad_request.field_violations(0).field(), ""), &out);
      }
    } else if (any.UnpackTo(&info)) {
      if (info.domain() == kDomain) out = WithReason(std::move(out), info.reason());
    } else if (any.UnpackTo(&retry)) {
      const absl::Duration delay = absl::Seconds(retry.retry_delay().seconds()) +
                                   absl::Nanoseconds(retry.retry_delay().nanos());
      // ResourceExhausted() sets a reason too, which must not hide the one that came.
      const auto reason = ReasonOf(out);
      CopyPayloads(ResourceExhausted(reason.value_or(""), "", delay), &out);
    }
  }
  return out;
}

bool DetailOf(const grpc::Status& status, google::protobuf::Message* out) {
  google::rpc::Status details;
  if (!ParseDetails(status, &details)) return false;
  for (const google::protobuf::Any& any : details.details()) {
    if (any.UnpackTo(out)) return true;
  }
  return false;
}

absl::Status WithMessagePrefix(const absl::Status& status, const std::string& prefix) {
  if (status.ok()) return status;
  absl::Status out(status.code(), absl::StrCat(prefix, ": ", status.message()));
  CopyPayloads(status, &out);
  return out;
}

}  // namespace sluice
