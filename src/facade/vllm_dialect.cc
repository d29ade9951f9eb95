#include "src/facade/vllm_dialect.h"

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/facade/handoff_json.h"
#include "src/facade/refusals.h"
#include "src/facade/smg_dialect.h"

namespace sluice {
namespace {

namespace ve = vllm::grpc::engine;

struct Vllm {
  using GenerateRequest = ve::GenerateRequest;
  using GenerateResponse = ve::GenerateResponse;
  static constexpr char kHandoffField[] = "kv_transfer_params_json";

  static const FieldNames& Names() {
    static const FieldNames names = {{"sampling.", "sampling_params."},
                                     {"prompt_token_ids", "tokenized.input_ids"}};
    return names;
  }

  static absl::Status CheckInput(const ve::GenerateRequest& request) {
    if (request.input_case() != ve::GenerateRequest::kText) return absl::OkStatus();
    return NotSupported("text", "this server has no tokenizer; send tokenized.input_ids");
  }

  static absl::Status CheckOwnFields(const ve::GenerateRequest& request) {
    if (request.extra_mm_inputs_size() > 0) {
      return NotSupported("extra_mm_inputs", "the model takes text alone");
    }
    if (request.has_media_refs()) return NotSupported("media_refs", "the model takes text alone");
    if (request.has_kv_transfer_params()) {
      return NotSupported(
          "kv_transfer_params",
          "it belongs to another connector; this server reads kv_transfer_params_json");
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<v1::SamplingParams> ReadSampling(const ve::GenerateRequest& request) {
    const ve::SamplingParams& params = request.sampling_params();
    SLUICE_RETURN_IF_ERROR(CheckSampling(params));
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
    return out;
  }

  static absl::Status ReadPrefillLeg(const ve::GenerateRequest& request, Request* /*out*/) {
    SLUICE_RETURN_IF_ERROR(CheckAsksToHold(HandoffOf(request)));
    const ve::SamplingParams& params = request.sampling_params();
    if (params.has_max_tokens() && params.max_tokens() == 1) return absl::OkStatus();
    return InvalidField("sampling_params.max_tokens",
                        "must be 1 at a prefill node, which computes the prompt and one token");
  }

  static absl::Status ReadDecodeLeg(const ve::GenerateRequest& request, Request* out) {
    return sluice::ReadDecodeLeg(HandoffOf(request), out);
  }

 private:
  static absl::Status CheckSampling(const ve::SamplingParams& params) {
    const bool off =
        params.constraint_case() == ve::SamplingParams::kJsonObject && !params.json_object();
    if (!off) {
      SLUICE_RETURN_IF_ERROR(CheckNotConstrained(params));
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

  static HandoffJson HandoffOf(const ve::GenerateRequest& request) {
    return {kHandoffField, request.has_kv_transfer_params_json(),
            request.kv_transfer_params_json()};
  }
};

}  // namespace

absl::StatusOr<Request> FromProto(const ve::GenerateRequest& request, uint32_t vocab_size,
                                  uint32_t max_context) {
  return ReadRequest<Vllm>(request, vocab_size, max_context);
}

std::unique_ptr<GenerateDialectOf<ve::GenerateResponse>> NewVllmDialect(
    NodeInfo::Role role, const ve::GenerateRequest& request, const GenerateOptions& options) {
  return std::make_unique<SmgDialect<Vllm>>(role, request, options);
}

}  // namespace sluice
