// Converts absl::Status, with the payloads of src/base/error.h, to and from grpc::Status, with a
// google.rpc.Status in its binary details. Pure functions, for any thread.
//
//   FieldOf       BadRequest.field_violations[0].field
//   ReasonOf      ErrorInfo.reason, domain "sluice"
//   RetryAfterOf  RetryInfo.retry_delay
#pragma once

#include <string>

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
}
namespace grpc {
class Status;
}

namespace sluice {

// `extra`, which may be null, is packed beside the details that the payloads give. The message is
// cut to kMaxStatusMessageBytes, because it travels in a header, whose size peers limit (to 8 KiB
// by default).
grpc::Status ToGrpcStatus(const absl::Status& status,
                          const google::protobuf::Message* extra = nullptr);
inline constexpr size_t kMaxStatusMessageBytes = 2048;

// Converts the other way, payloads included.
absl::Status FromGrpcStatus(const grpc::Status& status);

// Unpacks the detail of `out`'s type. Returns false if there is none.
bool DetailOf(const grpc::Status& status, google::protobuf::Message* out);

// Returns `status` with "prefix: " before its message, and with the same code and payloads.
absl::Status WithMessagePrefix(const absl::Status& status, const std::string& prefix);

}  // namespace sluice
