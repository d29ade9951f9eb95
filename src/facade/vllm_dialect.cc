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
#include "src/service/proto_conversion.h"

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

absl::Status Unsupported(const std::string& field, const std::string& why) {
  return InvalidField(field, absl::StrCat("is not supported: ", why));
}

absl::Status CheckSupported(const ve::SamplingParams& params) {
  SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("sampling_params", params));
  const bool off =
      params.constraint_case() == ve::SamplingParams::kJsonObject && !params.json_object();
  if (params.constraint_case() != ve::SamplingParams::CONSTRAINT_NOT_SET && !off) {
    return Unsupported(absl::StrCat("sampling_params.", NameOf(params.constraint_case())),
                       "this server does not constrain decoding; ask for the form in the prompt");
  }
  if (params.grammar_from_first_token()) {
    return Unsupported("sampling_params.grammar_from_first_token",
                       "this server does not constrain decoding");
  }
  if (params.has_prompt_logprobs()) {
    return Unsupported("sampling_params.prompt_logprobs",
                       "a prompt's caches come without its log-probabilities");
  }
  if (params.has_truncate_prompt_tokens()) {
    return Unsupported("sampling_params.truncate_prompt_tokens",
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
    return Unsupported("text", "this server has no tokenizer; send tokenized.input_ids");
  }
  SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("tokenized", request.tokenized()));
  if (request.tokenized().input_ids().empty()) {
    return InvalidField("tokenized.input_ids", "is empty");
  }
  if (request.has_mm_inputs()) return Unsupported("mm_inputs", "the model takes text alone");
  if (request.extra_mm_inputs_size() > 0) {
    return Unsupported("extra_mm_inputs", "the model takes text alone");
  }
  if (request.has_media_refs()) return Unsupported("media_refs", "the model takes text alone");
  if (request.has_kv_transfer_params()) {
    return Unsupported("kv_transfer_params",
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
  v1::SamplingParams out;
  out.set_temperature(params.has_temperature() ? params.temperature() : 1.0f);
  // Without presence on the wire, zero is what was not given; as a value it would mean nothing.
  out.set_top_p(params.top_p() == 0 ? 1.0f : params.top_p());
  out.set_repetition_penalty(params.repetition_penalty() == 0 ? 1.0f : params.repetition_penalty());
  out.set_n(params.n() == 0 ? 1 : params.n());
  out.set_top_k(params.top_k());
  out.set_min_p(params.min_p());
  out.set_frequency_penalty(params.frequency_penalty());
  out.set_presence_penalty(params.presence_penalty());
  if (params.has_max_tokens()) out.set_max_tokens(params.max_tokens());
  out.set_min_tokens(params.min_tokens());
  *out.mutable_stop() = params.stop();
  *out.mutable_stop_token_ids() = params.stop_token_ids();
  out.set_ignore_eos(params.ignore_eos());
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

void AddLogprobs(absl::Span<const OutputToken> tokens, ve::OutputLogProbs* out) {
  for (const OutputToken& token : tokens) {
    out->add_token_logprobs(token.logprob.value_or(0));
    out->add_token_ids(static_cast<uint32_t>(token.id));
    ve::TopLogProbs* top = out->add_top_logprobs();
    for (const auto& [id, logprob] : token.top_logprobs) {
      top->add_values(logprob);
      top->add_token_ids(static_cast<uint32_t>(id));
    }
  }
}

class VllmDialect final : public GenerateDialectOf<ve::GenerateResponse> {
 public:
  VllmDialect(NodeInfo::Role role, const ve::GenerateRequest& request,
              const GenerateOptions& options)
      : role_(role), request_(request), options_(options) {}

  std::string request_id() const override { return request_.request_id(); }

  absl::StatusOr<Request> Read() override {
    SLUICE_ASSIGN_OR_RETURN(Request out,
                            FromProto(request_, options_.vocab_size, options_.max_context));
    const HandoffJson json{"kv_transfer_params_json", request_.has_kv_transfer_params_json(),
                           request_.kv_transfer_params_json()};
    if (role_ == NodeInfo::Role::kPrefill) {
      SLUICE_RETURN_IF_ERROR(CheckPrefillLeg(json));
    } else {
      SLUICE_RETURN_IF_ERROR(ReadDecodeLeg(json, &out));
    }
    streamed_ = request_.stream();
    logprobs_ = out.sampling.logprobs.has_value();
    prompt_tokens_ = static_cast<uint32_t>(out.prompt.size());
    return out;
  }

  absl::Status Translated(const absl::Status& status) const override {
    // To a gateway that chose to send no handoff that is a bad request, not a node in a bad state.
    if (ReasonOf(status) == "NO_HANDOFF") {
      return WithReason(InvalidField("kv_transfer_params_json", std::string(status.message())),
                        "NO_HANDOFF");
    }
    return InWordsOf(VllmNames(), status);
  }
  void Begin(const std::string& /*request_id*/) override {}

  bool SetTokens(absl::Span<const OutputToken> tokens) override {
    completed_ += static_cast<uint32_t>(tokens.size());
    for (const OutputToken& token : tokens) ids_.push_back(static_cast<uint32_t>(token.id));
    if (!streamed_) {
      if (logprobs_) AddLogprobs(tokens, &all_logprobs_);
      return false;
    }
    message()->Clear();
    ve::GenerateStreamChunk* chunk = message()->mutable_chunk();
    for (const OutputToken& token : tokens) chunk->add_token_ids(static_cast<uint32_t>(token.id));
    chunk->set_prompt_tokens(prompt_tokens_);
    chunk->set_completion_tokens(completed_);
    if (logprobs_) AddLogprobs(tokens, chunk->mutable_output_logprobs());
    return true;
  }
  bool EndHasTokens() const override { return false; }

  bool SetEnd(const FinishInfo& end, bool /*add*/) override {
    const bool aborted = ReasonOf(end.status) == "CANCEL_CALL";
    if (end.reason == FinishInfo::Reason::kError && !aborted) return false;
    message()->Clear();
    ve::GenerateComplete* complete = message()->mutable_complete();
    complete->mutable_output_ids()->Add(ids_.begin(), ids_.end());
    complete->set_finish_reason(aborted                                   ? "abort"
                                : end.reason == FinishInfo::Reason::kStop ? "stop"
                                                                          : "length");
    complete->set_prompt_tokens(prompt_tokens_);
    complete->set_completion_tokens(completed_);
    complete->set_cached_tokens(end.cached_tokens);
    if (logprobs_ && !streamed_) complete->mutable_output_logprobs()->Swap(&all_logprobs_);
    if (end.stop_string.has_value()) {
      complete->set_matched_stop_str(*end.stop_string);
    } else if (end.stop_token_id.has_value()) {
      complete->set_matched_token_id(static_cast<uint32_t>(*end.stop_token_id));
    }
    return true;
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

  const NodeInfo::Role role_;
  const ve::GenerateRequest& request_;  // gRPC's, as long as the call
  const GenerateOptions& options_;
  bool streamed_ = false;
  bool logprobs_ = false;
  uint32_t prompt_tokens_ = 0;
  uint32_t completed_ = 0;
  std::vector<uint32_t> ids_;        // all tokens so far
  ve::OutputLogProbs all_logprobs_;  // where nothing is streamed
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
