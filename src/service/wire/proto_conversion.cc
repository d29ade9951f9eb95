#include "src/service/wire/proto_conversion.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/params.h"
#include "src/base/dtype.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// 10,000 years, as in google.protobuf.Duration
constexpr int64_t kMaxDurationSeconds = 315'576'000'000;
constexpr int kMaxCacheKinds = 8;
constexpr size_t kMaxTransferIdBytes = 64;  // minted ids have 32
constexpr size_t kMaxFingerprintBytes = 128;

template <typename T>
absl::Status CheckSize(const std::string& field, const T& list, size_t max) {
  if (static_cast<size_t>(list.size()) <= max) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("at most ", max, " entries, found ", list.size()));
}

absl::Status CheckTokenId(const std::string& field, uint32_t id, uint32_t vocab_size) {
  if (id < vocab_size) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("token id ", id, " is outside the vocabulary of ",
                                          vocab_size, " tokens"));
}

v1::ElementType ToProto(DType type) {
  switch (type) {
    case DType::kFloat32:
      return v1::ELEMENT_TYPE_FLOAT32;
    case DType::kBFloat16:
      return v1::ELEMENT_TYPE_BFLOAT16;
    case DType::kFloat8E4M3:
      return v1::ELEMENT_TYPE_FLOAT8_E4M3;
  }
  return v1::ELEMENT_TYPE_UNSPECIFIED;
}

}  // namespace

absl::Status CheckName(const std::string& field, const std::string& value, size_t max_bytes) {
  if (value.size() <= max_bytes) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("at most ", max_bytes, " bytes, found ", value.size()));
}

absl::StatusOr<absl::Duration> PositiveDuration(const std::string& field,
                                                const google::protobuf::Duration& duration) {
  const int64_t seconds = duration.seconds();
  const int32_t nanos = duration.nanos();
  if (seconds < 0 || nanos < 0 || seconds > kMaxDurationSeconds || nanos > 999'999'999 ||
      (seconds == 0 && nanos == 0)) {
    return InvalidField(field, absl::StrCat("expected a positive duration, found ", seconds,
                                            " seconds and ", nanos, " nanoseconds"));
  }
  return absl::Seconds(seconds) + absl::Nanoseconds(nanos);
}

absl::StatusOr<absl::Duration> DurationUpTo(const std::string& field,
                                            const google::protobuf::Duration& duration,
                                            absl::Duration most) {
  const bool valid = duration.seconds() >= 0 && duration.seconds() <= kMaxDurationSeconds &&
                     duration.nanos() >= 0 && duration.nanos() <= 999'999'999;
  const absl::Duration value =
      valid ? absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos())
            : absl::InfiniteDuration();
  if (value <= most) return value;
  return InvalidField(
      field, absl::StrCat("expected 0 to ", absl::FormatDuration(most), ", found ",
                          duration.seconds(), " seconds and ", duration.nanos(), " nanoseconds"));
}

google::protobuf::Duration ToProto(absl::Duration duration) {
  google::protobuf::Duration out;
  absl::Duration rest = std::min(duration, absl::Seconds(kMaxDurationSeconds));
  rest = std::max(rest, -absl::Seconds(kMaxDurationSeconds));
  out.set_seconds(absl::IDivDuration(rest, absl::Seconds(1), &rest));
  out.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(rest)));
  return out;
}

absl::StatusOr<SamplingParams> FromProto(const v1::SamplingParams& params) {
  SLUICE_RETURN_IF_ERROR(
      CheckSize("sampling.logit_bias", params.logit_bias(), kMaxLogitBiasEntries));
  SLUICE_RETURN_IF_ERROR(
      CheckSize("sampling.stop_token_ids", params.stop_token_ids(), kMaxStopTokenIds));
  SLUICE_RETURN_IF_ERROR(CheckSize("sampling.stop", params.stop(), kMaxStopStrings));
  for (int i = 0; i < params.stop_size(); ++i) {
    SLUICE_RETURN_IF_ERROR(
        CheckName(absl::StrCat("sampling.stop[", i, "]"), params.stop(i), kMaxStopStringBytes));
  }
  SamplingParams out;
  if (params.has_temperature()) out.temperature = params.temperature();
  if (params.has_top_k()) out.top_k = params.top_k();
  if (params.has_top_p()) out.top_p = params.top_p();
  if (params.has_min_p()) out.min_p = params.min_p();
  if (params.has_repetition_penalty()) out.repetition_penalty = params.repetition_penalty();
  if (params.has_frequency_penalty()) out.frequency_penalty = params.frequency_penalty();
  if (params.has_presence_penalty()) out.presence_penalty = params.presence_penalty();
  out.logit_bias.assign(params.logit_bias().begin(), params.logit_bias().end());
  // The map has no order of its own, and the same request must give the same table.
  std::sort(out.logit_bias.begin(), out.logit_bias.end());
  if (params.has_min_tokens()) out.min_tokens = params.min_tokens();
  if (params.has_max_tokens()) out.max_tokens = params.max_tokens();
  out.stop_token_ids.assign(params.stop_token_ids().begin(), params.stop_token_ids().end());
  out.stop.assign(params.stop().begin(), params.stop().end());
  out.ignore_eos = params.ignore_eos();
  if (params.has_logprobs()) out.logprobs = params.logprobs();
  if (params.has_seed()) out.seed = params.seed();
  if (params.has_n()) out.n = params.n();
  return out;
}

absl::StatusOr<std::vector<int32_t>> TokenIds(const std::string& field,
                                              const google::protobuf::RepeatedField<uint32_t>& ids,
                                              uint32_t vocab_size, uint32_t max_tokens) {
  SLUICE_RETURN_IF_ERROR(CheckSize(field, ids, max_tokens));
  std::vector<int32_t> out;
  out.reserve(static_cast<size_t>(ids.size()));
  for (int i = 0; i < ids.size(); ++i) {
    if (ids[i] >= vocab_size) {
      return CheckTokenId(absl::StrCat(field, "[", i, "]"), ids[i], vocab_size);
    }
    out.push_back(static_cast<int32_t>(ids[i]));
  }
  return out;
}

v1::Token ToProto(const OutputToken& token) {
  v1::Token out;
  out.set_id(static_cast<uint32_t>(token.id));
  if (token.logprob.has_value()) out.set_logprob(*token.logprob);
  for (const auto& [id, logprob] : token.top_logprobs) {
    v1::TokenLogprob* entry = out.add_top_logprobs();
    entry->set_token_id(static_cast<uint32_t>(id));
    entry->set_logprob(logprob);
  }
  return out;
}

absl::StatusOr<OutputToken> FromProto(const std::string& field, const v1::Token& token,
                                      uint32_t vocab_size) {
  SLUICE_RETURN_IF_ERROR(CheckTokenId(field + ".id", token.id(), vocab_size));
  SLUICE_RETURN_IF_ERROR(
      CheckSize(field + ".top_logprobs", token.top_logprobs(), kernels::kMaxTopLogprobs));
  OutputToken out;
  out.id = static_cast<int32_t>(token.id());
  if (token.has_logprob()) {
    if (std::isnan(token.logprob())) return InvalidField(field + ".logprob", "is not a number");
    out.logprob = token.logprob();
  }
  for (int i = 0; i < token.top_logprobs_size(); ++i) {
    const v1::TokenLogprob& entry = token.top_logprobs(i);
    const std::string name = absl::StrCat(field, ".top_logprobs[", i, "]");
    SLUICE_RETURN_IF_ERROR(CheckTokenId(name + ".token_id", entry.token_id(), vocab_size));
    if (std::isnan(entry.logprob())) return InvalidField(name + ".logprob", "is not a number");
    out.top_logprobs.emplace_back(static_cast<int32_t>(entry.token_id()), entry.logprob());
  }
  return out;
}

v1::CacheKind ToProto(const CacheKind& kind) {
  v1::CacheKind out;
  out.set_name(kind.name);
  out.set_element_type(ToProto(kind.element_type));
  out.set_heads(static_cast<uint32_t>(kind.heads));
  out.set_block_tokens(static_cast<uint32_t>(kind.block_tokens));
  out.set_bytes_per_token(static_cast<uint64_t>(kind.bytes_per_token));
  for (const int64_t bytes : kind.part_bytes) out.add_part_bytes(static_cast<uint64_t>(bytes));
  return out;
}

absl::StatusOr<CacheKind> FromProto(const std::string& field, const v1::CacheKind& kind) {
  // The limit is far above any model, and far below the numbers whose product could overflow.
  constexpr uint64_t kMaxNumber = 1 << 20;
  CacheKind out;
  SLUICE_RETURN_IF_ERROR(CheckName(field + ".name", kind.name()));
  out.name = kind.name();
  switch (kind.element_type()) {
    case v1::ELEMENT_TYPE_BFLOAT16:
      out.element_type = DType::kBFloat16;
      break;
    case v1::ELEMENT_TYPE_FLOAT32:
      out.element_type = DType::kFloat32;
      break;
    case v1::ELEMENT_TYPE_FLOAT8_E4M3:
      out.element_type = DType::kFloat8E4M3;
      break;
    default:
      return InvalidField(
          field + ".element_type",
          absl::StrCat("expected ELEMENT_TYPE_BFLOAT16, ELEMENT_TYPE_FLOAT32 or ",
                       "ELEMENT_TYPE_FLOAT8_E4M3, found ", static_cast<int>(kind.element_type())));
  }
  const auto number = [&](const char* name, uint64_t value) -> absl::Status {
    if (value >= 1 && value <= kMaxNumber) return absl::OkStatus();
    return InvalidField(absl::StrCat(field, ".", name),
                        absl::StrCat("expected 1 to ", kMaxNumber, ", found ", value));
  };
  SLUICE_RETURN_IF_ERROR(number("heads", kind.heads()));
  SLUICE_RETURN_IF_ERROR(number("block_tokens", kind.block_tokens()));
  SLUICE_RETURN_IF_ERROR(number("bytes_per_token", kind.bytes_per_token()));
  out.heads = static_cast<int>(kind.heads());
  out.block_tokens = static_cast<int>(kind.block_tokens());
  out.bytes_per_token = static_cast<int64_t>(kind.bytes_per_token());
  constexpr int kMaxParts = 8;
  if (kind.part_bytes_size() < 1 || kind.part_bytes_size() > kMaxParts) {
    return InvalidField(
        field + ".part_bytes",
        absl::StrCat("expected 1 to ", kMaxParts, " sizes, found ", kind.part_bytes_size()));
  }
  uint64_t sum = 0;
  for (const uint64_t bytes : kind.part_bytes()) {
    SLUICE_RETURN_IF_ERROR(number("part_bytes", bytes));
    out.part_bytes.push_back(static_cast<int64_t>(bytes));
    sum += bytes;
  }
  if (sum != kind.bytes_per_token()) {
    return InvalidField(field + ".part_bytes",
                        absl::StrCat("expected sizes that add up to bytes_per_token (",
                                     kind.bytes_per_token(), "), found ", sum));
  }
  return out;
}

v1::ModelInfo MakeModelInfo(const Model& model) {
  const ModelConfig& config = model.whole_config();
  v1::ModelInfo out;
  out.set_fingerprint(model.fingerprint());
  out.set_architecture(config.architecture);
  out.set_layers(static_cast<uint32_t>(config.layers));
  out.set_hidden_size(static_cast<uint32_t>(config.hidden_size));
  out.set_heads(static_cast<uint32_t>(config.heads));
  if (!config.latent.has_value()) out.set_kv_heads(static_cast<uint32_t>(config.kv_heads));
  out.set_head_dim(static_cast<uint32_t>(config.head_dim));
  out.set_vocab_size(static_cast<uint32_t>(config.vocab_size));
  out.set_max_context(static_cast<uint32_t>(model.max_context()));
  for (const int32_t id : config.eos_token_ids) out.add_eos_token_ids(static_cast<uint32_t>(id));
  for (CacheKind kind : model.cache_layout().kinds) {
    if (!config.latent.has_value()) kind.heads = config.kv_heads;  // those of all ranks
    *out.add_cache_kinds() = ToProto(kind);
  }
  out.set_name(config.name);
  out.set_weight_bytes(static_cast<uint64_t>(model.weight_bytes()));
  return out;
}

absl::StatusOr<Manifest> FromProto(const v1::ReserveRequest& request) {
  if (!request.has_manifest()) return InvalidField("manifest", "is missing");
  const v1::Manifest& manifest = request.manifest();
  SLUICE_RETURN_IF_ERROR(
      CheckName("manifest.model_fingerprint", manifest.model_fingerprint(), kMaxFingerprintBytes));
  SLUICE_RETURN_IF_ERROR(CheckName("manifest.tenant", manifest.tenant()));
  SLUICE_RETURN_IF_ERROR(CheckName("rendezvous_key", request.rendezvous_key()));
  SLUICE_RETURN_IF_ERROR(CheckSize("manifest.cache_kinds", manifest.cache_kinds(), kMaxCacheKinds));
  Manifest out;
  out.model_fingerprint = manifest.model_fingerprint();
  for (int i = 0; i < manifest.cache_kinds_size(); ++i) {
    SLUICE_ASSIGN_OR_RETURN(CacheKind kind, FromProto(absl::StrCat("manifest.cache_kinds[", i, "]"),
                                                      manifest.cache_kinds(i)));
    out.cache_kinds.push_back(std::move(kind));
  }
  out.context_length = manifest.context_length();
  out.prompt_token_ids.assign(manifest.prompt_token_ids().begin(),
                              manifest.prompt_token_ids().end());
  out.max_new_tokens = manifest.max_new_tokens();
  out.tenant = manifest.tenant();
  out.rendezvous_key = request.rendezvous_key();
  if (request.has_lease()) {
    SLUICE_ASSIGN_OR_RETURN(out.lease, PositiveDuration("lease", request.lease()));
  }
  return out;
}

absl::StatusOr<SelectionHints> FromProto(const v1::Hints& hints) {
  SelectionHints out;
  out.unit_tokens = hints.unit_tokens();
  if (hints.entries_size() > kMaxHintEntries) {
    return InvalidField("hints.entries",
                        absl::StrCat("at most ", kMaxHintEntries, " entries, found ",
                                     hints.entries_size(), "; send hints of fewer positions"));
  }
  size_t units = 0;
  for (const v1::Hints::Entry& entry : hints.entries()) {
    units += static_cast<size_t>(entry.units_size());
    if (units > kMaxHintUnits) {
      return InvalidField("hints.entries", absl::StrCat("at most ", kMaxHintUnits,
                                                        " units in all; send hints of fewer "
                                                        "positions"));
    }
    SelectionHints::Entry& added = out.entries.emplace_back();
    added.layer = entry.layer();
    if (entry.has_kv_head()) added.kv_head = entry.kv_head();
    if (entry.has_position()) added.position = entry.position();
    added.units.assign(entry.units().begin(), entry.units().end());
  }
  const std::string& queries = hints.queries();
  if (queries.size() % sizeof(uint16_t) != 0) {
    return InvalidField("hints.queries", absl::StrCat("expected bfloat16 numbers of 2 bytes each, "
                                                      "found ",
                                                      queries.size(), " bytes"));
  }
  out.queries.reserve(queries.size() / sizeof(uint16_t));
  for (size_t at = 0; at < queries.size(); at += sizeof(uint16_t)) {
    const auto low = static_cast<uint8_t>(queries[at]),
               high = static_cast<uint8_t>(queries[at + 1]);
    out.queries.push_back(BFloat16ToFloat(static_cast<uint16_t>(high << 8 | low)));
  }
  return out;
}

v1::Hints ToProto(const SelectionHints& hints, bool queries) {
  v1::Hints out;
  out.set_unit_tokens(hints.unit_tokens);
  for (const SelectionHints::Entry& entry : hints.entries) {
    v1::Hints::Entry* added = out.add_entries();
    added->set_layer(entry.layer);
    if (entry.kv_head.has_value()) added->set_kv_head(*entry.kv_head);
    if (entry.position.has_value()) added->set_position(*entry.position);
    *added->mutable_units() = {entry.units.begin(), entry.units.end()};
  }
  if (!queries) return out;
  std::string& bytes = *out.mutable_queries();
  bytes.reserve(hints.queries.size() * sizeof(uint16_t));
  for (const float query : hints.queries) {
    const uint16_t value = FloatToBFloat16(query);
    bytes.push_back(static_cast<char>(value & 0xFF));
    bytes.push_back(static_cast<char>(value >> 8));
  }
  return out;
}

absl::StatusOr<ChunkHeader> FromProto(const v1::ChunkHeader& header) {
  ChunkHeader out;
  out.transfer_id = header.transfer_id();
  out.kind = header.kind();
  out.crc32c = header.crc32c();
  struct Number {
    const char* field;
    uint64_t value;
    uint32_t* out;
  };
  for (const Number& number : {Number{"header.layer", header.layer(), &out.layer},
                               {"header.head_begin", header.head_begin(), &out.head_begin},
                               {"header.head_end", header.head_end(), &out.head_end},
                               {"header.token_begin", header.token_begin(), &out.token_begin},
                               {"header.token_end", header.token_end(), &out.token_end}}) {
    if (number.value > UINT32_MAX) {
      return InvalidField(number.field,
                          absl::StrCat("expected less than 2^32, found ", number.value));
    }
    *number.out = static_cast<uint32_t>(number.value);
  }
  return out;
}

v1::ChunkHeader ToProto(const ChunkHeader& header) {
  v1::ChunkHeader out;
  out.set_transfer_id(header.transfer_id);
  out.set_layer(header.layer);
  out.set_kind(header.kind);
  out.set_head_begin(header.head_begin);
  out.set_head_end(header.head_end);
  out.set_token_begin(header.token_begin);
  out.set_token_end(header.token_end);
  out.set_crc32c(header.crc32c);
  return out;
}

v1::BlockRange ToProto(const MissingRange& range) {
  v1::BlockRange out;
  out.set_layer(range.layer);
  out.set_kind(range.kind);
  out.set_head_begin(range.head_begin);
  out.set_head_end(range.head_end);
  out.set_token_begin(range.token_begin);
  out.set_token_end(range.token_end);
  return out;
}

MissingRange FromProto(const v1::BlockRange& range) {
  return {range.layer(),    range.kind(),        range.head_begin(),
          range.head_end(), range.token_begin(), range.token_end()};
}

v1::MissingBlocks ToMissingBlocks(const TransferInfo& info) {
  v1::MissingBlocks out;
  out.set_count(info.blocks_total - info.blocks_landed);
  for (const MissingRange& range : info.missing) *out.add_ranges() = ToProto(range);
  return out;
}

SourceRef FromProto(const v1::KvSourceRef& ref) {
  return {ref.address(), ref.source_id(), ref.prompt_digest(), ref.model_fingerprint()};
}

v1::KvSourceRef ToProto(const SourceRef& ref) {
  v1::KvSourceRef out;
  out.set_address(ref.address);
  out.set_source_id(ref.source_id);
  out.set_prompt_digest(ref.prompt_digest);
  out.set_model_fingerprint(ref.model_fingerprint);
  return out;
}

absl::StatusOr<Request> FromProto(const v1::GenerateRequest& request, uint32_t vocab_size,
                                  uint32_t max_context) {
  SLUICE_RETURN_IF_ERROR(CheckName("request_id", request.request_id()));
  SLUICE_RETURN_IF_ERROR(CheckName("tenant", request.tenant()));
  SLUICE_RETURN_IF_ERROR(CheckName("rendezvous_key", request.rendezvous_key()));
  SLUICE_RETURN_IF_ERROR(CheckName("transfer_id", request.transfer_id(), kMaxTransferIdBytes));
  SLUICE_RETURN_IF_ERROR(CheckName("sequence_id", request.sequence_id(), kMaxTransferIdBytes));
  Request out;
  out.request_id = request.request_id();
  out.handoff.tenant = request.tenant();
  switch (request.handoff_case()) {
    case v1::GenerateRequest::kTransferId:
      if (request.transfer_id().empty()) return InvalidField("transfer_id", "is empty");
      out.handoff.transfer_id = request.transfer_id();
      break;
    case v1::GenerateRequest::kRendezvousKey:
      if (request.rendezvous_key().empty()) return InvalidField("rendezvous_key", "is empty");
      out.handoff.rendezvous_key = request.rendezvous_key();
      break;
    case v1::GenerateRequest::kSequenceId:
      if (request.sequence_id().empty()) return InvalidField("sequence_id", "is empty");
      out.handoff.sequence_id = request.sequence_id();
      break;
    case v1::GenerateRequest::kSource:
      out.handoff.source = FromProto(request.source());
      SLUICE_RETURN_IF_ERROR(CheckSourceRef(out.handoff.source, "source"));
      break;
    case v1::GenerateRequest::HANDOFF_NOT_SET:
      if (request.prompt_token_ids().empty()) {
        return InvalidField(
            "prompt_token_ids",
            "is empty, and none of transfer_id, rendezvous_key, sequence_id and source is "
            "given");
      }
      break;
  }
  SLUICE_ASSIGN_OR_RETURN(out.prompt, TokenIds("prompt_token_ids", request.prompt_token_ids(),
                                               vocab_size, max_context));
  SLUICE_ASSIGN_OR_RETURN(out.sampling, FromProto(request.sampling()));
  if (request.has_keep()) {
    SLUICE_ASSIGN_OR_RETURN(out.keep, PositiveDuration("keep", request.keep()));
  }
  return out;
}

v1::Finish ToProto(const FinishInfo& info) {
  SLUICE_CHECK(info.reason != FinishInfo::Reason::kError);
  v1::Finish out;
  out.set_reason(info.reason == FinishInfo::Reason::kStop ? v1::FINISH_REASON_STOP
                                                          : v1::FINISH_REASON_LENGTH);
  if (info.stop_token_id.has_value()) {
    out.set_stop_token_id(static_cast<uint32_t>(*info.stop_token_id));
  }
  if (info.stop_string.has_value()) out.set_stop_string(*info.stop_string);
  out.mutable_usage()->set_prompt_tokens(info.prompt_tokens);
  out.mutable_usage()->set_completion_tokens(info.completion_tokens);
  out.mutable_usage()->set_cached_tokens(info.cached_tokens);
  out.mutable_usage()->set_reused_tokens(info.reused_tokens);
  out.mutable_usage()->set_exact_tokens(info.exact_tokens);
  out.mutable_usage()->set_drafted_tokens(info.drafted_tokens);
  out.mutable_usage()->set_accepted_tokens(info.accepted_tokens);
  out.set_sequence_id(info.sequence_id);
  return out;
}

v1::SequenceInfo ToProto(const SequenceSnapshot& sequence) {
  v1::SequenceInfo out;
  out.set_request_id(sequence.request_id);
  out.set_transfer_id(sequence.transfer_id);
  switch (sequence.state) {
    case SequenceSnapshot::State::kAwaitingTransfer:
      out.set_state(v1::SequenceInfo::STATE_AWAITING_TRANSFER);
      break;
    case SequenceSnapshot::State::kWaiting:
      out.set_state(v1::SequenceInfo::STATE_WAITING);
      break;
    case SequenceSnapshot::State::kRunning:
      out.set_state(v1::SequenceInfo::STATE_RUNNING);
      break;
    case SequenceSnapshot::State::kParked:
      out.set_state(v1::SequenceInfo::STATE_PARKED);
      break;
    case SequenceSnapshot::State::kPreempted:
      out.set_state(v1::SequenceInfo::STATE_PREEMPTED);
      break;
  }
  out.set_prompt_tokens(sequence.prompt_tokens);
  out.set_output_tokens(sequence.output_tokens);
  out.set_max_tokens(sequence.max_tokens);
  *out.mutable_age() = ToProto(sequence.age);
  return out;
}

}  // namespace sluice
