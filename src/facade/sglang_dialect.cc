#include "src/facade/sglang_dialect.h"

#include <algorithm>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/facade/refusals.h"
#include "src/facade/smg_dialect.h"

namespace sluice {
namespace {

namespace sg = sglang::grpc::scheduler;

struct Sglang {
  using GenerateRequest = sg::GenerateRequest;
  using GenerateResponse = sg::GenerateResponse;
  static constexpr char kHandoffField[] = "disaggregated_params";

  static const FieldNames& Names() {
    static const FieldNames names = {{"sampling.max_tokens", "sampling_params.max_new_tokens"},
                                     {"sampling.min_tokens", "sampling_params.min_new_tokens"},
                                     {"sampling.logprobs", "top_logprobs_num"},
                                     {"sampling.", "sampling_params."},
                                     {"prompt_token_ids", "tokenized.input_ids"},
                                     {"source.address", "disaggregated_params.bootstrap_host"}};
    return names;
  }

  static absl::Status CheckInput(const sg::GenerateRequest& request) {
    if (request.input_embeds().empty()) return absl::OkStatus();
    return NotSupported("input_embeds", "send tokenized.input_ids");
  }

  static absl::Status CheckOwnFields(const sg::GenerateRequest& request) {
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
      return NotSupported("custom_logit_processor", "this server runs no code from requests");
    }
    if (!request.lora_id().empty()) return NotSupported("lora_id", "this server has no adapters");
    if (request.require_reasoning()) {
      return NotSupported("require_reasoning",
                          "this server does not count tokens of thinking separately");
    }
    if (request.top_logprobs_num() < 0) {
      return InvalidField("top_logprobs_num",
                          absl::StrCat("at least 0, found ", request.top_logprobs_num()));
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<v1::SamplingParams> ReadSampling(const sg::GenerateRequest& request) {
    const sg::SamplingParams& params = request.sampling_params();
    SLUICE_RETURN_IF_ERROR(CheckSampling(params));
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
    return out;
  }

  static absl::Status ReadPrefillLeg(const sg::GenerateRequest& request, Request* out) {
    if (!request.has_disaggregated_params()) {
      return InvalidField("disaggregated_params",
                          "is missing: a prefill node computes prompts for a decode node, which "
                          "asks for them by bootstrap_room");
    }
    return ReadRoom(request.disaggregated_params(), out);
  }

  static absl::Status ReadDecodeLeg(const sg::GenerateRequest& request, Request* out) {
    if (!request.has_disaggregated_params()) return absl::OkStatus();
    const sg::DisaggregatedParams& params = request.disaggregated_params();
    if (params.bootstrap_host().empty()) {
      return InvalidField("disaggregated_params.bootstrap_host", "is empty");
    }
    if (params.bootstrap_port() < 1 || params.bootstrap_port() > 65535) {
      return InvalidField(
          "disaggregated_params.bootstrap_port",
          absl::StrCat("must be the prefill node's gRPC port, found ", params.bootstrap_port(),
                       " (smg: --prefill grpc://HOST:PORT PORT)"));
    }
    const std::string& host = params.bootstrap_host();
    const bool bare_ipv6 = absl::StrContains(host, ':') && !absl::StartsWith(host, "[");
    out->handoff.source.address =
        absl::StrCat(bare_ipv6 ? "[" : "", host, bare_ipv6 ? "]:" : ":", params.bootstrap_port());
    return ReadRoom(params, out);
  }

 private:
  static absl::Status CheckSampling(const sg::SamplingParams& params) {
    SLUICE_RETURN_IF_ERROR(CheckNotConstrained(params));
    if (params.has_custom_params()) {
      return NotSupported("sampling_params.custom_params",
                          "this server takes no custom parameters");
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

  static absl::Status ReadRoom(const sg::DisaggregatedParams& params, Request* out) {
    SLUICE_RETURN_IF_ERROR(CheckNoUnknownFields("disaggregated_params", params));
    if (params.bootstrap_room() < 0) {
      return InvalidField("disaggregated_params.bootstrap_room",
                          absl::StrCat("at least 0, found ", params.bootstrap_room()));
    }
    out->handoff.source.room = static_cast<uint64_t>(params.bootstrap_room());
    return absl::OkStatus();
  }
};

}  // namespace

absl::StatusOr<Request> FromProto(const sg::GenerateRequest& request, uint32_t vocab_size,
                                  uint32_t max_context) {
  return ReadRequest<Sglang>(request, vocab_size, max_context);
}

std::unique_ptr<GenerateDialectOf<sg::GenerateResponse>> NewSglangDialect(
    NodeInfo::Role role, const sg::GenerateRequest& request, const GenerateOptions& options) {
  return std::make_unique<SmgDialect<Sglang>>(role, request, options);
}

}  // namespace sluice
