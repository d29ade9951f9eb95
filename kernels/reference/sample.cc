#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

struct Candidate {
  int32_t id;
  double logit;
  double weight;
};

bool Better(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

bool Usable(const std::vector<double>& logits) {
  bool any = false;
  for (double l : logits) {
    if (std::isnan(l) || l == std::numeric_limits<double>::infinity()) return false;
    any = any || l != kMinusInfinity;
  }
  return any;
}

void ApplyPenalties(const SampleParams& p, int32_t slot, int32_t position,
                    std::vector<double>& logits) {
  const SamplingSlot& s = p.sampling[slot];
  std::map<int32_t, int32_t> output_count;  // every distinct token of the history
  for (int32_t i = 0; i <= position; ++i) {
    const int32_t token = p.tokens[slot * p.token_stride + i];
    if (token < 0 || token >= p.vocab) continue;
    output_count[token] += i >= s.prompt_length ? 1 : 0;
  }
  for (const auto& [token, count] : output_count) {
    double& l = logits[static_cast<size_t>(token)];
    l = l > 0 ? l / s.repetition_penalty : l * s.repetition_penalty;
    l -= double{s.frequency_penalty} * count + (count > 0 ? double{s.presence_penalty} : 0.0);
  }
  for (int32_t i = 0; i < s.bias_count; ++i) {
    const int64_t entry = int64_t{slot} * kMaxLogitBias + i;
    logits[static_cast<size_t>(p.bias_ids[entry])] += p.bias_values[entry];
  }
  if (position + 1 - s.prompt_length < s.min_tokens) {
    for (int32_t i = 0; i < s.stop_count; ++i) {
      logits[static_cast<size_t>(p.stop_ids[int64_t{slot} * kMaxStopIds + i])] = kMinusInfinity;
    }
  }
}

int32_t Draw(const SamplingSlot& s, int32_t output_index, const std::vector<double>& logits) {
  std::vector<Candidate> all;
  for (size_t i = 0; i < logits.size(); ++i) {
    all.push_back({static_cast<int32_t>(i), logits[i], 0});
  }
  std::sort(all.begin(), all.end(), Better);
  if (s.temperature == 0) return all[0].id;
  if (s.top_k > 0 && static_cast<size_t>(s.top_k) < all.size()) {
    all.resize(static_cast<size_t>(s.top_k));
  }
  double total = 0;
  const double best = all[0].logit;
  for (Candidate& c : all) {
    c.weight = std::exp((c.logit - best) / double{s.temperature});
    total += c.weight;
  }
  if (s.top_p < 1) {
    double sum = 0;
    size_t keep = 0;
    while (keep < all.size() && (keep == 0 || sum < double{s.top_p} * total)) {
      sum += all[keep++].weight;
    }
    all.resize(keep);
  }
  std::erase_if(all, [&](const Candidate& c) { return c.weight < double{s.min_p}; });
  std::sort(all.begin(), all.end(),
            [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  total = 0;
  for (const Candidate& c : all) total += c.weight;
  const double target = UniformFromSeed(s.seed, static_cast<uint64_t>(output_index)) * total;
  double sum = 0;
  int32_t last = -1;
  for (const Candidate& c : all) {
    if (c.weight == 0) continue;
    sum += c.weight;
    last = c.id;
    if (sum > target) break;
  }
  return last;
}

void ReportLogprobs(const SampleParams& p, int64_t row, int32_t wanted, int32_t token,
                    const std::vector<double>& raw) {
  const double largest = *std::max_element(raw.begin(), raw.end());
  double sum = 0;
  for (double l : raw) sum += std::exp(l - largest);
  const double lse = largest + std::log(sum);
  p.out_logprobs[row] = static_cast<float>(raw[static_cast<size_t>(token)] - lse);
  std::vector<Candidate> all;
  for (size_t i = 0; i < raw.size(); ++i) all.push_back({static_cast<int32_t>(i), raw[i], 0});
  std::sort(all.begin(), all.end(), Better);
  for (int32_t i = 0; i < wanted; ++i) {
    const bool exists = static_cast<size_t>(i) < all.size();
    p.out_top_ids[row * kMaxTopLogprobs + i] = exists ? all[static_cast<size_t>(i)].id : -1;
    p.out_top_logprobs[row * kMaxTopLogprobs + i] =
        exists ? static_cast<float>(all[static_cast<size_t>(i)].logit - lse) : kNegativeInfinity;
  }
}

}  // namespace

void Sample(const SampleParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const int32_t slot = p.slots[r], position = p.positions[r];
    if (slot < 0) continue;
    const SamplingSlot& s = p.sampling[slot];
    const std::vector<double> raw(p.logits + r * p.vocab, p.logits + (r + 1) * p.vocab);
    int32_t token = -1;
    if (Usable(raw)) {
      std::vector<double> logits = raw;
      ApplyPenalties(p, slot, position, logits);
      if (Usable(logits)) token = Draw(s, position + 1 - s.prompt_length, logits);
    }
    p.out_tokens[r] = token;
    if (Stores(p, r)) p.tokens[slot * p.token_stride + position + 1] = token;
    if (token >= 0 && (s.logprobs != 0 || s.top_logprobs > 0)) {
      ReportLogprobs(p, r, s.top_logprobs, token, raw);
    }
  }
}

}  // namespace sluice::kernels::reference
