// Sampling in vocabularies of every size, with rows that differ in everything, and with logits at
// the ends of a float's range.
#include "tests/kernels/sample_support.h"

namespace sluice::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int32_t kVocabularies[] = {1, 2, 31, 1000, 49152, 151936};

// Returns the distance of row r's draw, as a share of the whole, from the range in which the oracle
// gives `token`: 0 if it gives that very token. Paths round changed logits to float32, which moves
// the borders between tokens by some 1e-7.
double Miss(SampleFixture& f, int64_t r, int32_t token) {
  const std::vector<double> probability = OracleProbabilities(f, r);
  if (token < 0 || token >= f.vocab || probability[static_cast<size_t>(token)] == 0) return 1;
  const SamplingSlot& s = f.sampling[r];
  const double u =
      UniformFromSeed(s.seed, static_cast<uint64_t>(f.positions[r] + 1 - s.prompt_length));
  double before = 0;
  for (int32_t v = 0; v < token; ++v) before += probability[static_cast<size_t>(v)];
  return std::max({0.0, before - u, u - before - probability[static_cast<size_t>(token)]});
}

void CheckRows(const KernelTable& path, SampleFixture& f) {
  f.Run(path);
  for (int32_t r = 0; r < f.rows; ++r) {
    const SamplingSlot& s = f.sampling[r];
    INFO("row " << r << " token " << f.out_tokens[r] << " temperature " << s.temperature
                << " top_k " << s.top_k << " top_p " << s.top_p << " min_p " << s.min_p
                << " repetition " << s.repetition_penalty << " frequency " << s.frequency_penalty
                << " presence " << s.presence_penalty << " bias " << s.bias_count << " min_tokens "
                << s.min_tokens);
    CHECK(Miss(f, r, f.out_tokens[r]) < 2e-6);
    CHECK(f.token(r, f.positions[r] + 1) == f.out_tokens[r]);
  }
}

template <typename T>
T OneOf(Random& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

// Sets some of every setting, off as often as on.
void DrawSettings(SampleFixture& f, int32_t r, Random& random) {
  SamplingSlot& s = f.sampling[r];
  f.positions[r] = static_cast<int32_t>(random() % 60);
  s.prompt_length = static_cast<int32_t>(random() % static_cast<uint64_t>(f.positions[r] + 2));
  s.seed = random();
  s.temperature = OneOf(random, {0.0f, 0.3f, 1.0f, 1.7f});
  s.top_k = OneOf(random, {0, 0, 1, 7, 50, 2000, 100000});
  s.top_p = OneOf(random, {1.0f, 1.0f, 1e-9f, 0.5f, 0.95f, 0.9999f});
  s.min_p = OneOf(random, {0.0f, 0.0f, 1e-5f, 0.1f, 1.0f});
  s.repetition_penalty = OneOf(random, {1.0f, 1.0f, 1.3f, 0.8f});
  s.frequency_penalty = OneOf(random, {0.0f, 0.0f, 0.7f, -0.4f});
  s.presence_penalty = OneOf(random, {0.0f, 0.0f, 1.1f, -0.6f});
  s.min_tokens = OneOf(random, {0, 0, 30, 100});
  s.logprobs = OneOf(random, {0, 1});
  s.top_logprobs = OneOf(random, {0, 0, 3, kMaxTopLogprobs});
  const auto any = [&] { return static_cast<int32_t>(random() % static_cast<uint64_t>(f.vocab)); };
  const int32_t common = std::min(f.vocab, 40);
  for (int32_t i = 0; i <= f.positions[r]; ++i) {
    f.token(r, i) = random() % 2 == 0 ? any() : static_cast<int32_t>(random() % 8) * 5 % common;
  }
  s.bias_count = OneOf(random, {0, 0, std::min(f.vocab, 5), std::min(f.vocab, kMaxLogitBias)});
  const int32_t first = any();
  for (int32_t i = 0; i < s.bias_count; ++i) {
    f.bias_ids[r * kMaxLogitBias + i] = (first + i) % f.vocab;
    f.bias_values[r * kMaxLogitBias + i] = static_cast<float>(random() % 9) - 4.0f;
  }
  // Not every token of the vocabulary is stopped: then none would be left.
  s.stop_count = std::min(f.vocab - 1, OneOf(random, {0, 3, kMaxStopIds}));
  for (int32_t i = 0; i < s.stop_count; ++i)
    f.stop_ids[r * kMaxStopIds + i] = (first + i) % f.vocab;
}

void TestMixedRows(const KernelTable& path, Random& random) {
  for (int32_t vocab : kVocabularies) {
    for (float scale : {0.3f, 5.0f}) {
      INFO("vocabulary " << vocab << " scale " << scale);
      SampleFixture f(11, vocab);
      FillNormal(std::span<float>(f.logits.data(), static_cast<size_t>(f.logits.size())), random,
                 scale);
      for (int32_t r = 0; r < f.rows; ++r) DrawSettings(f, r, random);
      CheckRows(path, f);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("rows that differ in every setting, in small and large vocabularies",
                          TestMixedRows)

// Fills row r with one kind of logits that no model should give, and some may.
void FillExtreme(SampleFixture& f, int32_t r, Random& random) {
  const auto fill = [&](auto value) {
    for (int32_t v = 0; v < f.vocab; ++v) f.row(r)[v] = value(v);
  };
  std::normal_distribution<float> normal;
  switch (r) {
    case 0:
      return fill([](int32_t) { return 0.0f; });
    case 1:  // both zeros are equal
      return fill([](int32_t v) { return v % 3 == 0 ? 0.0f : -0.0f; });
    case 2:
      return fill([&](int32_t) { return 1e30f * normal(random); });
    case 3:  // subnormal
      return fill([&](int32_t) { return 1e-40f * normal(random); });
    case 4:
      return fill([](int32_t) { return std::numeric_limits<float>::lowest(); });
    case 5:  // few tokens are possible
      return fill([&](int32_t v) { return v % 97 == 0 ? normal(random) : -kInf; });
    case 6:  // one token is possible
      return fill([&](int32_t v) { return v == f.vocab / 2 ? -3.0f : -kInf; });
    case 7:  // few values, many ties
      return fill([&](int32_t) { return static_cast<float>(random() % 4); });
    default:  // neighbours among the floats
      return fill(
          [&](int32_t) { return 10.0f + 9.5367432e-7f * static_cast<float>(random() % 3); });
  }
}

void TestExtremeLogits(const KernelTable& path, Random& random) {
  constexpr int32_t kKinds = 9;
  for (int32_t vocab : kVocabularies) {
    for (int32_t top_k : {0, 1, 3, 700}) {
      for (float top_p : {1.0f, 0.6f}) {
        for (float min_p : {0.0f, 0.9f}) {
          if (vocab > 1000 && top_k != 3 && (top_k == 1 || top_p == 1 || min_p > 0)) continue;
          INFO("vocabulary " << vocab);
          SampleFixture f(kKinds, vocab);
          for (int32_t r = 0; r < kKinds; ++r) {
            FillExtreme(f, r, random);
            SamplingSlot& s = f.sampling[r];
            s.temperature = r == 8 ? 1e-6f : 1.0f;
            s.seed = random();
            s.top_k = top_k;
            s.top_p = top_p;
            s.min_p = min_p;
          }
          CheckRows(path, f);
        }
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("ties, zeros, infinities and the largest floats are sampled as others",
                          TestExtremeLogits)

// Checks everything that a row gives, alone and among others.
void TestAlone(const KernelTable& path, Random& random) {
  constexpr int32_t kVocab = 5003;
  SampleFixture all(17, kVocab);
  FillNormal(std::span<float>(all.logits.data(), static_cast<size_t>(all.logits.size())), random,
             3.0f);
  for (int32_t r = 0; r < all.rows; ++r) DrawSettings(all, r, random);
  all.Run(path);
  for (int32_t r = 0; r < all.rows; ++r) {
    INFO("row " << r);
    SampleFixture one(1, kVocab);
    std::copy_n(all.row(r), kVocab, one.row(0));
    std::copy_n(&all.token(r, 0), all.token_stride, &one.token(0, 0));
    std::copy_n(&all.stop_ids[r * kMaxStopIds], kMaxStopIds, one.stop_ids.data());
    std::copy_n(&all.bias_ids[r * kMaxLogitBias], kMaxLogitBias, one.bias_ids.data());
    std::copy_n(&all.bias_values[r * kMaxLogitBias], kMaxLogitBias, one.bias_values.data());
    one.positions[0] = all.positions[r];
    one.sampling[0] = all.sampling[r];
    one.Run(path);
    CHECK(one.out_tokens[0] == all.out_tokens[r]);
    const auto same = [&](const auto& a, const auto& b, int64_t width) {
      return std::memcmp(&a[0], &b[r * width], static_cast<size_t>(width) * sizeof(a[0])) == 0;
    };
    CHECK(same(one.out_logprobs, all.out_logprobs, 1));
    CHECK(same(one.top_ids, all.top_ids, kMaxTopLogprobs));
    CHECK(same(one.top_logprobs, all.top_logprobs, kMaxTopLogprobs));
  }
}
SLUICE_TEST_ON_EVERY_PATH("a sampled row is the same bit for bit alone and in a batch", TestAlone)

// Output indices one after the other, as rows of one step: each is a draw of its own.
void TestManyDraws(const KernelTable& path, Random& random) {
  constexpr int32_t kDraws = 192;
  for (int32_t vocab : {31, 3000}) {
    for (float top_p : {1.0f, 0.9f}) {
      SampleFixture f(kDraws, vocab, kDraws + 1);
      const auto logits = NormalBuffer<float>(vocab, random, 1.5f);
      const uint64_t seed = random();
      for (int32_t r = 0; r < kDraws; ++r) {
        std::copy_n(logits.data(), vocab, f.row(r));
        f.positions[r] = r;
        f.sampling[r].seed = seed;
        f.sampling[r].temperature = 1.1f;
        f.sampling[r].top_p = top_p;
      }
      f.Run(path);
      for (int32_t r = 0; r < kDraws; ++r) {
        INFO("vocabulary " << vocab << " output token " << r);
        CHECK(f.out_tokens[r] == OracleToken(f, r));
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("every output index has the draw that its seed says", TestManyDraws)

}  // namespace
}  // namespace sluice::kernels
