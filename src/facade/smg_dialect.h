// The part that all engines' dialects of the gateway `smg` share. Each engine's protocol has its
// own package and field numbers, but the messages say the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "sluice/v1/common.pb.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/facade/node_info.h"
#include "src/facade/refusals.h"
#include "src/request/request.h"
#include "src/request/source_ref.h"
#include "src/service/generate/generate_reactor.h"
#include "src/service/wire/proto_conversion.h"

namespace sluice {

// Returns the fields that the SamplingParams of all engines have under the same names. They have no
// presence on the wire, so zero stands for "not given" where it would mean nothing as a value.
template <typename Params>
v1::SamplingParams ReadShared(const Params& params) {
  v1::SamplingParams out;
  out.set_top_p(params.top_p() == 0 ? 1.0f : params.top_p());
  out.set_repetition_penalty(params.repetition_penalty() == 0 ? 1.0f : params.repetition_penalty());
  out.set_n(params.n() == 0 ? 1 : params.n());
  out.set_min_p(params.min_p());
  out.set_frequency_penalty(params.frequency_penalty());
  out.set_presence_penalty(params.presence_penalty());
  *out.mutable_stop() = params.stop();
  *out.mutable_stop_token_ids() = params.stop_token_ids();
  out.set_ignore_eos(params.ignore_eos());
  return out;
}

// Converts everything but handoff, deadline and sink. `Engine` is one engine's protocol:
//
//   struct Engine {
//     using GenerateRequest, GenerateResponse;     // its messages
//     static constexpr char kHandoffField[];       // the request's field that names the caches
//     static const FieldNames& Names();            // its names for our fields
//     // These return INVALID_ARGUMENT if the request asks for something that this server does not
//     // do: CheckInput for its input, CheckOwnFields for other fields that engines do not share.
//     static absl::Status CheckInput(const GenerateRequest&);
//     static absl::Status CheckOwnFields(const GenerateRequest&);
//     static absl::StatusOr<v1::SamplingParams> ReadSampling(const GenerateRequest&);
//     // Reads the handoff of one leg into the request.
//     static absl::Status ReadPrefillLeg(const GenerateRequest&, Request*);
//     static absl::Status ReadDecodeLeg(const GenerateRequest&, Request*);
//   };
template <typename Engine>
absl::StatusOr<Request> ReadRequest(const typename Engine::GenerateRequest& request,
                                    uint32_t vocab_size, uint32_t max_context) {
  SLUICE_RETURN_IF_ERROR(CheckName("request_id", request.request_id()));
  SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("", request));
  SLUICE_RETURN_IF_ERROR(Engine::CheckInput(request));
  SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("tokenized", request.tokenized()));
  if (request.tokenized().input_ids().empty()) {
    return InvalidField("tokenized.input_ids", "is empty");
  }
  if (request.has_mm_inputs()) return NotSupported("mm_inputs", "the model takes text alone");
  SLUICE_RETURN_IF_ERROR(Engine::CheckOwnFields(request));
  if (request.data_parallel_rank() != 0) {
    return InvalidField(
        "data_parallel_rank",
        absl::StrCat("must be 0, for there is one rank, found ", request.data_parallel_rank()));
  }
  Request out;
  out.request_id = request.request_id();
  SLUICE_ASSIGN_OR_RETURN(
      out.prompt,
      TokenIds("tokenized.input_ids", request.tokenized().input_ids(), vocab_size, max_context));
  SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("sampling_params", request.sampling_params()));
  SLUICE_ASSIGN_OR_RETURN(const v1::SamplingParams params, Engine::ReadSampling(request));
  auto sampling = FromProto(params);
  if (!sampling.ok()) return InWordsOf(Engine::Names(), sampling.status());
  out.sampling = *std::move(sampling);
  return out;
}

// One call. The engine's GenerateResponse is a `chunk` of new tokens or, last, a `complete`.
template <typename Engine>
class SmgDialect final : public GenerateDialectOf<typename Engine::GenerateResponse> {
 public:
  using Complete = std::remove_pointer_t<
      decltype(std::declval<typename Engine::GenerateResponse>().mutable_complete())>;
  using LogProbs =
      std::remove_pointer_t<decltype(std::declval<Complete>().mutable_output_logprobs())>;

  // `request` and `options` outlive the dialect.
  SmgDialect(NodeInfo::Role role, const typename Engine::GenerateRequest& request,
             const GenerateOptions& options)
      : role_(role), request_(request), options_(options) {}

  std::string request_id() const final { return request_.request_id(); }
  absl::StatusOr<Request> Read() final {
    SLUICE_ASSIGN_OR_RETURN(
        Request out, ReadRequest<Engine>(request_, options_.vocab_size, options_.max_context));
    if (role_ == NodeInfo::Role::kPrefill) {
      SLUICE_RETURN_IF_ERROR(Engine::ReadPrefillLeg(request_, &out));
      // A prefill node computes one token. The decode leg keeps the caller's own limits of length.
      out.sampling.max_tokens = 1;
      out.sampling.min_tokens = std::min(out.sampling.min_tokens, 1u);
    } else {
      SLUICE_RETURN_IF_ERROR(Engine::ReadDecodeLeg(request_, &out));
    }
    streamed_ = request_.stream();
    logprobs_ = out.sampling.logprobs.has_value();
    prompt_tokens_ = static_cast<uint32_t>(out.prompt.size());
    return out;
  }

  absl::Status Translated(const absl::Status& status) const final {
    // The gateway chose to send no handoff, so the request is bad, and not the node's state.
    if (ReasonOf(status) == reasons::kNoHandoff) {
      return WithReason(InvalidField(Engine::kHandoffField, std::string(status.message())),
                        reasons::kNoHandoff);
    }
    return InWordsOf(Engine::Names(), status);
  }
  void Begin(const std::string& request_id) final { request_id_ = request_id; }
  bool SetTokens(absl::Span<const OutputToken> tokens) final {
    completed_ += static_cast<uint32_t>(tokens.size());
    for (const OutputToken& token : tokens) ids_.push_back(static_cast<uint32_t>(token.id));
    if (!streamed_) {
      if (logprobs_) Add(tokens, &all_logprobs_);
      return false;
    }
    auto* const chunk = Clear()->mutable_chunk();
    for (const OutputToken& token : tokens) chunk->add_token_ids(static_cast<uint32_t>(token.id));
    chunk->set_prompt_tokens(prompt_tokens_);
    chunk->set_completion_tokens(completed_);
    if (logprobs_) Add(tokens, chunk->mutable_output_logprobs());
    return true;
  }
  bool EndHasTokens() const final { return false; }
  bool SetEnd(const FinishInfo& end, bool /*add*/) final {
    const bool aborted = ReasonOf(end.status) == reasons::kCancelCall;
    if (end.reason == FinishInfo::Reason::kError && !aborted) return false;
    Complete* const complete = Clear()->mutable_complete();
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
    if constexpr (requires { complete->set_kv_transfer_params_json(std::string()); }) {
      if (!end.source.empty()) complete->set_kv_transfer_params_json(ToJson(end.source));
    }
    return true;
  }

 private:
  typename Engine::GenerateResponse* Clear() {
    auto* const message = this->message();
    message->Clear();
    if constexpr (requires { message->set_request_id(request_id_); }) {
      message->set_request_id(request_id_);
    }
    return message;
  }
  static void Add(absl::Span<const OutputToken> tokens, LogProbs* out) {
    for (const OutputToken& token : tokens) {
      out->add_token_logprobs(token.logprob.value_or(0));
      out->add_token_ids(static_cast<uint32_t>(token.id));
      auto* const top = out->add_top_logprobs();
      for (const auto& [id, logprob] : token.top_logprobs) {
        top->add_values(logprob);
        top->add_token_ids(static_cast<uint32_t>(id));
      }
    }
  }

  const NodeInfo::Role role_;
  const typename Engine::GenerateRequest& request_;
  const GenerateOptions& options_;
  std::string request_id_;
  bool streamed_ = false;
  bool logprobs_ = false;
  uint32_t prompt_tokens_ = 0;
  uint32_t completed_ = 0;
  std::vector<uint32_t> ids_;  // all tokens so far
  LogProbs all_logprobs_;      // used if nothing is streamed
};

}  // namespace sluice
