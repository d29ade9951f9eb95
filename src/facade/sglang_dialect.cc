#include "src/facade/sglang_dialect.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/facade/refusals.h"
#include "src/facade/smg_dialect.h"
#include "src/service/wire/proto_conversion.h"

namespace sluice {
namespace {

namespace sg = sglang::grpc::scheduler;

const FieldNames& SglangNames() {
  static const FieldNames names = {{"sampling.max_tokens", "sampling_params.max_new_tokens"},
                                   {"sampling.min_tokens", "sampling_params.min_new_tokens"},
                                   {"sampling.logprobs", "top_logprobs_num"},
                                   {"sampling.", "sampling_params."},
                                   {"prompt_token_ids", "tokenized.input_ids"},
                                   {"source.address", "disaggregated_params.bootstrap_host"}};
  return names;
}

const char* NameOf(sg::SamplingParams::ConstraintCase constraint) {
  switch (constraint) {
    case sg::SamplingParams::kRegex:
      return "regex";
    case sg::SamplingParams::kJsonSchema:
      return "json_schema";
    case sg::SamplingParams::kEbnfGrammar:
      return "ebnf_grammar";
    case sg::SamplingParams::kStructuralTag:
      return "structural_tag";
    case sg::SamplingParams::CONSTRAINT_NOT_SET:
      break;
  }
  return "";
}

absl::Status CheckSupported(const sg::SamplingParams& params) {
  SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("sampling_params", params));
  if (params.constraint_case() != sg::SamplingParams::CONSTRAINT_NOT_SET) {
    return NotSupported(absl::StrCat("sampling_params.", NameOf(params.constraint_case())),
                        "this server does not constrain decoding; ask for the form in the prompt");
  }
  if (params.has_custom_params()) {
    return NotSupported("sampling_params.custom_params", "this server has no parameters of others");
  }
  if (params.has_stream_interval() && params.stream_interval() != 1) {
    return NotSupported("sampling_params.stream_interval", "tokens are sent as they come");
  }
  if (params.top_k() < -1) {
    return InvalidField("sampling_params.top_k",
                        absl::StrCat("at least -1, which is all, found ", params.top_k()));
  }
  return absl::OkStatus();
}

absl::Status CheckSupported(const sg::GenerateRequest& request) {
  SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("", request));
  SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("tokenized", request.tokenized()));
  if (!request.input_embeds().empty()) {
    return NotSupported("input_embeds", "send tokenized.input_ids");
  }
  if (request.tokenized().input_ids().empty()) {
    return InvalidField("tokenized.input_ids", "is empty");
  }
  if (request.has_mm_inputs()) return NotSupported("mm_inputs", "the model takes text alone");
  if (request.return_logprob() && request.logprob_start_len() != -1) {
    return NotSupported(
        "logprob_start_len",
        "a prompt's caches come without its log-probabilities; -1 asks for the output's alone");
  }
  if (!request.token_ids_logprob().empty()) {
    return NotSupported("token_ids_logprob", "ask for top_logprobs_num");
  }
  if (request.return_hidden_states()) {
    return NotSupported("return_hidden_states", "this server answers with tokens alone");
  }
  if (!request.custom_logit_processor().empty()) {
    return NotSupported("custom_logit_processor", "this server runs no code of a request's");
  }
  if (!request.lora_id().empty()) return NotSupported("lora_id", "this server has no adapters");
  if (request.require_reasoning()) {
    return NotSupported("require_reasoning", "tokens of thinking are not counted apart here");
  }
  if (request.top_logprobs_num() < 0) {
    return InvalidField("top_logprobs_num",
                        absl::StrCat("at least 0, found ", request.top_logprobs_num()));
  }
  if (request.data_parallel_rank() != 0) {
    return InvalidField("data_parallel_rank",
                        absl::StrCat("only 0 is here, found ", request.data_parallel_rank()));
  }
  return absl::OkStatus();
}

absl::StatusOr<SamplingParams> SamplingOf(const sg::GenerateRequest& request) {
  const sg::SamplingParams& params = request.sampling_params();
  SLUICE_RETURN_IF_ERROR(CheckSupported(params));
  v1::SamplingParams out = ReadShared(params);
  out.set_temperature(params.temperature());
  out.set_top_k(static_cast<uint32_t>(std::max(params.top_k(), 0)));
  if (params.has_max_new_tokens()) out.set_max_tokens(params.max_new_tokens());
  out.set_min_tokens(params.min_new_tokens());
  if (request.return_logprob()) {
    out.set_logprobs(static_cast<uint32_t>(request.top_logprobs_num()));
  }
  for (const auto& [id, value] : params.logit_bias()) {
    uint32_t token = 0;
    if (!absl::SimpleAtoi(id, &token)) {
      return InvalidField("sampling_params.logit_bias",
                          absl::StrCat("'", id.substr(0, 64), "' is no token id"));
    }
    (*out.mutable_logit_bias())[token] = value;
  }
  return FromProto(out);
}

class SglangDialect final : public SmgDialect<sg::GenerateResponse> {
 public:
  SglangDialect(NodeInfo::Role role, const sg::GenerateRequest& request,
                const GenerateOptions& options)
      : SmgDialect(SglangNames(), "disaggregated_params"),
        role_(role),
        request_(request),
        options_(options) {}

  std::string request_id() const override { return request_.request_id(); }

  absl::StatusOr<Request> Read() override {
    SLUICE_ASSIGN_OR_RETURN(Request out,
                            FromProto(request_, options_.vocab_size, options_.max_context));
    if (role_ == NodeInfo::Role::kPrefill) {
      SLUICE_RETURN_IF_ERROR(ReadPrefillLeg(&out));
    } else {
      SLUICE_RETURN_IF_ERROR(ReadDecodeLeg(&out));
    }
    ReadBy(out, request_.stream());
    return out;
  }

  void Begin(const std::string& request_id) override { request_id_ = request_id; }

 private:
  absl::Status ReadRoom(Request* out) const {
    const sg::DisaggregatedParams& params = request_.disaggregated_params();
    SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("disaggregated_params", params));
    if (params.bootstrap_room() < 0) {
      return InvalidField("disaggregated_params.bootstrap_room",
                          absl::StrCat("at least 0, found ", params.bootstrap_room()));
    }
    out->handoff.source.room = static_cast<uint64_t>(params.bootstrap_room());
    return absl::OkStatus();
  }

  // It has the caller's own limits of length; they are the decode leg's to keep.
  absl::Status ReadPrefillLeg(Request* out) const {
    if (!request_.has_disaggregated_params()) {
      return InvalidField("disaggregated_params",
                          "is missing: a prefill node computes prompts for a decode node, which "
                          "asks for them by bootstrap_room");
    }
    out->sampling.max_tokens = 1;
    out->sampling.min_tokens = std::min(out->sampling.min_tokens, 1u);
    return ReadRoom(out);
  }

  absl::Status ReadDecodeLeg(Request* out) const {
    if (!request_.has_disaggregated_params()) return absl::OkStatus();
    const sg::DisaggregatedParams& params = request_.disaggregated_params();
    if (params.bootstrap_host().empty()) {
      return InvalidField("disaggregated_params.bootstrap_host", "is empty");
    }
    if (params.bootstrap_port() < 1 || params.bootstrap_port() > 65535) {
      return InvalidField(
          "disaggregated_params.bootstrap_port",
          absl::StrCat("is to be the prefill node's gRPC port, found ", params.bootstrap_port(),
                       " (smg: --prefill grpc://HOST:PORT PORT)"));
    }
    const std::string& host = params.bootstrap_host();
    const bool bare_ipv6 = absl::StrContains(host, ':') && !absl::StartsWith(host, "[");
    out->handoff.source.address =
        absl::StrCat(bare_ipv6 ? "[" : "", host, bare_ipv6 ? "]:" : ":", params.bootstrap_port());
    return ReadRoom(out);
  }

  void AddToEach(sg::GenerateResponse* message) const override {
    message->set_request_id(request_id_);
  }

  const NodeInfo::Role role_;
  const sg::GenerateRequest& request_;  // gRPC's, as long as the call
  const GenerateOptions& options_;
  std::string request_id_;
};

}  // namespace

absl::StatusOr<Request> FromProto(const sg::GenerateRequest& request, uint32_t vocab_size,
                                  uint32_t max_context) {
  SLUICE_RETURN_IF_ERROR(CheckName("request_id", request.request_id()));
  SLUICE_RETURN_IF_ERROR(CheckSupported(request));
  Request out;
  out.request_id = request.request_id();
  SLUICE_ASSIGN_OR_RETURN(
      out.prompt,
      TokenIds("tokenized.input_ids", request.tokenized().input_ids(), vocab_size, max_context));
  auto sampling = SamplingOf(request);
  if (!sampling.ok()) return InWordsOf(SglangNames(), sampling.status());
  out.sampling = *std::move(sampling);
  return out;
}

std::unique_ptr<GenerateDialectOf<sg::GenerateResponse>> NewSglangDialect(
    NodeInfo::Role role, const sg::GenerateRequest& request, const GenerateOptions& options) {
  return std::make_unique<SglangDialect>(role, request, options);
}

}  // namespace sluice
