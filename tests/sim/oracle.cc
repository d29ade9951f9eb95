#include "tests/sim/oracle.h"

#include <algorithm>
#include <utility>

#include "kernels/kernel_table.h"
#include "src/base/status_macros.h"
#include "tests/sim/hash_model.h"

namespace sluice::sim {

void History::Append(int32_t token) {
  state_ = Embed(token, static_cast<int32_t>(tokens_.size()));
  tokens_.push_back(token);
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int i = 0; i < kTokenWords; ++i) words_[layer].push_back(KvWord(state_, layer, i));
    if (top_k_ > 0) {
      AppendLatents(layer);
      continue;
    }
    const uint64_t* const words = Words(layer, tokens_.size() - 1);
    for (int head = 0; head < kKvHeads; ++head) {
      const uint64_t* const k = words + head * kParts * kWords;
      sums_[layer][head] += TokenHash(k, k + kWords);
      state_ = Mix(state_, sums_[layer][head]);
    }
  }
}

void History::AppendLatents(int layer) {
  std::vector<std::pair<float, size_t>> scores;  // negative, so that the best come first
  const uint64_t query = QueryWord(state_, layer, kIndexQueryWord);
  for (size_t position = 0; position < tokens_.size(); ++position) {
    const uint64_t key = WordsHash(Words(layer, position) + kEntryWords, kKeyWords);
    scores.emplace_back(-IndexScore(query, key), position);
  }
  std::sort(scores.begin(), scores.end());
  scores.resize(std::min(scores.size(), static_cast<size_t>(top_k_)));
  const uint64_t queries = QueryWord(state_, layer, kLatentQueryWord);
  for (int head = 0; head < kHeads; ++head) {
    uint64_t sum = 0;
    for (const auto& [score, position] : scores) sum += EntryHash(Words(layer, position), head);
    state_ = Mix(state_, sum);
  }
  state_ = Mix(state_, queries);
}

std::vector<uint8_t> History::Payload(int layer, int head_begin, int head_end, size_t token_begin,
                                      size_t token_end, int block_tokens) const {
  std::vector<uint8_t> payload;
  const auto step = static_cast<size_t>(block_tokens);
  for (size_t block = token_begin; block < token_end; block += step) {
    const size_t end = std::min(block + step, token_end);
    if (top_k_ > 0) {
      SLUICE_CHECK(head_end == head_begin + 1, "a chunk is of one kind");
      const int first = head_begin == 0 ? 0 : kEntryWords;
      const int count = head_begin == 0 ? kEntryWords : kKeyWords;
      for (size_t token = block; token < end; ++token) {
        const auto* const bytes = reinterpret_cast<const uint8_t*>(Words(layer, token) + first);
        payload.insert(payload.end(), bytes, bytes + count * 8);
      }
      continue;
    }
    for (int head = head_begin; head < head_end; ++head) {
      for (int part = 0; part < kParts; ++part) {
        for (size_t token = block; token < end; ++token) {
          const uint64_t* const words = Words(layer, token) + (head * kParts + part) * kWords;
          const auto* const bytes = reinterpret_cast<const uint8_t*>(words);
          payload.insert(payload.end(), bytes, bytes + kWords * 8);
        }
      }
    }
  }
  return payload;
}

namespace {

// Chooses the next token of a history; -1: its logits are not finite.
OutputToken Choose(const History& history, size_t prompt_length, const SamplingParams& params,
                   const std::vector<int32_t>& stop_ids) {
  std::vector<int32_t> tokens = history.tokens();
  std::vector<float> logits(kVocab);
  for (int v = 0; v < kVocab; ++v) {
    logits[static_cast<size_t>(v)] = Logit(history.state(), tokens.back(), v);
  }
  const kernels::SamplingSlot slot = MakeSamplingSlot(
      params, 0, static_cast<int32_t>(prompt_length), static_cast<int32_t>(stop_ids.size()));
  std::vector<int32_t> bias_ids;
  std::vector<float> bias_values;
  for (const auto& [id, value] : params.logit_bias) {
    bias_ids.push_back(static_cast<int32_t>(id));
    bias_values.push_back(value);
  }
  const int32_t slot_number = 0, position = static_cast<int32_t>(tokens.size()) - 1;
  tokens.push_back(-1);
  std::vector<int32_t> top_ids(kernels::kMaxTopLogprobs);
  std::vector<float> top_logprobs(kernels::kMaxTopLogprobs);
  std::vector<uint8_t> scratch(static_cast<size_t>(kernels::SampleScratchBytes(kVocab)));
  OutputToken chosen;
  float logprob = 0;
  kernels::SampleParams p{};
  p.logits = logits.data();
  p.slots = &slot_number;
  p.positions = &position;
  p.sampling = &slot;
  p.stop_ids = stop_ids.data();
  p.bias_ids = bias_ids.data();
  p.bias_values = bias_values.data();
  p.tokens = tokens.data();
  p.token_stride = static_cast<int64_t>(tokens.size());
  p.out_tokens = &chosen.id;
  p.out_logprobs = &logprob;
  p.out_top_ids = top_ids.data();
  p.out_top_logprobs = top_logprobs.data();
  p.scratch = scratch.data();
  p.rows = 1;
  p.vocab = kVocab;
  HashKernels().sample(p, {0, 1});
  if (chosen.id < 0 || !params.logprobs.has_value()) return chosen;
  chosen.logprob = logprob;
  for (size_t i = 0; i < *params.logprobs; ++i) {
    chosen.top_logprobs.emplace_back(top_ids[i], top_logprobs[i]);
  }
  return chosen;
}

}  // namespace

Expected Expect(const std::vector<int32_t>& prompt, const std::vector<OutputToken>& first,
                const SamplingParams& params, int64_t max_tokens, int top_k) {
  Expected expected;
  const std::vector<int32_t> stop_ids = StopIds(params, {kEosToken});
  History history(top_k);
  for (const int32_t token : prompt) history.Append(token);
  while (true) {
    const size_t index = expected.tokens.size();
    OutputToken token;
    if (index < first.size()) {
      token = first[index];
      if (!params.logprobs.has_value()) token.logprob.reset(), token.top_logprobs.clear();
    } else {
      token = Choose(history, prompt.size(), params, stop_ids);
    }
    if (token.id < 0) {
      expected.end = Expected::End::kBadLogits;
      return expected;
    }
    history.Append(token.id);
    expected.tokens.push_back(token);
    if (index + 1 > params.min_tokens &&
        std::find(stop_ids.begin(), stop_ids.end(), token.id) != stop_ids.end()) {
      expected.end = Expected::End::kStop;
      expected.stop_token = token.id;
      return expected;
    }
    if (static_cast<int64_t>(expected.tokens.size()) == max_tokens) return expected;
  }
}

}  // namespace sluice::sim
