// PredictBudgets: how much of the cpu segment each query head needs.
#include "tests/kernels/budgets_support.h"

namespace sluice::kernels {
namespace {

// Returns how far a feature may be from float64's. Numbers that are copied are exact. The others
// are sums of up to 256 products, which may cancel: `size` is that of a sum of products' sizes.
double AllowedError(BudgetInput& in, int64_t i, int64_t f, std::span<const float> want) {
  const int64_t dim = in.shape.head_dim, row = i / in.shape.heads, head = i % in.shape.heads;
  const int64_t kv_head = head / (in.shape.heads / in.shape.kv_heads);
  const float* const mean_key =
      in.kv.data() + (in.slots[row] * in.shape.kv_heads + kv_head) * (kAnchorKvNumbers + dim) +
      kAnchorKvNumbers;
  const double mean_size = LengthOf(mean_key, dim) / std::sqrt(static_cast<double>(dim));
  const double length = double{want[32]};
  switch (f) {
    case 16:
      return 5e-7 * mean_size;
    case 22:
      return 5e-7 * (std::log(1 + double{want[2]}) + length * mean_size +
                     length * length * double{want[18]});
    case 27:
    case 28:
    case 32:
    case 39:
      return 5e-7 * double{want[static_cast<size_t>(f)]};
    case 34:
      return 5e-7;
    default:
      return 0;
  }
}

void TestFeatures(const KernelTable& table, Random& random) {
  for (const Shape& shape : kShapes) {
    BudgetInput in(shape, random);
    const TestNetwork network(FluxionForm::kLine, {}, random);
    const Prediction want = in.Predict(Reference(), network.view);
    const Prediction got = in.Predict(table, network.view);
    for (int64_t i = 0; i < in.kRows * shape.heads; ++i) {
      const std::span<const float> of_head = want.features.span().subspan(
          static_cast<size_t>(i * kFluxionFeatures), size_t{kFluxionFeatures});
      for (int64_t f = 0; f < kFluxionFeatures; ++f) {
        const float w = of_head[static_cast<size_t>(f)], g = got.features[i * kFluxionFeatures + f];
        INFO("heads " << shape.heads << " row " << i / shape.heads << " head " << i % shape.heads
                      << " feature " << f << " got " << g << " want " << w);
        if (in.slots[i / shape.heads] < 0) {
          REQUIRE((std::isnan(g) && std::isnan(w)));  // as it was
        } else if (!std::isfinite(w)) {
          REQUIRE(g == w);
        } else {
          REQUIRE(std::fabs(double{g} - double{w}) <= AllowedError(in, i, f, of_head));
        }
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("each feature is that of float64", TestFeatures)

// One head whose numbers all differ, and a second one with the largest output.
void CheckByHand(const KernelTable& table, Random& random) {
  BudgetInput in({2, 1, 16}, random);
  const auto fill = [](Guarded<float>& buffer, float value) {
    std::fill_n(buffer.data(), buffer.size(), value);
  };
  for (Guarded<float>* buffer : {&in.q, &in.sink_o, &in.local_o, &in.kv, &in.anchors}) {
    fill(*buffer, 0);
  }
  float* const q = in.q.data() + in.q_stride;  // row 1, slot 0, position 700
  q[0] = 3;
  q[1] = 4;
  in.sink_o[2 * 16] = 6;
  in.local_o[2 * 16 + 1] = 8;
  in.local_o[3 * 16] = 50;
  in.sink_lse[2] = in.local_lse[2] = 1.5f;
  in.sink_lse[3] = 2;
  in.local_lse[3] = -kInfinity;
  for (int i = 0; i < kAnchorKvNumbers; ++i) in.kv[i] = 100.0f + static_cast<float>(i);
  in.kv[kAnchorKvNumbers + 1] = 10;
  for (int i = 0; i < kAnchorHeadNumbers; ++i) in.anchors[i] = 200.0f + static_cast<float>(i);
  in.anchors[1] = 0.5f;
  in.anchors[10] = 2;
  in.anchors[kAnchorHeadNumbers] = 2;
  in.resident[0] = 300;
  const TestNetwork network(FluxionForm::kLine, {}, random);
  const Prediction got = in.Predict(table, network.view);
  // 701 tokens: the sink, 320 of the cpu segment and 317 local ones.
  const float want[kFluxionFeatures] = {
      5,   0,    320, 381, 100,  101,        102,  103, 104, 105, 106,  107, 108, 109, 110, 111,
      2,                                            // 4 * 10 / (5 * 4)
      200, 0.5f, 202, 203, 1.5f, 22.018321f, 1.5f,  // ln(320) + 5 * 2 + 25 / 4
      204, 205,  206, 6,   8,    207,        208,  209, 5,   2,   0.6f, 211, 212, 213, 214, 5,
      300};
  for (int64_t f = 0; f < kFluxionFeatures; ++f) {
    INFO("feature " << f);
    CHECK(got.features[2 * kFluxionFeatures + f] == Approx(want[f]).epsilon(1e-6));
  }
}
void TestByHand(const KernelTable& table, Random& random) {
  CheckByHand(Reference(), random);
  CheckByHand(table, random);
}
SLUICE_TEST_ON_EVERY_PATH("each feature is at its place", TestByHand)

struct NetworkCase {
  FluxionForm form;
  std::vector<int32_t> hidden;
};
const NetworkCase kNetworks[] = {
    {FluxionForm::kLine, {256, 256, 128}},
    {FluxionForm::kFour, {256, 256, 128}},
    {FluxionForm::kFour, {}},
    {FluxionForm::kLine, {7}},
    {FluxionForm::kFour, {1024, 300, 17}},
    {FluxionForm::kLine, {64, 33, 64, 48, 64, 40, 64}},
};

// Counts of the heads that have a cpu segment.
struct Counts {
  int64_t heads = 0, streaming = 0;
  int64_t inner = 0;  // budgets between 0 and 1
};

void CheckNetwork(const KernelTable& table, const Shape& shape, const NetworkCase& c,
                  Random& random, Counts& counts) {
  INFO("heads " << shape.heads << ", " << c.hidden.size() << " hidden layers, form "
                << static_cast<int>(c.form));
  BudgetInput in(shape, random);
  TestNetwork network(c.form, c.hidden, random);
  network.Fit(in.Predict(Reference(), network.view).features.span());
  const Prediction want = in.Predict(Reference(), network.view);
  const Prediction got = in.Predict(table, network.view);
  FluxionNetwork lower = network.view, higher = network.view;
  lower.threshold -= 1e-4f;
  higher.threshold += 1e-4f;
  const Prediction at_most = in.Predict(Reference(), lower),
                   least = in.Predict(Reference(), higher);
  for (int64_t i = 0; i < in.kRows * shape.heads; ++i) {
    INFO("row " << i / shape.heads << " head " << i % shape.heads);
    if (in.slots[i / shape.heads] < 0) {
      REQUIRE(got.streaming[i] == -1);  // as it was
      REQUIRE(std::isnan(got.budgets[i * kFluxionLevels]));
      continue;
    }
    if (at_most.streaming[i] == least.streaming[i]) REQUIRE(got.streaming[i] == want.streaming[i]);
    const bool has_cpu = CpuTokens(SegmentsOf(in.positions[i / shape.heads])) > 0;
    counts.heads += has_cpu ? 1 : 0;
    counts.streaming += want.streaming[i];
    for (int64_t l = i * kFluxionLevels; l < (i + 1) * kFluxionLevels; ++l) {
      REQUIRE(std::fabs(got.budgets[l] - want.budgets[l]) <= (has_cpu ? 5e-6f : 0));
      counts.inner += want.budgets[l] > 0 && want.budgets[l] < 1 ? 1 : 0;
    }
  }
}

void TestNetworks(const KernelTable& table, Random& random) {
  Counts counts;
  for (const Shape& shape : kShapes) {
    for (const NetworkCase& c : kNetworks) CheckNetwork(table, shape, c, random, counts);
  }
  CHECK(counts.inner > counts.heads);
  CHECK(counts.streaming > counts.heads / 5);
  CHECK(counts.streaming < counts.heads * 4 / 5);
}
SLUICE_TEST_ON_EVERY_PATH("budgets and streaming are those of float64", TestNetworks)

void TestBits(const KernelTable& table, Random& random) {
  for (const Shape& shape : kShapes) {
    for (const NetworkCase& c : kNetworks) {
      BudgetInput in(shape, random);
      TestNetwork network(c.form, c.hidden, random);
      network.Fit(in.Predict(Reference(), network.view).features.span());
      const Prediction all = in.Predict(table, network.view);
      const Prediction other = in.Predict(table, network.view, 3);
      CHECK(BitDifference(other.features.span(), all.features.span(), kFluxionFeatures) == "");
      CHECK(BitDifference(other.budgets.span(), all.budgets.span(), kFluxionLevels) == "");
      CHECK(BitDifference(other.streaming.span(), all.streaming.span(), 1) == "");
      const auto heads = static_cast<size_t>(shape.heads);
      for (int64_t r = 0; r < in.kRows; ++r) {
        Prediction one(1, shape.heads);
        PredictBudgetsParams p = in.Row(network.view, r, one);
        p.features = nullptr;
        RunWorkers(table.predict_budgets, p, 2);
        const size_t first = static_cast<size_t>(r) * heads;
        CHECK(one.Damage() == "");
        CHECK(BitDifference(
                  one.budgets.span(),
                  all.budgets.span().subspan(first * kFluxionLevels, heads * kFluxionLevels),
                  kFluxionLevels) == "");
        CHECK(BitDifference(one.streaming.span(), all.streaming.span().subspan(first, heads), 1) ==
              "");
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a row's budgets are its own, to the bit", TestBits)

// Heads [begin, end) of row 1 keep everything, and all others are as they were.
void CheckLost(const KernelTable& table, BudgetInput& in, const FluxionNetwork& network,
               const Prediction& before, int64_t begin, int64_t end) {
  for (const KernelTable* path : {&Reference(), &table}) {
    const Prediction got = in.Predict(*path, network);
    for (int64_t i = 0; i < in.kRows * in.shape.heads; ++i) {
      const bool lost = i >= in.shape.heads + begin && i < in.shape.heads + end;
      INFO("head " << i << " of all rows");
      if (in.slots[i / in.shape.heads] < 0) continue;
      if (lost) REQUIRE(got.streaming[i] == 0);
      for (int64_t l = i * kFluxionLevels; l < (i + 1) * kFluxionLevels; ++l) {
        if (lost) REQUIRE(got.budgets[l] == 1);
        if (!lost && path == &table) REQUIRE(got.budgets[l] == before.budgets[l]);
      }
    }
  }
}

void TestNotFinite(const KernelTable& table, Random& random) {
  for (const FluxionForm form : {FluxionForm::kLine, FluxionForm::kFour}) {
    const Shape shape = {12, 3, 32};
    BudgetInput in(shape, random);
    // Head 0 of row 1 has the largest output, whatever is done to another head.
    std::fill_n(in.sink_o.data() + shape.heads * shape.head_dim, shape.head_dim, 5.0f);
    in.sink_lse[shape.heads] = 10 + in.local_lse[shape.heads];
    TestNetwork network(form, {32}, random);
    network.Fit(in.Predict(Reference(), network.view).features.span());
    network.view.threshold = 0;  // all heads stream
    const Prediction before = in.Predict(table, network.view);
    CHECK(before.streaming[shape.heads] == 1);
    // Row 1 has slot 0; its head 5 is of KV head 1.
    const int64_t head = 5, dim = shape.head_dim, i = shape.heads + head;
    struct Source {
      const char* name;
      float* at;
      int64_t begin, end;  // heads that lose a feature
    };
    const Source sources[] = {
        {"q", in.q.data() + in.q_stride + head * dim + 7, head, head + 1},
        {"sink lse", &in.sink_lse[i], head, head + 1},
        {"local lse", &in.local_lse[i], head, head + 1},
        {"sink o", &in.sink_o[i * dim + 3], 0, shape.heads},
        {"local o", &in.local_o[i * dim + 31], 0, shape.heads},
        {"a KV number", &in.kv[(kAnchorKvNumbers + dim) + 4], 4, 8},
        {"a mean key", &in.kv[(kAnchorKvNumbers + dim) + kAnchorKvNumbers + 9], 4, 8},
        {"a head's number", &in.anchors[head * (kAnchorHeadNumbers + dim) + 5], head, head + 1},
        {"the anchor's q", &in.anchors[head * (kAnchorHeadNumbers + dim) + kAnchorHeadNumbers + 1],
         head, head + 1},
        {"the anchor's output", &in.resident[0], 0, shape.heads},
    };
    for (const Source& source : sources) {
      for (const float bad : {kNan, kInfinity, -kInfinity}) {
        INFO(source.name << " is " << bad);
        const float good = *source.at;
        *source.at = bad;
        // An infinite lse of one part is no weight of the other, but a NaN or +inf is a NaN output.
        const bool lse = source.at == &in.sink_lse[i] || source.at == &in.local_lse[i];
        const bool row = lse && bad != -kInfinity;
        CheckLost(table, in, network.view, before, row ? 0 : source.begin,
                  row ? int64_t{shape.heads} : source.end);
        *source.at = good;
      }
    }
    // A query of zeros has no direction.
    std::fill_n(in.q.data() + in.q_stride + head * dim, dim, 0.0f);
    CheckLost(table, in, network.view, before, head, head + 1);
  }
}
SLUICE_TEST_ON_EVERY_PATH("a head that lacks a feature keeps all, and does not stream",
                          TestNotFinite)

// Returns the four budgets of a head whose outputs are these, then whether it streams.
std::vector<float> Judged(const KernelTable& table, BudgetInput& in, TestNetwork& network,
                          std::initializer_list<float> outputs, float threshold) {
  network.Set(outputs);
  network.view.threshold = threshold;
  const Prediction got = in.Predict(table, network.view);
  std::vector<float> result(got.budgets.data(), got.budgets.data() + kFluxionLevels);
  result.push_back(static_cast<float>(got.streaming[0]));
  return result;
}

void TestJudgement(const KernelTable& table, Random& random) {
  using Row = std::vector<float>;
  BudgetInput in({4, 2, 16}, random);
  TestNetwork line(FluxionForm::kLine, {16}, random), four(FluxionForm::kFour, {16}, random);
  for (TestNetwork* network : {&line, &four}) {
    network->Fit(in.Predict(Reference(), network->view).features.span());
  }
  for (const KernelTable* path : {&Reference(), &table}) {
    const auto of_line = [&](std::initializer_list<float> outputs, float threshold) {
      return Judged(*path, in, line, outputs, threshold);
    };
    const auto of_four = [&](std::initializer_list<float> outputs, float threshold) {
      return Judged(*path, in, four, outputs, threshold);
    };
    INFO("path " << path->name);
    CHECK(of_line({0.25f, 0.0625f, -1}, 0.5f) == Row{0.5f, 0.5625f, 0.625f, 0.6875f, 0});
    CHECK(of_line({1.5f, -0.25f, 1}, 0.5f) == Row{0.5f, 0.25f, 0, 0, 1});
    CHECK(of_line({-1, 0.375f, 1}, 0.5f) == Row{0.5f, 0.875f, 1, 1, 1});
    CHECK(of_line({kNan, 0, 9}, 0.5f) == Row{1, 1, 1, 1, 0});
    CHECK(of_line({0, -kInfinity, 9}, 0.5f) == Row{1, 1, 1, 1, 0});
    CHECK(of_four({-1, -2, 0, -3, 9}, 0.5f) == Row{0.5f, 0.25f, 1, 0.125f, 1});
    CHECK(of_four({-1, kNan, 2, -3, 9}, 0.5f) == Row{0.5f, 1, 1, 0.125f, 0});
    CHECK(of_four({-1, -kInfinity, 2, -3, 9}, 0.5f) == Row{0.5f, 1, 1, 0.125f, 0});
    CHECK(of_four({-1, -2, kInfinity, -3, 9}, 0.5f) == Row{0.5f, 0.25f, 1, 0.125f, 0});
    CHECK(of_four({-1, -1e30f, 1, 200, 9}, 0.5f) == Row{0.5f, 0, 1, 1, 0});
    CHECK(of_four({-1, -1e30f, 1, 100, 9}, 0.5f) == Row{0.5f, 0, 1, 1, 1});
    // A share has to be above the threshold. The logit's own failure streams nothing.
    const auto streams = [&](float logit, float threshold) {
      return of_four({-1, -1, -1, -1, logit}, threshold).back() == 1;
    };
    CHECK_FALSE(streams(0, 0.5f));
    CHECK(streams(0, 0.4999999f));
    CHECK(streams(-5, 0));
    CHECK(streams(2, 0.88f));
    CHECK_FALSE(streams(2, 0.881f));
    CHECK_FALSE(streams(100, 1));
    CHECK_FALSE(streams(-200, 0));
    for (const float bad : {kNan, kInfinity, -kInfinity}) CHECK_FALSE(streams(bad, 0));
  }
}
SLUICE_TEST_ON_EVERY_PATH("budgets are held to their range, and shares to the threshold",
                          TestJudgement)

}  // namespace
}  // namespace sluice::kernels
