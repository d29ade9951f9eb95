// Converts messages of proto/sluice/v1 to and from the plain types of the layers below. Everything
// that comes from outside is bounded here. Errors are INVALID_ARGUMENT and name the field. Pure
// functions.
#pragma once

#include <google/protobuf/duration.pb.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "sluice/v1/admin.pb.h"
#include "sluice/v1/common.pb.h"
#include "sluice/v1/decode.pb.h"
#include "sluice/v1/ingest.pb.h"
#include "src/engine/engine.h"
#include "src/kv/transfer_table.h"
#include "src/model/model.h"
#include "src/request/request.h"
#include "src/request/token.h"
#include "src/sampling/sampling_params.h"

namespace sluice {

// Returns OK, or the error that names `field` and the bytes allowed and found.
absl::Status CheckName(const std::string& field, const std::string& value,
                       size_t max_bytes = kMaxNameBytes);

// Returns a duration above 0 within protobuf's own bounds: seconds within +-10,000 years, and nanos
// of the same sign below 1e9.
absl::StatusOr<absl::Duration> PositiveDuration(const std::string& field,
                                                const google::protobuf::Duration& duration);
google::protobuf::Duration ToProto(absl::Duration duration);
// Returns a duration in [0, most], or INVALID_ARGUMENT naming `field`.
absl::StatusOr<absl::Duration> DurationUpTo(const std::string& field,
                                            const google::protobuf::Duration& duration,
                                            absl::Duration most);

// Bounds the lists and strings. ValidateSamplingParams checks the values.
absl::StatusOr<SamplingParams> FromProto(const v1::SamplingParams& params);

// Returns the maximum bytes of a message with a prompt of `max_context` tokens: an id has up to 5
// bytes, and the lists of SamplingParams and everything else have less than 64 KiB.
constexpr uint64_t MaxPromptMessageBytes(uint64_t max_context) {
  return 5 * max_context + (64 << 10);
}

// Returns the ids, each of which must be below `vocab_size`. At most `max_tokens` of them are
// allowed.
absl::StatusOr<std::vector<int32_t>> TokenIds(const std::string& field,
                                              const google::protobuf::RepeatedField<uint32_t>& ids,
                                              uint32_t vocab_size, uint32_t max_tokens);

v1::Token ToProto(const OutputToken& token);
// `field` is for example "first_tokens[0]".
absl::StatusOr<OutputToken> FromProto(const std::string& field, const v1::Token& token,
                                      uint32_t vocab_size);

v1::CacheKind ToProto(const CacheKind& kind);
absl::StatusOr<CacheKind> FromProto(const std::string& field, const v1::CacheKind& kind);

// Returns the description of the model for the wire.
v1::ModelInfo MakeModelInfo(const Model& model);

absl::StatusOr<Manifest> FromProto(const v1::ReserveRequest& request);
// Bounds the number of units. TransferTable::Commit checks the rest.
absl::StatusOr<SelectionHints> FromProto(const v1::Hints& hints);
// With `queries` false, the hints' queries are left out.
v1::Hints ToProto(const SelectionHints& hints, bool queries = true);
// INVALID_ARGUMENT names a field, as "header.layer", that is 2^32 or more.
absl::StatusOr<ChunkHeader> FromProto(const v1::ChunkHeader& header);
v1::ChunkHeader ToProto(const ChunkHeader& header);
v1::BlockRange ToProto(const MissingRange& range);
MissingRange FromProto(const v1::BlockRange& range);
v1::MissingBlocks ToMissingBlocks(const TransferInfo& info);

// Copies the reference without checks; CheckSourceRef makes them.
SourceRef FromProto(const v1::KvSourceRef& ref);
v1::KvSourceRef ToProto(const SourceRef& ref);

// Converts everything but the deadline and the sink. An empty request_id stays empty. `vocab_size`
// and `max_context` are those of the served model.
absl::StatusOr<Request> FromProto(const v1::GenerateRequest& request, uint32_t vocab_size,
                                  uint32_t max_context);
// REQUIRES: info.reason is not kError.
v1::Finish ToProto(const FinishInfo& info);
v1::SequenceInfo ToProto(const SequenceSnapshot& sequence);

}  // namespace sluice
