// The figures of Fluxion's paper as `sluice-profile fluxion figures` measures them, against naive
// sums over small random layers.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "src/profile/fluxion/command.h"
#include "src/profile/fluxion/figures.h"
#include "tests/fixtures/fixtures.h"
#include "tests/test_main.h"
#include "tests/unit/profile/fluxion_naive.h"

namespace sluice {
namespace {

using Catch::Detail::Approx;
using kernels::FluxionSegments;
using nlohmann::json;

const float* QueryAt(const CapturedQueries& captured, int64_t position, int64_t group, int64_t g) {
  return captured.heads[0].q.data() + (position * group + g) * kDim;
}

double Score(const CapturedQueries& captured, const float* q, int64_t token) {
  return std::inner_product(q, q + kDim, captured.heads[0].k.begin() + token * kDim, 0.0) /
         std::sqrt(double{kDim});
}

// Returns the fewest tokens of [begin, end) that hold, with the tokens outside it if these are
// `beside`, the share of all weights; they are found by trying every number.
std::vector<int64_t> NaiveKept(const CapturedQueries& captured, const float* q,
                               const FluxionSegments& of, double share, bool beside) {
  const int64_t begin = beside ? of.sink : 0, end = beside ? of.local : of.end;
  std::vector<int64_t> order;
  for (int64_t t = begin; t < end; ++t) order.push_back(t);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return Score(captured, q, a) > Score(captured, q, b); });
  double whole = 0, outside = 0;
  for (int64_t t = 0; t < of.end; ++t) {
    const double weight = std::exp(Score(captured, q, t));
    whole += weight;
    if (t < begin || t >= end) outside += weight;
  }
  for (size_t count = 0; count < order.size(); ++count) {
    double held = outside;
    for (size_t i = 0; i < count; ++i) held += std::exp(Score(captured, q, order[i]));
    if (held >= share * whole) return {order.begin(), order.begin() + static_cast<int64_t>(count)};
  }
  return order;
}

DocumentRowsOptions SmallRows() {
  DocumentRowsOptions options;
  options.anchor_stride = 500;
  options.rows = 4;
  options.distance = 90;
  return options;
}

}  // namespace

TEST_CASE("quantiles of the normal distribution are the known ones") {
  CHECK(NormalQuantile(0.5) == Approx(0).margin(1e-12));
  CHECK(NormalQuantile(0.975) == Approx(1.959963984540054));
  CHECK(NormalQuantile(0.01) == Approx(-2.3263478740408408));
  CHECK(NormalQuantile(1e-9) == Approx(-5.997807015007774));
}

TEST_CASE("normal values have no gap, and those of another distribution have its gap") {
  std::vector<double> normal, exponential;
  for (int i = 0; i < 20'000; ++i) {
    const double p = (i + 0.5) / 20'000;
    normal.push_back(3 + 2 * NormalQuantile(p));
    exponential.push_back(-std::log(1 - p));
  }
  const Normality of = MeasureNormality(normal);
  CHECK(of.moments.mean == Approx(3));
  CHECK(of.largest_gap < 0.01);
  CHECK(of.quantiles[49] == Approx(0).margin(1e-3));
  CHECK(std::accumulate(of.histogram.begin(), of.histogram.end(), 0.0) == Approx(1).epsilon(1e-4));
  // Bins have a fifth of a deviation; the one above the mean has the density of N(0, 1) near 0.1.
  CHECK(of.histogram[kHistogramBins / 2] == Approx(0.2 * 0.3970).epsilon(0.01));
  // The gap of the exponential distribution is largest at the lowest percentile, since it ends
  // there.
  const Normality skewed = MeasureNormality(exponential);
  CHECK(skewed.moments.skewness == Approx(2).epsilon(0.02));
  CHECK(skewed.largest_gap == Approx(2.3263 - 1 - std::log(0.99)).epsilon(0.01));
  CHECK(skewed.histogram[0] == 0);
  CHECK(skewed.histogram.back() > 0.006);  // exp(-5) of the values lie beyond 3.8 deviations
  CHECK(std::isnan(MeasureNormality({1, 1, 1}).largest_gap));
  CHECK(std::isnan(MeasureNormality({}).largest_gap));
}

TEST_CASE("a head that keeps a share of its scores keeps the fewest tokens that hold it") {
  SplitMix64 random(TestSeed());
  const int64_t group = GENERATE(1, 3);
  const int64_t tokens = 520 + static_cast<int64_t>(random.Below(100));
  const CapturedQueries captured = Layer(random, tokens, group);
  const HeadQueries& head = captured.heads[0];
  const HeadCache cache = {head.k.data(), head.v.data(), kDim};
  const UnitDigests digests(cache, tokens, true);
  const FluxionSegments of = kernels::SegmentsOf(static_cast<int32_t>(tokens - 1));
  const GroupAttention attention(cache, digests, QueryAt(captured, tokens - 1, group, 0), group,
                                 of);
  const std::vector<double> shares = {0.3, 0.8, 0.95, 0.99};
  for (int64_t g = 0; g < group; ++g) {
    const float* const q = QueryAt(captured, tokens - 1, group, g);
    for (const bool beside : {false, true}) {
      const auto kept = attention.KeepScores(g, shares, beside);
      REQUIRE(kept.size() == shares.size());
      for (size_t i = 0; i < shares.size(); ++i) {
        INFO("head " << g << ", share " << shares[i] << ", beside " << beside);
        const std::vector<int64_t> naive = NaiveKept(captured, q, of, shares[i], beside);
        CHECK(kept[i].tokens == std::ssize(naive));
        const std::vector<double> o = NaiveAttention(head, q, of.end, [&](int64_t t) {
          return (beside && (t < of.sink || t >= of.local)) ||
                 std::find(naive.begin(), naive.end(), t) != naive.end();
        });
        CHECK(kept[i].error == Approx(Distance(o, attention.whole(g).o)).margin(1e-9));
      }
    }
  }
}

TEST_CASE("what the figures say of a head is what naive sums say") {
  SplitMix64 random(TestSeed());
  const CapturedQueries captured = Layer(random, 1200, 3);
  const HeadQueries& head = captured.heads[0];
  int rows = 0;
  MeasureDocument(SmallRows(), captured, 7, 1, [&](const LayerRow& row) {
    ++rows;
    const FluxionSegments of = kernels::SegmentsOf(static_cast<int32_t>(row.position));
    for (int64_t g = 0; g < 3; ++g) {
      const HeadFigure found = MeasureHeadFigure(row, static_cast<size_t>(g));
      CHECK((found.layer == 0 && found.head == g && found.document == 7));
      CHECK(found.position == row.position);
      const float* const q = QueryAt(captured, row.position, 3, g);
      double whole = 0, sink = 0, cpu = 0;
      const auto o = NaiveAttention(
          head, q, of.end, [](int64_t) { return true; }, &whole);
      NaiveAttention(
          head, q, of.end, [&](int64_t t) { return t < of.sink; }, &sink);
      NaiveAttention(
          head, q, of.end, [&](int64_t t) { return t >= of.sink && t < of.local; }, &cpu);
      CHECK(found.sink_score == Approx(std::exp(sink - whole)));
      CHECK(found.relative_length == Approx(Length(o) / row.largest));
      CHECK(found.o[3] == Approx(o[3]).epsilon(1e-5));
      const auto half = NaiveKept(captured, q, of, kKeptScores[1], true);
      CHECK(found.beside.tokens[1] ==
            Approx(static_cast<double>(half.size()) / kernels::CpuTokens(of)));
      const auto kept = NaiveKept(captured, q, of, kKeptScores[0], false);
      const auto near = NaiveAttention(head, q, of.end, [&](int64_t t) {
        return std::find(kept.begin(), kept.end(), t) != kept.end();
      });
      CHECK(found.all.errors[0] == Approx(Distance(near, o) / Length(o)).margin(1e-9));
      CHECK(found.all.tokens[0] == Approx(static_cast<double>(kept.size()) / of.end));
      // Budgets: none if the default set does, else blocks that do and one fewer that does not.
      const GroupAttention& group = row.groups[0];
      const double bound = kOwnDeviation * Length(o);
      const auto blocks = std::lround(found.own_budget * kernels::CpuTokens(of) / 16);
      std::vector<int64_t> selected(3);
      selected[static_cast<size_t>(g)] = blocks;
      CHECK(group.Select(0, selected).errors[static_cast<size_t>(g)] <= bound + 1e-9);
      selected[static_cast<size_t>(g)] = std::max<int64_t>(blocks - 1, 0);
      if (blocks > 0) CHECK(group.Select(0, selected).errors[static_cast<size_t>(g)] > bound);
      CHECK(found.budget <= found.own_budget + 1e-6);  // its bound is no smaller
      // The scores of the cpu segment, as if they were normal.
      double mean = 0, variance = 0;
      for (int64_t t = of.sink; t < of.local; ++t) {
        mean += Score(captured, q, t) / kernels::CpuTokens(of);
      }
      for (int64_t t = of.sink; t < of.local; ++t) {
        variance += std::pow(Score(captured, q, t) - mean, 2) / kernels::CpuTokens(of);
      }
      CHECK(found.lse_error ==
            Approx(cpu - std::log(kernels::CpuTokens(of)) - mean - variance / 2).margin(1e-6));
    }
    ValueLengths lengths;
    lengths.Add(row.groups[0]);
    lengths.Add(row.groups[0]);  // each row counts, and the means are the same
    double first = 0, sink = 0, others = 0;
    for (int64_t t = 0; t < of.end; ++t) {
      const auto v = head.v.begin() + t * kDim;
      const double length = std::sqrt(std::inner_product(v, v + kDim, v, 0.0));
      (t < of.sink ? sink : others) += length;
      if (t == 0) first = length;
    }
    CHECK(lengths.first == Approx(first));
    CHECK(lengths.sink_tokens == 2 * of.sink);
    CHECK(lengths.sink == Approx(sink / of.sink));
    CHECK(lengths.others == Approx(others / (of.end - of.sink)));
  });
  CHECK(rows == 8);
}

TEST_CASE("figures of rows are those of their heads, whatever the threads") {
  SplitMix64 random(TestSeed());
  const CapturedQueries captured = Layer(random, 1200, 2);
  FluxionFigures figures, again;
  std::vector<HeadFigure> heads;
  int64_t streaming = 0;
  MeasureDocument(SmallRows(), captured, 0, 1, [&](const LayerRow& row) {
    figures.Add(row);
    for (size_t head = 0; head < 2; ++head) {
      heads.push_back(MeasureHeadFigure(row, head));
      streaming += row.heads[head].streaming ? 1 : 0;
    }
  });
  MeasureDocument(SmallRows(), captured, 0, 2, [&](const LayerRow& row) { again.Add(row); });
  const json found = figures.Json(std::string(64, 'a'), 0.1);
  CHECK(found == again.Json(std::string(64, 'a'), 0.1));
  CHECK(found["samples"] == heads.size());
  CHECK(found["rows"] == 8);
  for (size_t i = 0; i < kKeptScores.size(); ++i) {
    const json& all = found["scores"]["all"][i];
    const auto large = std::count_if(heads.begin(), heads.end(), [&](const HeadFigure& head) {
      return head.all.errors[i] > kLargeError;
    });
    CHECK(all["large"] == Approx(static_cast<double>(large) / static_cast<double>(heads.size())));
    const auto percentiles = all["percentiles"].get<std::vector<double>>();
    REQUIRE(percentiles.size() == 101);
    CHECK(std::is_sorted(percentiles.begin(), percentiles.end()));
  }
  int64_t counted = 0;
  for (const json& bin : found["contribution"]) counted += bin["samples"].get<int64_t>();
  CHECK(counted == std::ssize(heads));
  // The one layer is both of the layers that are shown.
  REQUIRE(found["examples"].size() == 1);
  const json& example = found["examples"][0];
  CHECK(example["heads"].size() == 2);
  CHECK(example["z"]["quantiles"].size() == kQqPoints);
  std::vector<double> gaps;
  for (const HeadFigure& head : heads) gaps.push_back(head.z.largest_gap);
  std::sort(gaps.begin(), gaps.end());
  CHECK(example["z"]["largest_gap"] == gaps[gaps.size() / 2]);
  // The oracle at a larger tau reads less, and at the rows' own tau streams where samples do.
  REQUIRE(found["taus"].size() == kTaus.size());
  for (size_t i = 0; i < kTaus.size(); ++i) {
    const json& of = found["taus"][i];
    CHECK(of["tau"] == kTaus[i]);
    // Each of the two heads keeps to tau of the larger, and reads at least its own blocks.
    CHECK(of["row_error"] <= std::sqrt(2.0) * kTaus[i] * 1.5);
    if (i > 0) CHECK(of["tokens"] <= found["taus"][i - 1]["tokens"]);
    if (kTaus[i] == 0.1) {
      CHECK(of["streaming"] ==
            Approx(static_cast<double>(streaming) / static_cast<double>(heads.size())));
    }
  }
  CHECK_THAT(figures.Text(), Catch::Matchers::Contains("16 heads at rows"));
}

TEST_CASE("the command writes figures of a model's documents") {
  const fixtures::TempDir dir;
  SplitMix64 random(TestSeed());
  {
    std::ofstream file(dir.File("documents"));
    for (int t = 0; t < 500; ++t) file << random.Below(200) << ' ';
    file << '\n';
  }
  std::vector<std::string> args = {"figures",
                                   "--steps",
                                   "3",
                                   "--model",
                                   fixtures::ModelDir("tiny-llama"),
                                   "--traffic",
                                   dir.File("documents"),
                                   "--anchor-stride",
                                   "400",
                                   "--rows",
                                   "2",
                                   "--json",
                                   dir.File("figures.json")};
  REQUIRE(RunFluxionCommand(args) == 0);
  std::ifstream file(dir.File("figures.json"));
  const json root = json::parse(file);
  CHECK(root["format"] == "sluice-fluxion-figures");
  CHECK(root["model_fingerprint"].get<std::string>().size() == 64);
  CHECK(root["rows"] == 2);
  CHECK(root["layers"].size() >= 1);
  for (const json& of : root["taus"]) CHECK(of["quality"]["rows"] == 3);
  CHECK(root["fixed"]["quality"]["kl"] >= 0);
  args.back() = dir.File("none/figures.json");
  CHECK(RunFluxionCommand(args) == 1);
  CHECK(RunFluxionCommand({"figures", "--help"}) == 0);
  CHECK(RunFluxionCommand({"figures"}) == 1);
  CHECK(RunFluxionCommand({"figures", "--steps", "257"}) == 2);
  CHECK(RunFluxionCommand({"figures", "--taus", "1"}) == 2);
}

}  // namespace sluice
