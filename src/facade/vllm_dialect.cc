#include "src/facade/vllm_dialect.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/facade/handoff_json.h"
#include "src/facade/refusals.h"
#include "src/facade/smg_dialect.h"
#include "src/service/wire/proto_conversion.h"

namespace sluice {
namespace {

namespace ve = vllm::grpc::engine;

const FieldNames& VllmNames() {
  static const FieldNames names = {{"sampling.", "sampling_params."},
                                   {"prompt_token_ids", "tokenized.input_ids"}};
  return names;
}

const char* NameOf(ve::SamplingParams::ConstraintCase constraint) {
  switch (constraint) {
    case ve::SamplingParams::kJsonSchema:
      return "json_schema";
    case ve::SamplingParams::kRegex:
      return "regex";
    case ve::SamplingParams::kGrammar:
      return "grammar";
    case ve::SamplingParams::kStructuralTag:
      return "structural_tag";
    case ve::SamplingParams::kJsonObject:
      return "json_object";
    case ve::SamplingParams::kChoice:
      return "choice";
    case ve::SamplingParams::CONSTRAINT_NOT_SET:
      break;
  }
  return "";
}

absl::Status CheckSupported(const ve::SamplingParams& params) {
  SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("sampling_params", params));
  const bool off =
      params.constraint_case() == ve::SamplingParams::kJsonObject && !params.json_object();
  if (params.constraint_case() != ve::SamplingParams::CONSTRAINT_NOT_SET && !off) {
    return NotSupported(absl::StrCat("sampling_params.", NameOf(params.constraint_case())),
                        "this server does not constrain decoding; ask for the form in the prompt");
  }
  if (params.grammar_from_first_token()) {
    return NotSupported("sampling_params.grammar_from_first_token",
                        "this server does not constrain decoding");
  }
  if (params.has_prompt_logprobs()) {
    return NotSupported("sampling_params.prompt_logprobs",
                        "a prompt's caches come without its log-probabilities");
  }
  if (params.has_truncate_prompt_tokens()) {
    return NotSupported("sampling_params.truncate_prompt_tokens",
                        "cut the prompt before it is sent");
  }
  if (params.has_logprobs() && params.logprobs() < 0) {
    return InvalidField("sampling_params.logprobs",
                        absl::StrCat("at least 0, found ", params.logprobs()));
  }
  return absl::OkStatus();
}

absl::Status CheckSupported(const ve::GenerateRequest& request) {
  SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("", request));
  if (request.input_case() == ve::GenerateRequest::kText) {
    return NotSupported("text", "this server has no tokenizer; send tokenized.input_ids");
  }
  SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("tokenized", request.tokenized()));
  if (request.tokenized().input_ids().empty()) {
    return InvalidField("tokenized.input_ids", "is empty");
  }
  if (request.has_mm_inputs()) return NotSupported("mm_inputs", "the model takes text alone");
  if (request.extra_mm_inputs_size() > 0) {
    return NotSupported("extra_mm_inputs", "the model takes text alone");
  }
  if (request.has_media_refs()) return NotSupported("media_refs", "the model takes text alone");
  if (request.has_kv_transfer_params()) {
    return NotSupported("kv_transfer_params",
                        "another connector's; this one's is kv_transfer_params_json");
  }
  if (request.data_parallel_rank() != 0) {
    return InvalidField("data_parallel_rank",
                        absl::StrCat("only 0 is here, found ", request.data_parallel_rank()));
  }
  return absl::OkStatus();
}

absl::StatusOr<SamplingParams> SamplingOf(const ve::SamplingParams& params) {
  SLUICE_RETURN_IF_ERROR(CheckSupported(params));
  v1::SamplingParams out = ReadShared(params);
  out.set_temperature(params.has_temperature() ? params.temperature() : 1.0f);
  out.set_top_k(params.top_k());
  if (params.has_max_tokens()) out.set_max_tokens(params.max_tokens());
  out.set_min_tokens(params.min_tokens());
  if (params.has_logprobs()) out.set_logprobs(static_cast<uint32_t>(params.logprobs()));
  if (params.has_seed()) out.set_seed(static_cast<uint64_t>(int64_t{params.seed()}));
  for (const auto& [id, value] : params.logit_bias()) {
    if (id < 0) {
      return InvalidField("sampling_params.logit_bias",
                          absl::StrCat("token id ", id, " is below 0"));
    }
    (*out.mutable_logit_bias())[static_cast<uint32_t>(id)] = value;
  }
  return FromProto(out);
}

class VllmDialect final : public SmgDialect<ve::GenerateResponse> {
 public:
  VllmDialect(NodeInfo::Role role, const ve::GenerateRequest& request,
              const GenerateOptions& options)
      : SmgDialect(VllmNames(), "kv_transfer_params_json"),
        role_(role),
        request_(request),
        options_(options) {}

  std::string request_id() const override { return request_.request_id(); }

  absl::StatusOr<Request> Read() override {
    SLUICE_ASSIGN_OR_RETURN(Request out,
                            FromProto(request_, options_.vocab_size, options_.max_context));
    const HandoffJson json{"kv_transfer_params_json", request_.has_kv_transfer_params_json(),
                           request_.kv_transfer_params_json()};
    if (role_ == NodeInfo::Role::kPrefill) {
      SLUICE_RETURN_IF_ERROR(CheckPrefillLeg(json));
      // A minimum above the one token is the decode leg's to keep.
      out.sampling.min_tokens = std::min(out.sampling.min_tokens, 1u);
    } else {
      SLUICE_RETURN_IF_ERROR(ReadDecodeLeg(json, &out));
    }
    ReadBy(out, request_.stream());
    return out;
  }

 private:
  absl::Status CheckPrefillLeg(const HandoffJson& json) const {
    SLUICE_RETURN_IF_ERROR(CheckAsksToHold(json));
    if (!request_.sampling_params().has_max_tokens() ||
        request_.sampling_params().max_tokens() != 1) {
      return InvalidField("sampling_params.max_tokens",
                          "must be 1 at a prefill node, which computes the prompt and one token");
    }
    return absl::OkStatus();
  }

  void AddToLast(ve::GenerateComplete* complete, const FinishInfo& end) const override {
    if (!end.source.empty()) complete->set_kv_transfer_params_json(ToJson(end.source));
  }

  const NodeInfo::Role role_;
  const ve::GenerateRequest& request_;  // gRPC's, as long as the call
  const GenerateOptions& options_;
};

}  // namespace

absl::StatusOr<Request> FromProto(const ve::GenerateRequest& request, uint32_t vocab_size,
                                  uint32_t max_context) {
  SLUICE_RETURN_IF_ERROR(CheckName("request_id", request.request_id()));
  SLUICE_RETURN_IF_ERROR(CheckSupported(request));
  Request out;
  out.request_id = request.request_id();
  SLUICE_ASSIGN_OR_RETURN(
      out.prompt,
      TokenIds("tokenized.input_ids", request.tokenized().input_ids(), vocab_size, max_context));
  auto sampling = SamplingOf(request.sampling_params());
  if (!sampling.ok()) return InWordsOf(VllmNames(), sampling.status());
  out.sampling = *std::move(sampling);
  return out;
}

std::unique_ptr<GenerateDialectOf<ve::GenerateResponse>> NewVllmDialect(
    NodeInfo::Role role, const ve::GenerateRequest& request, const GenerateOptions& options) {
  return std::make_unique<VllmDialect>(role, request, options);
}

}  // namespace sluice
