// Tokens as messages of the gateway `smg`: the engines' dialects name packages and number fields
// each in their way, but say the same.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "sluice/v1/common.pb.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/facade/refusals.h"
#include "src/request/request.h"
#include "src/service/generate/generate_reactor.h"

namespace sluice {

// What both engines' SamplingParams say by the same names. Without presence on the wire, zero is
// what was not given where as a value it would mean nothing.
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

// Of a dialect's GenerateResponse, which is a `chunk` of new tokens or, last, a `complete`.
template <typename Response>
class SmgDialect : public GenerateDialectOf<Response> {
 public:
  using Complete = std::remove_pointer_t<decltype(std::declval<Response>().mutable_complete())>;
  using LogProbs =
      std::remove_pointer_t<decltype(std::declval<Complete>().mutable_output_logprobs())>;

  // `names`: FieldNames of this dialect's requests; `handoff`: of them the one that says where the
  // caches are. Both outlive this.
  SmgDialect(const FieldNames& names, const char* handoff) : names_(names), handoff_(handoff) {}

  absl::Status Translated(const absl::Status& status) const final {
    // To a gateway that chose to send no handoff that is a bad request, not a node in a bad state.
    if (ReasonOf(status) == reasons::kNoHandoff) {
      return WithReason(InvalidField(handoff_, std::string(status.message())), reasons::kNoHandoff);
    }
    return InWordsOf(names_, status);
  }
  void Begin(const std::string& /*request_id*/) override {}
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
    AddToLast(complete, end);
    return true;
  }

 protected:
  // From Read().
  void ReadBy(const Request& request, bool streamed) {
    streamed_ = streamed;
    logprobs_ = request.sampling.logprobs.has_value();
    prompt_tokens_ = static_cast<uint32_t>(request.prompt.size());
  }
  // What every message, and what the last one, has in this dialect alone.
  virtual void AddToEach(Response* /*message*/) const {}
  virtual void AddToLast(Complete* /*complete*/, const FinishInfo& /*end*/) const {}

 private:
  Response* Clear() {
    this->message()->Clear();
    AddToEach(this->message());
    return this->message();
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

  const FieldNames& names_;
  const char* const handoff_;
  bool streamed_ = false;
  bool logprobs_ = false;
  uint32_t prompt_tokens_ = 0;
  uint32_t completed_ = 0;
  std::vector<uint32_t> ids_;  // all tokens so far
  LogProbs all_logprobs_;      // where nothing is streamed
};

}  // namespace sluice
