// Sampling, shared by the CPU paths: whatever path made the logits, the choice of tokens is the
// same.
//
// Nothing is allocated: a worker's scratch holds, per vocabulary entry, a double (weights; before
// that the token counts of the penalties), a float (the changed logits) and an id.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu_tables.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

struct Scratch {
  Scratch(void* scratch, int64_t vocab, int worker)
      : weights(
            reinterpret_cast<double*>(static_cast<char*>(scratch) +
                                      worker * SampleScratchBytes(static_cast<int32_t>(vocab)))),
        counts(reinterpret_cast<int32_t*>(weights)),
        logits(reinterpret_cast<float*>(weights + vocab)),
        ids(reinterpret_cast<int32_t*>(logits + vocab)) {}

  double* weights;  // aliases counts: the penalties are done before the first weight
  int32_t* counts;
  float* logits;
  int32_t* ids;
};

// Orders ids by logit, best first; among equals the lower id is better.
struct Better {
  const float* logits;
  bool operator()(int32_t a, int32_t b) const {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  }
};

// Returns the largest logit; +inf or NaN if one is; -inf if none is finite. It works in lanes,
// which the compiler makes vectors of.
float LargestOrBad(const float* logits, int64_t vocab) {
  constexpr int kLanes = 16;
  float largest[kLanes];
  uint32_t nan[kLanes] = {};
  for (float& lane : largest) lane = kNegativeInfinity;
  const auto take = [&](int lane, float l) {
    nan[lane] |= l != l ? 1u : 0u;
    largest[lane] = l > largest[lane] ? l : largest[lane];
  };
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) take(j, logits[i + j]);
  }
  for (; i < vocab; ++i) take(0, logits[i]);
  for (int j = 1; j < kLanes; ++j) {
    nan[0] |= nan[j];
    take(0, largest[j]);
  }
  return nan[0] != 0 ? __builtin_nanf("") : largest[0];
}

bool Finite(float v) { return v - v == 0; }

bool ChangesLogits(const SamplingSlot& s, int64_t outputs) {
  return s.repetition_penalty != 1 || s.frequency_penalty != 0 || s.presence_penalty != 0 ||
         s.bias_count > 0 || (s.stop_count > 0 && outputs < s.min_tokens);
}

void ApplyPenalties(const SampleParams& p, int64_t slot, int64_t position, Scratch& scratch) {
  const SamplingSlot& s = p.sampling[slot];
  if (s.repetition_penalty == 1 && s.frequency_penalty == 0 && s.presence_penalty == 0) return;
  const int32_t* history = p.tokens + slot * p.token_stride;
  const auto valid = [&](int64_t i) { return history[i] >= 0 && history[i] < p.vocab; };
  constexpr int32_t kUnseen = -1;
  for (int64_t i = 0; i <= position; ++i) {
    if (valid(i)) scratch.counts[history[i]] = kUnseen;
  }
  for (int64_t i = 0; i <= position; ++i) {
    if (!valid(i)) continue;
    int32_t& count = scratch.counts[history[i]];
    if (count == kUnseen) {
      count = 0;
      float& l = scratch.logits[history[i]];
      l = l > 0 ? l / s.repetition_penalty : l * s.repetition_penalty;
    }
    count += i >= s.prompt_length ? 1 : 0;
  }
  for (int64_t i = s.prompt_length; i <= position; ++i) {
    if (!valid(i)) continue;
    int32_t& count = scratch.counts[history[i]];
    if (count == 0) continue;
    scratch.logits[history[i]] -=
        s.frequency_penalty * static_cast<float>(count) + s.presence_penalty;
    count = 0;  // a token counts once, however often it comes again
  }
}

void ApplyBiasAndStops(const SampleParams& p, int64_t slot, int64_t outputs, Scratch& scratch) {
  const SamplingSlot& s = p.sampling[slot];
  for (int64_t i = slot * kMaxLogitBias; i < slot * kMaxLogitBias + s.bias_count; ++i) {
    if (p.bias_ids[i] >= 0 && p.bias_ids[i] < p.vocab) {
      scratch.logits[p.bias_ids[i]] += p.bias_values[i];
    }
  }
  if (outputs >= s.min_tokens) return;
  for (int64_t i = slot * kMaxStopIds; i < slot * kMaxStopIds + s.stop_count; ++i) {
    if (p.stop_ids[i] >= 0 && p.stop_ids[i] < p.vocab) {
      scratch.logits[p.stop_ids[i]] = kNegativeInfinity;
    }
  }
}

int32_t ArgMax(const float* logits, int64_t vocab, float largest) {
  int64_t i = 0;
  while (i + 1 < vocab && logits[i] != largest) ++i;
  return static_cast<int32_t>(i);
}

// Fills ids with the k best in no order. One pass keeps those above the k-th best seen so far in a
// buffer, which is cut back to k whenever it is full.
void SelectTopK(const float* logits, int64_t vocab, int64_t k, int32_t* ids) {
  const Better better{logits};
  const int64_t room = Min(vocab, Max(2 * k, 1024));
  int64_t count = 0;
  float threshold = kNegativeInfinity;
  bool full = false;  // whether `threshold` is a real k-th best
  for (int64_t i = 0; i < vocab; ++i) {
    // An equal of the k-th best with a higher id than all k seen never enters.
    if (full && logits[i] <= threshold) continue;
    if (count == room) {
      std::nth_element(ids, ids + k - 1, ids + count, better);
      count = k;
      threshold = logits[ids[k - 1]];
      full = true;
      if (logits[i] <= threshold) continue;
    }
    ids[count++] = static_cast<int32_t>(i);
  }
  if (count > k) std::nth_element(ids, ids + k - 1, ids + count, better);
}

// Returns exp(x) for x <= 0 within 2 ulp; below -700 it is 0. It has no branches or calls, so that
// the compiler makes vectors of it: libm's exp takes most of a sampling pass.
double ExpNonPositive(double x) {
  constexpr double kLog2E = 1.4426950408889634074;
  constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  constexpr double kRound = 0x1.8p52;  // adding it leaves an integer in the low mantissa bits
  const double clamped = x < -700.0 ? -700.0 : x;
  const double shifted = clamped * kLog2E + kRound;
  const double n = shifted - kRound;
  const double r = (clamped - n * kLn2High) - n * kLn2Low;
  double e = 1.0 / 6227020800.0;
  e = e * r + 1.0 / 479001600.0;
  e = e * r + 1.0 / 39916800.0;
  e = e * r + 1.0 / 3628800.0;
  e = e * r + 1.0 / 362880.0;
  e = e * r + 1.0 / 40320.0;
  e = e * r + 1.0 / 5040.0;
  e = e * r + 1.0 / 720.0;
  e = e * r + 1.0 / 120.0;
  e = e * r + 1.0 / 24.0;
  e = e * r + 1.0 / 6.0;
  e = e * r + 0.5;
  e = e * r + 1.0;
  e = e * r + 1.0;
  const uint64_t exponent = (__builtin_bit_cast(uint64_t, shifted) + 1023) << 52;
  const double scaled = e * __builtin_bit_cast(double, exponent);
  return x < -700.0 ? 0.0 : scaled;
}

// Computes weights[i] = exp((logits[id_i] - largest) / temperature), where id_i is i if ids is
// null.
double FillWeights(const float* logits, const int32_t* ids, int64_t count, float largest,
                   double temperature, double* weights) {
  const double inverse = 1.0 / temperature;
  const double offset = largest;
  if (ids == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      weights[i] = ExpNonPositive((double{logits[i]} - offset) * inverse);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      weights[i] = ExpNonPositive((double{logits[ids[i]]} - offset) * inverse);
    }
  }
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += weights[i];
  return total;
}

// Cuts ids (in no order) to the fewest best whose weights reach `goal`, best first. It sorts chunks
// that grow: a nucleus is mostly far smaller than the vocabulary.
int64_t CutToNucleus(const float* logits, int32_t* ids, int64_t count, double goal, float largest,
                     double temperature) {
  const Better better{logits};
  const double inverse = 1.0 / temperature;
  double sum = 0;
  int64_t sorted = 0, chunk = 64;
  for (int64_t i = 0; i < count; ++i) {
    if (i == sorted) {
      const int64_t end = Min(count, sorted + chunk);
      if (end < count) std::nth_element(ids + sorted, ids + end - 1, ids + count, better);
      std::sort(ids + sorted, ids + end, better);
      sorted = end;
      chunk *= 8;
    }
    sum += ExpNonPositive((double{logits[ids[i]]} - double{largest}) * inverse);
    if (sum >= goal) return i + 1;
  }
  return count;
}

// Writes the survivors of top_k and top_p as ids in rising order; returns how many, or -1 for
// "all".
int64_t SelectCandidates(const SamplingSlot& s, const float* logits, int64_t vocab, float largest,
                         Scratch& scratch) {
  const bool top_k = s.top_k > 0 && s.top_k < vocab;
  const bool top_p = s.top_p < 1;
  if (!top_k && !top_p) return -1;
  int64_t count = 0;
  if (top_k) {
    count = s.top_k;
    SelectTopK(logits, vocab, count, scratch.ids);
  }
  if (top_p) {
    const double total = FillWeights(logits, top_k ? scratch.ids : nullptr, top_k ? count : vocab,
                                     largest, s.temperature, scratch.weights);
    if (!top_k) {
      // Tokens lighter than (1 - top_p) * total / vocab weigh less than (1 - top_p) * total
      // together, so the nucleus is complete without them. The bound is halved to be safe from
      // rounding.
      const double floor = (1.0 - double{s.top_p}) * total / static_cast<double>(vocab) * 0.5;
      for (int64_t i = 0; i < vocab; ++i) {
        scratch.ids[count] = static_cast<int32_t>(i);
        count += scratch.weights[i] >= floor ? 1 : 0;
      }
    }
    count =
        CutToNucleus(logits, scratch.ids, count, double{s.top_p} * total, largest, s.temperature);
  }
  std::sort(scratch.ids, scratch.ids + count);
  return count;
}

int32_t Draw(const SamplingSlot& s, int64_t output_index, const float* logits, int64_t vocab,
             float largest, Scratch& scratch) {
  const int64_t selected = SelectCandidates(s, logits, vocab, largest, scratch);
  const int32_t* ids = selected < 0 ? nullptr : scratch.ids;
  const int64_t count = selected < 0 ? vocab : selected;
  double total = FillWeights(logits, ids, count, largest, s.temperature, scratch.weights);
  if (s.min_p > 0) {
    total = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (scratch.weights[i] < double{s.min_p}) scratch.weights[i] = 0;
      total += scratch.weights[i];
    }
  }
  const double target = UniformFromSeed(s.seed, static_cast<uint64_t>(output_index)) * total;
  double sum = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (scratch.weights[i] == 0) continue;
    sum += scratch.weights[i];
    last = i;
    if (sum > target) break;
  }
  return ids == nullptr ? static_cast<int32_t>(last) : ids[last];
}

// Writes log-probabilities of the raw logits. The best few are kept sorted by insertion.
void ReportLogprobs(const SampleParams& p, int64_t row, int64_t wanted, int32_t token,
                    const float* logits, float largest) {
  const Better better{logits};
  double sum = 0;
  for (int64_t i = 0; i < p.vocab; ++i) {
    sum += ExpNonPositive(double{logits[i]} - double{largest});
  }
  const double lse = double{largest} + std::log(sum);
  p.out_logprobs[row] = static_cast<float>(double{logits[token]} - lse);
  wanted = Min(wanted, kMaxTopLogprobs);
  int32_t* top = p.out_top_ids + row * kMaxTopLogprobs;
  int64_t count = 0;
  for (int32_t i = 0; wanted > 0 && i < p.vocab; ++i) {
    if (count == wanted && !(logits[i] > logits[top[count - 1]])) continue;
    int64_t at = count < wanted ? count++ : count - 1;
    for (; at > 0 && better(i, top[at - 1]); --at) top[at] = top[at - 1];
    top[at] = i;
  }
  for (int64_t i = 0; i < wanted; ++i) {
    if (i >= count) top[i] = -1;
    p.out_top_logprobs[row * kMaxTopLogprobs + i] =
        i < count ? static_cast<float>(double{logits[top[i]]} - lse) : kNegativeInfinity;
  }
}

void SampleRow(const SampleParams& p, int64_t row, Scratch& scratch) {
  const int64_t slot = p.slots[row], position = p.positions[row];
  const SamplingSlot& s = p.sampling[slot];
  const int64_t outputs = position + 1 - s.prompt_length;
  const float* raw = p.logits + row * p.vocab;
  const float raw_largest = LargestOrBad(raw, p.vocab);
  int32_t token = -1;
  if (Finite(raw_largest)) {
    const float* logits = raw;
    float largest = raw_largest;
    if (ChangesLogits(s, outputs)) {
      std::copy(raw, raw + p.vocab, scratch.logits);
      ApplyPenalties(p, slot, position, scratch);
      ApplyBiasAndStops(p, slot, outputs, scratch);
      logits = scratch.logits;
      largest = LargestOrBad(logits, p.vocab);
    }
    if (Finite(largest)) {
      token = s.temperature == 0 ? ArgMax(logits, p.vocab, largest)
                                 : Draw(s, outputs, logits, p.vocab, largest, scratch);
    }
  }
  p.out_tokens[row] = token;
  if (Stores(p, row)) p.tokens[slot * p.token_stride + position + 1] = token;
  if (token >= 0 && (s.logprobs != 0 || s.top_logprobs > 0)) {
    ReportLogprobs(p, row, s.top_logprobs, token, raw, raw_largest);
  }
}

}  // namespace

void Sample(const SampleParams& p, Worker worker) {
  Scratch scratch(p.scratch, p.vocab, worker.index);
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] >= 0) SampleRow(p, r, scratch);
  }
}

}  // namespace sluice::kernels::cpu
