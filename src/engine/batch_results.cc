// The results of a step: where they lie, whose they are where ranks have sequences of their own,
// and what the host reads of them.
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/engine/batch_state.h"

namespace sluice {

using kernels::kMaxTopLogprobs;

BatchState::Results BatchState::ResultsAt(const Buffer& buffer, int rank) const {
  Results r{};
  uint8_t* const first = buffer.as<uint8_t>() + rank * result_bytes();
  auto* const ids = reinterpret_cast<int32_t*>(first);
  auto* const values = reinterpret_cast<float*>(first);
  r.tokens = ids;
  r.logprobs = values + max_samples_;
  r.top_ids = ids + 2 * int64_t{max_samples_};
  r.top_logprobs = values + int64_t{max_samples_} * (2 + kMaxTopLogprobs);
  r.drafts = ids + int64_t{max_samples_} * (2 + 2 * kMaxTopLogprobs);
  return r;
}

OutputToken BatchState::Result(int buffer, int index, std::optional<uint32_t> logprobs) const {
  const auto b = static_cast<size_t>(buffer);
  int rank = 0;
  if (ranks_ != nullptr) {
    const RankRows::Place place = places_[b].at(static_cast<size_t>(index));
    rank = place.rank;
    index = place.index;
  }
  const Results results = ResultsAt(host_results_[b], rank);
  OutputToken token;
  token.id = results.tokens[index];
  if (!logprobs.has_value()) return token;
  token.logprob = results.logprobs[index];
  const int64_t first = int64_t{index} * kMaxTopLogprobs;
  for (int64_t i = first; i < first + *logprobs; ++i) {
    token.top_logprobs.emplace_back(results.top_ids[i], results.top_logprobs[i]);
  }
  return token;
}

int32_t BatchState::DraftAfter(int buffer, int index, int draft) const {
  SLUICE_CHECK(device_drafts_ != nullptr && draft < draft_tokens_);
  const auto b = static_cast<size_t>(buffer);
  return ResultsAt(host_results_[b]).drafts[int64_t{draft} * draft_stride_[b] + index];
}

}  // namespace sluice
