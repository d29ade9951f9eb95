#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>
#include <vector>

#include "src/base/rng.h"
#include "src/profile/fluxion/document_rows.h"
#include "src/profile/fluxion/head_features.h"
#include "src/profile/fluxion/predictor_check.h"
#include "tests/test_main.h"
#include "tests/unit/profile/fluxion_naive.h"

namespace sluice {
namespace {

using Catch::Detail::Approx;
using kernels::FluxionSegments;
using kernels::kFluxionLevels;
using kernels::LevelTokens;
using kernels::SegmentsOf;

// Returns the score of tokens [begin, end): the best of each 16 of them, which is the largest mean
// of the scores of four, and, with a spread, two deviations around the means of four.
double NaiveScore(const HeadQueries& head, const float* q, int64_t begin, int64_t end,
                  bool has_spread) {
  double best = -INFINITY;
  for (int64_t unit = begin; unit < end; unit += 16) {
    double largest = -INFINITY, spread = 0;
    for (int64_t first = unit; first < unit + 16; first += 4) {
      double sum = 0;
      for (int64_t d = 0; d < kDim; ++d) {
        double keys = 0, squares = 0;
        for (int64_t t = first; t < first + 4; ++t) {
          const double k = double{head.k[static_cast<size_t>(t * kDim + d)]};
          keys += k;
          squares += k * k;
        }
        sum += double{q[d]} * keys / 4;
        spread += double{q[d]} * double{q[d]} * (squares - keys * keys / 4) / 16;
      }
      largest = std::max(largest, sum);
    }
    best = std::max(best, has_spread ? largest + 2 * std::sqrt(spread) : largest);
  }
  return best;
}

// Returns blocks of the cpu segment by their scores, from the keys themselves.
std::vector<int64_t> NaiveOrder(const HeadQueries& head, const float* q, const FluxionSegments& of,
                                int32_t level, bool has_spread) {
  std::vector<std::pair<double, int64_t>> scores;
  const int64_t tokens = LevelTokens(level);
  for (int64_t block = 0; (block + 1) * tokens <= of.local; ++block) {
    if ((block + 1) * tokens <= of.sink) continue;
    const int64_t begin = std::max<int64_t>(block * tokens, of.sink);
    scores.emplace_back(-NaiveScore(head, q, begin, (block + 1) * tokens, has_spread), block);
  }
  std::stable_sort(scores.begin(), scores.end());
  std::vector<int64_t> order;
  for (const auto& [score, block] : scores) order.push_back(block);
  return order;
}

// Returns tokens of the cpu segment by their score.
std::vector<int64_t> NaiveTokenOrder(const HeadQueries& head, const float* q,
                                     const FluxionSegments& of) {
  std::vector<std::pair<double, int64_t>> scores;
  for (int64_t t = of.sink; t < of.local; ++t) {
    scores.emplace_back(-std::inner_product(q, q + kDim, head.k.begin() + t * kDim, 0.0), t);
  }
  std::sort(scores.begin(), scores.end());
  std::vector<int64_t> order;
  for (const auto& [score, t] : scores) order.push_back(t);
  return order;
}

// Returns the budget of equation 2 by trying every prefix.
double NaiveBudget(const HeadQueries& head, const float* q, const FluxionSegments& of,
                   int32_t level, bool has_spread, double bound) {
  const std::vector<int64_t> order = NaiveOrder(head, q, of, level, has_spread);
  const std::vector<double> whole = NaiveAttention(head, q, of.end, [](int64_t) { return true; });
  size_t least = order.size();
  for (size_t prefix = order.size() + 1; prefix-- > 0;) {
    const std::vector<double> o = NaiveAttention(head, q, of.end, [&](int64_t t) {
      return t < of.sink || t >= of.local ||
             std::find(order.begin(), order.begin() + static_cast<int64_t>(prefix),
                       t / LevelTokens(level)) != order.begin() + static_cast<int64_t>(prefix);
    });
    if (Distance(o, whole) > bound) break;
    least = prefix;
  }
  return std::min(1.0, static_cast<double>(least) * LevelTokens(level) /
                           static_cast<double>(kernels::CpuTokens(of)));
}

}  // namespace

TEST_CASE("segments hold every token once, and no block straddles two of them") {
  for (int32_t position = 0; position < 1200; ++position) {
    const FluxionSegments of = SegmentsOf(position);
    CHECK(of.sink <= of.local);
    CHECK(of.local <= of.end);
    CHECK(of.end == position + 1);
    CHECK(of.sink == std::min(position + 1, 64));
    if (kernels::CpuTokens(of) == 0) {
      CHECK(position + 1 < 64 + 256 + 128);
      for (int32_t level = 0; level < kFluxionLevels; ++level) {
        CHECK(kernels::CpuBlocks(of, level) == 0);
      }
      continue;
    }
    CHECK(of.local % 128 == 0);
    CHECK(of.end - of.local >= 256);
    CHECK(of.end - of.local < 384);
    CHECK(kernels::CpuBlocks(of, 0) * 16 == kernels::CpuTokens(of));
    CHECK(kernels::CpuBlocks(of, 3) * 128 == of.local);
    CHECK(kernels::BlocksOfShare(of, 0, 0.0f) == 0);
    CHECK(kernels::BlocksOfShare(of, 1, 1e-9f) == 1);
    CHECK(kernels::BlocksOfShare(of, 2, 1.0f) == kernels::CpuBlocks(of, 2));
    CHECK(kernels::BlocksOfShare(of, 3, std::nanf("")) == kernels::CpuBlocks(of, 3));
  }
}

TEST_CASE("parts, budgets and selections of a group are those of naive sums") {
  SplitMix64 random(TestSeed());
  const int64_t group = GENERATE(1, 3, 4, 7);
  const bool has_spread = GENERATE(false, true);
  const int64_t tokens = 700 + static_cast<int64_t>(random.Below(200));
  const CapturedQueries captured = Layer(random, tokens, group);
  const HeadQueries& head = captured.heads[0];
  const HeadCache cache = {head.k.data(), head.v.data(), kDim};
  const UnitDigests digests(cache, tokens, has_spread);
  const FluxionSegments of = SegmentsOf(static_cast<int32_t>(tokens - 1));
  const float* const q = head.q.data() + (tokens - 1) * group * kDim;
  const GroupAttention attention(cache, digests, q, group, of);
  for (int32_t level = 0; level < kFluxionLevels; ++level) {
    // A digest of 16 tokens has 5 bytes for each element of a key, a token's key and value have 4.
    const int64_t bytes =
        has_spread ? 5 * kernels::CpuTokens(of) / 16 : 4 * int64_t{kernels::CpuBlocks(of, level)};
    CHECK(4 * attention.DigestTokens(level) == bytes);
  }
  for (int64_t g = 0; g < group; ++g) {
    const float* const query = q + g * kDim;
    double lse = 0;
    const auto all = NaiveAttention(
        head, query, of.end, [](int64_t) { return true; }, &lse);
    CHECK(Distance(attention.whole(g).o, all) < 1e-9);
    CHECK(attention.whole(g).lse == Approx(lse));
    const auto sink = NaiveAttention(
        head, query, of.end, [&](int64_t t) { return t < of.sink; }, &lse);
    CHECK(Distance(attention.sink(g).o, sink) < 1e-9);
    CHECK(attention.sink(g).lse == Approx(lse));
    const auto cpu = NaiveAttention(
        head, query, of.end, [&](int64_t t) { return t >= of.sink && t < of.local; }, &lse);
    CHECK(Distance(attention.cpu(g).o, cpu) < 1e-9);
    CHECK(attention.cpu(g).lse == Approx(lse));
    const auto resident = NaiveAttention(head, query, of.end,
                                         [&](int64_t t) { return t < of.sink || t >= of.local; });
    CHECK(attention.ResidentError(g) == Approx(Distance(resident, all)).margin(1e-9));
    const double bound = 0.1 * Length(all);
    for (int32_t level = 0; level < kFluxionLevels; ++level) {
      INFO("head " << g << ", level " << level);
      CHECK(attention.Budget(g, level, bound) ==
            Approx(NaiveBudget(head, query, of, level, has_spread, bound)));
      CHECK(attention.Budget(g, level, 1e9) == 0);
      CHECK(attention.ScoreBudget(g, level, 0) == 0);
      CHECK(attention.ScoreBudget(g, level, 2) == Approx(1));
    }
    const double share = attention.TokenBudget(g, bound);
    const auto count = std::lround(share * kernels::CpuTokens(of));
    const std::vector<int64_t> order = NaiveTokenOrder(head, query, of);
    const auto error = [&](int64_t prefix) {
      const auto counts = [&](int64_t t) {
        return t < of.sink || t >= of.local ||
               std::find(order.begin(), order.begin() + prefix, t) != order.begin() + prefix;
      };
      return Distance(NaiveAttention(head, query, of.end, counts), all);
    };
    CHECK(error(count) <= bound);
    if (count > 0) CHECK(error(count - 1) > bound);
  }
  // Each head selects some blocks, and all attend to the union.
  const auto level = static_cast<int32_t>(random.Below(kFluxionLevels));
  std::vector<int64_t> blocks, selected;
  for (int64_t g = 0; g < group; ++g) {
    const std::vector<int64_t> order = NaiveOrder(head, q + g * kDim, of, level, has_spread);
    blocks.push_back(static_cast<int64_t>(random.Below(order.size() + 1)));
    selected.insert(selected.end(), order.begin(), order.begin() + blocks.back());
  }
  const auto counts = [&](int64_t t) {
    return t < of.sink || t >= of.local ||
           std::find(selected.begin(), selected.end(), t / LevelTokens(level)) != selected.end();
  };
  const GroupAttention::Outcome outcome = attention.Select(level, blocks);
  int64_t read = 0;
  for (int64_t t = of.sink; t < of.local; ++t) read += counts(t) ? 1 : 0;
  CHECK(outcome.tokens == read);
  for (int64_t g = 0; g < group; ++g) {
    CHECK(outcome.errors[static_cast<size_t>(g)] ==
          Approx(Distance(NaiveAttention(head, q + g * kDim, of.end, counts), attention.whole(g).o))
              .margin(1e-9));
  }
}

TEST_CASE("moments are those of the population, and of equal values nothing but the mean is left") {
  const Moments of = MomentsOf({1, 2, 3, 10});
  CHECK(of.mean == 4);
  CHECK(of.variance == 12.5);
  CHECK(of.skewness == Approx((-27 - 8 - 1 + 216) / 4.0 / std::pow(12.5, 1.5)));
  CHECK(of.kurtosis == Approx((81 + 16 + 1 + 1296) / 4.0 / (12.5 * 12.5)));
  const Moments equal = MomentsOf({3, 3, 3});
  CHECK(equal.mean == 3);
  CHECK(equal.skewness == 0);
  CHECK(equal.kurtosis == 0);
  CHECK(MomentsOf({}).mean == 0);
}

TEST_CASE("a document's rows have a sample for each head, with the features that a server has") {
  SplitMix64 random(TestSeed());
  const CapturedQueries captured = Layer(random, 1500, 3);
  const HeadQueries& head = captured.heads[0];
  DocumentRowsOptions options;
  options.anchor_stride = 600;
  options.rows = 4;
  options.distance = 50;
  options.all_levels = GENERATE(false, true);
  int rows = 0;
  MeasureDocument(options, captured, 5, 1, [&](const LayerRow& row) {
    ++rows;
    const int64_t anchor = row.position / 600 * 600;
    CHECK(row.position > anchor);
    CHECK(row.position <= anchor + 50);
    REQUIRE(row.heads.size() == 3);
    const FluxionSegments now = SegmentsOf(static_cast<int32_t>(row.position));
    const FluxionSegments then = SegmentsOf(static_cast<int32_t>(anchor));
    double largest = 0, largest_resident = 0;
    for (int64_t g = 0; g < 3; ++g) {
      largest = std::max(largest, row.groups[0].whole(g).Length());
      largest_resident = std::max(largest_resident, row.groups[0].Resident(g).Length());
    }
    CHECK(row.bound == Approx(0.1 * largest));
    for (size_t g = 0; g < 3; ++g) {
      const FluxionSample& sample = row.heads[g];
      const auto& f = sample.features;
      const float* const q = head.q.data() + (row.position * 3 + static_cast<int64_t>(g)) * kDim;
      const float* const at = head.q.data() + (anchor * 3 + static_cast<int64_t>(g)) * kDim;
      CHECK(sample.document == 5);
      CHECK(f[0] == 0);
      CHECK(f[1] == static_cast<float>(g));
      CHECK(f[2] == static_cast<float>(kernels::CpuTokens(now)));
      CHECK(f[2] + f[3] == static_cast<float>(row.position + 1));
      double lse = 0;
      const auto sink = NaiveAttention(
          head, q, now.end, [&](int64_t t) { return t < now.sink; }, &lse);
      CHECK(f[21] == Approx(lse).epsilon(1e-5));
      CHECK(f[27] == Approx(Length(sink)).epsilon(1e-5));
      const auto cpu = NaiveAttention(
          head, at, then.end, [&](int64_t t) { return t >= then.sink && t < then.local; }, &lse);
      CHECK(f[25] == Approx(lse).epsilon(1e-5));
      CHECK(f[30] == Approx(Length(cpu)).epsilon(1e-5));
      CHECK(f[39] == Approx(largest_resident).epsilon(1e-5));
      const double qq = std::sqrt(std::inner_product(q, q + kDim, q, 0.0));
      const double aa = std::sqrt(std::inner_product(at, at + kDim, at, 0.0));
      CHECK(f[32] == Approx(qq).epsilon(1e-5));
      CHECK(f[33] == Approx(aa).epsilon(1e-5));
      CHECK(f[34] == Approx(std::inner_product(q, q + kDim, at, 0.0) / (qq * aa)).margin(1e-5));
      // Features 16 and 17 are the mean of q k over the cpu segment, less the lengths.
      double of_q = 0, of_anchor = 0;
      for (int64_t t = then.sink; t < then.local; ++t) {
        of_q += std::inner_product(q, q + kDim, head.k.begin() + t * kDim, 0.0);
        of_anchor += std::inner_product(at, at + kDim, head.k.begin() + t * kDim, 0.0);
      }
      const double each = kernels::CpuTokens(then) * std::sqrt(double{kDim});
      CHECK(f[16] == Approx(of_q / (qq * each)).margin(1e-5));
      CHECK(f[17] == Approx(of_anchor / (aa * each)).margin(1e-5));
      CHECK(f[22] ==
            Approx(std::log(double{f[2]}) + qq * double{f[16]} + qq * qq * double{f[18]} / 2)
                .epsilon(1e-4));
      CHECK(sample.streaming ==
            (row.groups[0].ResidentError(static_cast<int64_t>(g)) <= row.bound));
      if (sample.streaming) continue;
      CHECK(sample.budgets[2] ==
            Approx(NaiveBudget(head, q, now, 1, !options.all_levels, row.bound)).epsilon(1e-5));
    }
  });
  CHECK(rows == 8);
}

TEST_CASE(
    "the oracle keeps to tau where each head has its own blocks, and a dense source everywhere") {
  SplitMix64 random(TestSeed());
  const CapturedQueries captured = Layer(random, 1500, 1);
  const FluxionPredictor::Head dense = {{1, 1, 1, 1}, false}, none = {{0, 0, 0, 0}, true};
  PredictorCheck check({FixedSource(0, 0.05),
                        OracleSource(),
                        AnchorSource(),
                        OwnOutputSource(0.1),
                        ScoreSource(0.95),
                        {"dense", [=](const LayerRow&, size_t) { return dense; }},
                        {"none", [=](const LayerRow&, size_t) { return none; }}});
  DocumentRowsOptions options;
  options.anchor_stride = 500;
  std::vector<FluxionSample> samples;
  MeasureDocument(options, captured, 0, 1, [&](const LayerRow& row) {
    check.Add(row);
    samples.insert(samples.end(), row.heads.begin(), row.heads.end());
  });
  const std::vector<SourceSums>& sums = check.sums();
  REQUIRE(samples.size() == 16);
  for (const SourceSums& of : sums) CHECK(of.heads == 16);
  CHECK(sums[0].levels[0] == 16);
  CHECK(sums[1].violations == 0);
  CHECK(sums[1].streaming_right == 16);
  CHECK(sums[3].violations == 0);
  CHECK(sums[5].violations == 0);
  CHECK(sums[5].tokens == check.cpu_tokens());
  CHECK(sums[5].levels[2] == 16);  // blocks of 128 would count the sink, too
  CHECK(sums[6].bytes() == 0);
  CHECK(sums[6].tasks == 0);
  CHECK(sums[6].violations == 16 - sums[6].streaming_needed);
  CHECK(sums[1].bytes() < sums[5].bytes());

  const HeadTable table(samples, 1.0);
  float most = 0;
  for (const FluxionSample& sample : samples) {
    if (!sample.streaming) most = std::max(most, sample.budgets[2]);
  }
  if (sums[1].streaming_needed < 16) CHECK(table.Tell(0, 0).budgets[1] == most);
  CHECK(table.Tell(3, 0).budgets[0] == 1);  // of a head that no sample is of: everything
  CHECK_FALSE(table.Tell(3, 0).streaming);
}

TEST_CASE("options of a document's rows are checked") {
  const auto error = [](const std::function<void(DocumentRowsOptions&)>& change) {
    DocumentRowsOptions options;
    change(options);
    return std::string(CheckDocumentRowsOptions(options).message());
  };
  using Catch::Matchers::Contains;
  CHECK(error([](auto&) {}).empty());
  CHECK_THAT(error([](auto& o) { o.anchor_stride = 383; }),
             Contains("anchor_stride: expected 384"));
  CHECK_THAT(error([](auto& o) { o.rows = 0; }), Contains("rows and distance"));
  CHECK_THAT(error([](auto& o) { o.tau = 1; }), Contains("tau: expected"));
  CHECK_THAT(error([](auto& o) { o.tau = std::nan(""); }), Contains("tau: expected"));
}

}  // namespace sluice
