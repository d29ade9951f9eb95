#include "tests/kernels/sample_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kRows = 5;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Sampling tests run on the reference too: the oracle is the test's own.
#define SLUICE_SAMPLE_TEST(claim, test)                                       \
  TEST_CASE(claim " (reference)", "[kernels]") { OnPath("reference", test); } \
  SLUICE_TEST_ON_EVERY_PATH(claim, test)

// Every row has random logits, a history of prompt and output tokens that come again, and a seed.
void Randomise(SampleFixture& f, Random& random, float scale) {
  FillNormal(std::span<float>(f.logits.data(), static_cast<size_t>(f.logits.size())), random,
             scale);
  std::uniform_int_distribution<int32_t> any(0, std::min(f.vocab - 1, 20));
  for (int32_t r = 0; r < f.rows; ++r) {
    f.positions[static_cast<size_t>(r)] = 8 + 5 * r;
    f.sampling[static_cast<size_t>(r)].prompt_length = 3 + r;
    f.sampling[static_cast<size_t>(r)].seed = random();
    for (int32_t i = 0; i <= f.positions[static_cast<size_t>(r)]; ++i) f.token(r, i) = any(random);
  }
}

void CheckOracle(const KernelTable& path, SampleFixture& f) {
  f.Run(path);
  for (int32_t r = 0; r < f.rows; ++r) {
    INFO("row " << r);
    const int32_t position = f.positions[static_cast<size_t>(r)];
    const int32_t want = OracleToken(f, r);
    CHECK(f.out_tokens[r] == want);
    CHECK(f.token(r, position + 1) == want);
  }
}

template <typename Change>
void CheckSetting(const KernelTable& path, Random& random, const char* name, Change change) {
  INFO(name);
  for (int32_t vocab : {1, 2, 50, 3001}) {
    for (float scale : {0.5f, 4.0f}) {
      INFO("vocabulary " << vocab << " scale " << scale);
      for (float temperature : {0.0f, 0.7f, 1.0f, 2.0f}) {
        SampleFixture f(kRows, vocab);
        Randomise(f, random, scale);
        for (SamplingSlot& s : f.sampling) s.temperature = temperature;
        for (int32_t r = 0; r < kRows; ++r) change(f, r, f.sampling[static_cast<size_t>(r)]);
        CheckOracle(path, f);
      }
    }
  }
}

void TestSettings(const KernelTable& path, Random& random) {
  using F = SampleFixture;
  CheckSetting(path, random, "none", [](F&, int32_t, SamplingSlot&) {});
  for (int32_t k : {1, 2, 40, 600, 5000}) {
    CheckSetting(path, random, "top_k", [k](F&, int32_t, SamplingSlot& s) { s.top_k = k; });
  }
  for (float p : {1e-6f, 0.3f, 0.9f, 0.999f}) {
    CheckSetting(path, random, "top_p", [p](F&, int32_t, SamplingSlot& s) { s.top_p = p; });
    CheckSetting(path, random, "top_k and top_p", [p](F&, int32_t, SamplingSlot& s) {
      s.top_p = p;
      s.top_k = 30;
    });
  }
  for (float p : {0.02f, 0.5f, 1.0f}) {
    CheckSetting(path, random, "min_p", [p](F&, int32_t, SamplingSlot& s) { s.min_p = p; });
  }
  CheckSetting(path, random, "repetition penalty",
               [](F&, int32_t r, SamplingSlot& s) { s.repetition_penalty = r < 3 ? 1.7f : 0.6f; });
  CheckSetting(path, random, "frequency penalty",
               [](F&, int32_t r, SamplingSlot& s) { s.frequency_penalty = r < 3 ? 0.8f : -0.5f; });
  CheckSetting(path, random, "presence penalty",
               [](F&, int32_t r, SamplingSlot& s) { s.presence_penalty = r < 3 ? 1.5f : -1.0f; });
  CheckSetting(path, random, "bias", [](F& f, int32_t r, SamplingSlot& s) {
    s.bias_count = 3;
    for (int32_t i = 0; i < 3; ++i) {
      f.bias_ids[r * kMaxLogitBias + i] = (7 * i + r) % f.vocab;
      f.bias_values[r * kMaxLogitBias + i] = i == 0 ? 4.0f : -6.0f;
    }
  });
  CheckSetting(path, random, "everything", [](F& f, int32_t r, SamplingSlot& s) {
    s.top_k = 200;
    s.top_p = 0.95f;
    s.min_p = 0.01f;
    s.repetition_penalty = 1.2f;
    s.frequency_penalty = 0.1f;
    s.presence_penalty = 0.2f;
    s.bias_count = 1;
    f.bias_ids[r * kMaxLogitBias] = f.vocab - 1;
    f.bias_values[r * kMaxLogitBias] = 2.0f;
  });
}
SLUICE_SAMPLE_TEST("every sampling setting gives the token that the contract says", TestSettings)

void TestMinTokens(const KernelTable& path, Random& random) {
  SampleFixture f(2, 100);
  Randomise(f, random, 1.0f);
  for (int32_t r = 0; r < 2; ++r) {
    f.row(r)[42] = 50.0f;
    f.row(r)[17] = 40.0f;
    SamplingSlot& s = f.sampling[static_cast<size_t>(r)];
    s.stop_count = 2;
    f.stop_ids[r * kMaxStopIds] = 42;
    f.stop_ids[r * kMaxStopIds + 1] = 9;
    // Returns the output tokens so far: the one at position prompt_length and all after it.
    s.min_tokens = f.positions[static_cast<size_t>(r)] + 1 - s.prompt_length + (r == 0 ? 1 : 0);
  }
  f.Run(path);
  CHECK(f.out_tokens[0] == 17);
  CHECK(f.out_tokens[1] == 42);
}
SLUICE_SAMPLE_TEST("stop ids are out of reach until min_tokens are made", TestMinTokens)

void TestStores(const KernelTable& path, Random& random) {
  SampleFixture f(3, 100);
  Randomise(f, random, 1.0f);
  f.Run(path);
  const std::vector<int32_t> want(f.out_tokens.data(), f.out_tokens.data() + 3);
  f.some_store = true;
  for (int32_t r = 0; r < 3; ++r) f.stores[r] = r == 1;
  for (int32_t r = 0; r < 3; ++r) f.token(r, f.positions[static_cast<size_t>(r)] + 1) = -7;
  f.Run(path);
  for (int32_t r = 0; r < 3; ++r) {
    const auto i = static_cast<size_t>(r);
    CHECK(f.out_tokens[i] == want[i]);
    CHECK(f.token(r, f.positions[i] + 1) == (r == 1 ? want[i] : -7));
  }
}
SLUICE_SAMPLE_TEST("a choice that is not stored changes no history", TestStores)

void TestTies(const KernelTable& path, Random& random) {
  constexpr int32_t kVocab = 4000;
  SampleFixture f(3, kVocab);
  Randomise(f, random, 1.0f);
  for (int64_t i = 0; i < f.logits.size(); ++i) f.logits[i] = 1.5f;
  f.row(0)[5] = f.row(0)[3900] = 2.0f;
  f.sampling[1].temperature = f.sampling[2].temperature = 1;
  f.sampling[1].top_k = 3;
  f.sampling[2].top_k = 1500;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    f.sampling[1].seed = f.sampling[2].seed = seed;
    CheckOracle(path, f);
    CHECK(f.out_tokens[0] == 5);
    CHECK(f.out_tokens[1] < 3);
    CHECK(f.out_tokens[2] < 1500);
  }
}
SLUICE_SAMPLE_TEST("lower ids win ties", TestTies)

void TestBadRows(const KernelTable& path, Random& random) {
  constexpr int32_t kVocab = 70;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  SampleFixture f(7, kVocab);
  Randomise(f, random, 1.0f);
  for (SamplingSlot& s : f.sampling) s.logprobs = s.top_logprobs = 1;
  f.row(0)[69] = kNaN;
  f.row(1)[0] = kInf;
  std::fill_n(f.row(2), kVocab, -kInf);
  f.row(4)[3] = -kInf;  // harmless
  f.sampling[5].temperature = 1;
  f.row(5)[30] = kNaN;
  f.slots[6] = -1;  // padded
  f.Run(path);
  for (int32_t r : {0, 1, 2, 5}) {
    CHECK(f.out_tokens[r] == -1);
    CHECK(f.token(r, f.positions[static_cast<size_t>(r)] + 1) == -1);
    CHECK(std::isnan(f.out_logprobs[r]));
  }
  for (int32_t r : {3, 4}) {
    CHECK(f.out_tokens[r] == OracleToken(f, r));
    CHECK(std::isfinite(f.out_logprobs[r]));
  }
  CHECK(f.token(6, f.positions[6] + 1) == 0);
  CHECK(std::isnan(f.out_logprobs[6]));
}
SLUICE_SAMPLE_TEST("a row with NaN, +inf or nothing finite gives -1 and disturbs no other",
                   TestBadRows)

void TestLogprobs(const KernelTable& path, Random& random) {
  for (int32_t vocab : {1, 6, 500}) {
    SampleFixture f(kRows, vocab);
    Randomise(f, random, 3.0f);
    for (int32_t r = 0; r < kRows; ++r) {
      SamplingSlot& s = f.sampling[static_cast<size_t>(r)];
      s.temperature = r % 2 == 0 ? 0.0f : 1.5f;
      s.repetition_penalty = 1.3f;  // must not show: log-probabilities are of the raw logits
      s.logprobs = r == 4 ? 0 : 1;
      s.top_logprobs = r == 4 ? 0 : 5 * r;
    }
    if (vocab > 6) f.row(3)[100] = f.row(3)[200] = 30.0f;
    f.Run(path);
    for (int32_t r = 0; r < kRows; ++r) {
      INFO("vocabulary " << vocab << " row " << r);
      double sum = 0;
      for (int32_t v = 0; v < vocab; ++v) sum += std::exp(double{f.row(r)[v]});
      const SamplingSlot& s = f.sampling[static_cast<size_t>(r)];
      if (s.logprobs == 0) {
        CHECK(std::isnan(f.out_logprobs[r]));
        continue;
      }
      const auto logprob = [&](int32_t v) { return double{f.row(r)[v]} - std::log(sum); };
      CHECK(f.out_logprobs[r] == Approx(logprob(f.out_tokens[r])).epsilon(1e-5).margin(1e-6));
      std::vector<int32_t> order;
      for (int32_t v = 0; v < vocab; ++v) order.push_back(v);
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return f.row(r)[a] > f.row(r)[b]; });
      for (int32_t i = 0; i < s.top_logprobs; ++i) {
        const int64_t at = r * kMaxTopLogprobs + i;
        CHECK(f.top_ids[at] == (i < vocab ? order[static_cast<size_t>(i)] : -1));
        if (i < vocab) {
          CHECK(f.top_logprobs[at] == Approx(logprob(f.top_ids[at])).epsilon(1e-5).margin(1e-6));
        }
      }
      if (s.top_logprobs < kMaxTopLogprobs) {
        CHECK(f.top_ids[r * kMaxTopLogprobs + s.top_logprobs] == -1);  // unchanged
      }
    }
  }
}
SLUICE_SAMPLE_TEST("log-probabilities are those of the raw logits, best first", TestLogprobs)

}  // namespace
}  // namespace sluice::kernels
