// A sampling step with its tables, and a naive oracle of its contract, written apart from every
// kernel.
#pragma once

#include <algorithm>
#include <vector>

#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {

inline SamplingSlot GreedySlot() {
  SamplingSlot s = {};
  s.top_p = 1;
  s.repetition_penalty = 1;
  return s;
}

// The step has one row per slot, slot i in row i; fields may be changed before Run().
class SampleFixture {
 public:
  static constexpr int kWorkers = 3;

  SampleFixture(int32_t row_count, int32_t vocab_size, int64_t history_room = 64)
      : rows(row_count),
        vocab(vocab_size),
        token_stride(history_room),
        logits(int64_t{rows} * vocab),
        sampling(rows),
        slots(rows),
        positions(rows),
        stop_ids(int64_t{rows} * kMaxStopIds),
        bias_ids(int64_t{rows} * kMaxLogitBias),
        bias_values(int64_t{rows} * kMaxLogitBias),
        tokens(rows * token_stride),
        out_tokens(rows),
        out_logprobs(rows),
        top_ids(int64_t{rows} * kMaxTopLogprobs),
        top_logprobs(int64_t{rows} * kMaxTopLogprobs),
        stores(rows) {
    for (int32_t r = 0; r < rows; ++r) {
      sampling[r] = GreedySlot();
      slots[r] = r;
      positions[r] = 0;
    }
    std::fill_n(tokens.data(), tokens.size(), 0);
  }

  float* row(int64_t r) { return logits.data() + r * vocab; }
  int32_t& token(int64_t slot, int64_t i) { return tokens[slot * token_stride + i]; }

  void Run(const KernelTable& path) {
    // The kernel may overwrite the logits; runs must not depend on each other.
    Guarded<float> copy(logits.size());
    std::copy_n(logits.data(), logits.size(), copy.data());
    Guarded<unsigned char> scratch(kWorkers * SampleScratchBytes(vocab));
    const SampleParams p = {copy.data(),
                            slots.data(),
                            positions.data(),
                            sampling.data(),
                            stop_ids.data(),
                            bias_ids.data(),
                            bias_values.data(),
                            tokens.data(),
                            token_stride,
                            out_tokens.data(),
                            out_logprobs.data(),
                            top_ids.data(),
                            top_logprobs.data(),
                            scratch.data(),
                            rows,
                            vocab,
                            some_store ? stores.data() : nullptr};
    RunWorkers(path.sample, p, kWorkers);
    for (const std::string& damage :
         {copy.Damage(), scratch.Damage(), tokens.Damage(), out_tokens.Damage(),
          out_logprobs.Damage(), top_ids.Damage(), top_logprobs.Damage()}) {
      CHECK(damage == "");
    }
  }

  int32_t rows, vocab;
  int64_t token_stride;
  Guarded<float> logits;
  Guarded<SamplingSlot> sampling;
  Guarded<int32_t> slots, positions;
  Guarded<int32_t> stop_ids, bias_ids;
  Guarded<float> bias_values;
  Guarded<int32_t> tokens, out_tokens;
  Guarded<float> out_logprobs;
  Guarded<int32_t> top_ids;
  Guarded<float> top_logprobs;
  Guarded<int32_t> stores;  // counts if some_store
  bool some_store = false;  // false: every row stores its choice
};

// Returns the distribution that row r must be drawn from: one probability per token.
inline std::vector<double> OracleProbabilities(SampleFixture& f, int64_t r) {
  const SamplingSlot& s = f.sampling[static_cast<size_t>(r)];
  const int32_t position = f.positions[static_cast<size_t>(r)];
  std::vector<double> l(f.row(r), f.row(r) + f.vocab);
  std::vector<int> seen(l.size(), 0), made(l.size(), 0);
  for (int32_t i = 0; i <= position; ++i) {
    seen[static_cast<size_t>(f.token(r, i))] = 1;
    if (i >= s.prompt_length) ++made[static_cast<size_t>(f.token(r, i))];
  }
  for (size_t v = 0; v < l.size(); ++v) {
    if (seen[v] != 0) l[v] = l[v] > 0 ? l[v] / s.repetition_penalty : l[v] * s.repetition_penalty;
    l[v] -= double{s.frequency_penalty} * made[v];
    if (made[v] > 0) l[v] -= s.presence_penalty;
  }
  for (int32_t i = 0; i < s.bias_count; ++i) {
    l[static_cast<size_t>(f.bias_ids[r * kMaxLogitBias + i])] +=
        f.bias_values[r * kMaxLogitBias + i];
  }
  if (position + 1 - s.prompt_length < s.min_tokens) {
    for (int32_t i = 0; i < s.stop_count; ++i) {
      l[static_cast<size_t>(f.stop_ids[r * kMaxStopIds + i])] =
          -std::numeric_limits<double>::infinity();
    }
  }
  std::vector<size_t> order(l.size());
  for (size_t v = 0; v < order.size(); ++v) order[v] = v;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return l[a] > l[b]; });
  std::vector<double> probability(l.size(), 0.0);
  if (s.temperature == 0) {
    probability[order[0]] = 1;
    return probability;
  }
  size_t keep = s.top_k > 0 ? std::min(order.size(), static_cast<size_t>(s.top_k)) : order.size();
  double total = 0;
  for (size_t i = 0; i < keep; ++i) {
    probability[order[i]] = std::exp((l[order[i]] - l[order[0]]) / double{s.temperature});
    total += probability[order[i]];
  }
  double reached = 0;
  for (size_t i = 0; i < keep; ++i) {
    double& p = probability[order[i]];
    const bool outside = i > 0 && s.top_p < 1 && reached >= double{s.top_p} * total;
    reached += p;
    if (outside || p < double{s.min_p}) p = 0;
  }
  total = 0;
  for (double p : probability) total += p;
  for (double& p : probability) p /= total;
  return probability;
}

// Returns the token that row r's draw must give.
inline int32_t OracleToken(SampleFixture& f, int64_t r) {
  const SamplingSlot& s = f.sampling[static_cast<size_t>(r)];
  const std::vector<double> probability = OracleProbabilities(f, r);
  const auto index =
      static_cast<uint64_t>(f.positions[static_cast<size_t>(r)] + 1 - s.prompt_length);
  const double u = UniformFromSeed(s.seed, index);
  double sum = 0;
  int32_t last = -1;
  for (size_t v = 0; v < probability.size(); ++v) {
    if (probability[v] == 0) continue;
    sum += probability[v];
    last = static_cast<int32_t>(v);
    if (sum > u) break;
  }
  return last;
}

}  // namespace sluice::kernels
