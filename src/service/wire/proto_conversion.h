// Messages of proto/sluice/v1 <-> the plain types of the layers below. Everything that comes from
// outside is bounded here; errors are INVALID_ARGUMENT naming the field. Pure functions.
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

// Longest request_id, tenant, rendezvous_key and reason, in bytes; the proto files say so.

// `value` itself, or the error that names `field` and the bytes allowed and found.
absl::Status CheckName(const std::string& field, const std::string& value,
                       size_t max_bytes = kMaxNameBytes);

// protobuf's own bounds: seconds within +-10,000 years, nanos of the same sign below 1e9; and > 0.
absl::StatusOr<absl::Duration> PositiveDuration(const std::string& field,
                                                const google::protobuf::Duration& duration);
google::protobuf::Duration ToProto(absl::Duration duration);
// INVALID_ARGUMENT naming `field` unless it lies in [0, most].
absl::StatusOr<absl::Duration> DurationUpTo(const std::string& field,
                                            const google::protobuf::Duration& duration,
                                            absl::Duration most);

// Bounds lists and strings; values are checked by ValidateSamplingParams.
absl::StatusOr<SamplingParams> FromProto(const v1::SamplingParams& params);

// A message around the longest prompt: an id has up to 5 bytes; the lists of SamplingParams and
// everything else have less than 64 KiB.
constexpr uint64_t MaxPromptMessageBytes(uint64_t max_context) {
  return 5 * max_context + (64 << 10);
}

// Every id below `vocab_size`, at most `max_tokens` of them.
absl::StatusOr<std::vector<int32_t>> TokenIds(const std::string& field,
                                              const google::protobuf::RepeatedField<uint32_t>& ids,
                                              uint32_t vocab_size, uint32_t max_tokens);

v1::Token ToProto(const OutputToken& token);
// `field`: "first_tokens[0]".
absl::StatusOr<OutputToken> FromProto(const std::string& field, const v1::Token& token,
                                      uint32_t vocab_size);

v1::CacheKind ToProto(const CacheKind& kind);
absl::StatusOr<CacheKind> FromProto(const std::string& field, const v1::CacheKind& kind);

// What a model says of itself on the wire.
v1::ModelInfo MakeModelInfo(const Model& model);

absl::StatusOr<Manifest> FromProto(const v1::ReserveRequest& request);
// Bounds the number of units; the rest is TransferTable::Commit's to check.
absl::StatusOr<SelectionHints> FromProto(const v1::Hints& hints);
v1::Hints ToProto(const SelectionHints& hints);
v1::BlockRange ToProto(const MissingRange& range);
MissingRange FromProto(const v1::BlockRange& range);
v1::MissingBlocks ToMissingBlocks(const TransferInfo& info);

// As it is: CheckSourceRef says what is wrong with one.
SourceRef FromProto(const v1::KvSourceRef& ref);
v1::KvSourceRef ToProto(const SourceRef& ref);

// All but the deadline and the sink. An empty request_id stays empty. `vocab_size` and
// `max_context` are the served model's.
absl::StatusOr<Request> FromProto(const v1::GenerateRequest& request, uint32_t vocab_size,
                                  uint32_t max_context);
// REQUIRES: info.reason is not kError.
v1::Finish ToProto(const FinishInfo& info);
v1::SequenceInfo ToProto(const SequenceSnapshot& sequence);

}  // namespace sluice
