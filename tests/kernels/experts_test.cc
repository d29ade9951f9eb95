// Routing to experts, their products, and the sum of their results: Route, ExpertLinear, Combine.
#include "tests/kernels/latent_support.h"

namespace sluice::kernels {
namespace {

struct RouteCase {
  const char* name;
  int32_t rows;
  int32_t experts;
  int32_t k;
  int32_t groups;
  int32_t top_groups;
  bool bias;
  bool normalise;
};

const RouteCase kRouteCases[] = {
    {"no rows", 0, 8, 2, 4, 2, true, true},
    {"DeepSeek-V3.2", 21, 256, 8, 8, 4, true, true},
    {"one group", 9, 64, 6, 1, 1, false, false},
    {"groups of one", 9, 16, 3, 16, 5, true, true},
    {"every expert", 7, 8, 8, 4, 4, true, true},
    {"all of the best groups", 7, 16, 8, 4, 2, true, false},
    {"one row", 1, 8, 2, 4, 2, true, true},
    {"a prompt", 300, 256, 8, 8, 4, true, true},
    {"a rank's experts", 40, 8, 8, 1, 1, false, true},
    {"384 experts", 5, 384, 8, 1, 1, true, true},
};

struct RouteOutput {
  RouteOutput(const RouteCase& c, int64_t rows)
      : chosen(rows * c.k), weights(rows * c.k), pairs(rows * c.k), begins(c.experts + 1) {}
  std::string Damage() const {
    return chosen.Damage() + weights.Damage() + pairs.Damage() + begins.Damage();
  }
  Guarded<int32_t> chosen;
  Guarded<float> weights;
  Guarded<int32_t> pairs, begins;
};

// Logits and biases of a coarse grid, so that choices tie; they tie exactly or differ by more than
// rounding, which float32 and float64 do differently.
class RouteFixture {
 public:
  RouteFixture(const RouteCase& c, Random& random)
      : case_(c), logits_(int64_t{c.rows} * c.experts), bias_(c.experts), slots_(c.rows) {
    for (float& v : bias_) v = static_cast<float>(static_cast<int>(random() % 9) - 4) / 8;
    for (int64_t r = 0; r < c.rows; ++r) {
      slots_[r] = r % 5 == 4 ? -1 : static_cast<int32_t>(r);
      float* row = logits_.data() + r * c.experts;
      do {
        std::generate_n(row, c.experts, [&random] {
          return static_cast<float>(static_cast<int>(random() % 161) - 80) / 16;
        });
        // Rows of equal logits (whose scores, 1/2, and their sums are exact), and rows of
        // infinities.
        if (r % 7 == 3) std::fill_n(row, c.experts, 0.0f);
        if (r == 6) row[0] = std::numeric_limits<float>::infinity();
        if (r == 6) row[1] = kNegativeInfinity;
      } while (r % 7 != 3 && !Decided(row));
      if (r == 5) row[c.experts - 1] = std::nanf("");
    }
  }

  RouteOutput Run(const KernelTable& table, int64_t first, int64_t rows, int workers) {
    RouteOutput out(case_, rows);
    const RouteParams p = {.logits = logits_.data() + first * case_.experts,
                           .bias = case_.bias ? bias_.data() : nullptr,
                           .slots = slots_.data() + first,
                           .chosen = out.chosen.data(),
                           .weights = out.weights.data(),
                           .pairs = out.pairs.data(),
                           .begins = out.begins.data(),
                           .rows = static_cast<int32_t>(rows),
                           .experts = case_.experts,
                           .k = case_.k,
                           .groups = case_.groups,
                           .top_groups = case_.top_groups,
                           .normalise = case_.normalise,
                           .scaling = 2.5f};
    RunWorkers(table.route, p, workers);
    RunWorkers(table.route_pairs, p, workers);
    CHECK(out.Damage() == "");
    return out;
  }
  bool empty(int64_t r) const { return slots_[r] < 0 || r == 5; }

 private:
  // Values of one kind, the largest first; their order is that of the numbers that they are made
  // of.
  using Ranked = std::vector<std::pair<double, std::vector<double>>>;
  // Returns whether rounding cannot change which `count` are the largest: the values on either side
  // of the cut are made of the same numbers, or differ by more. (Sums of other scores and biases
  // may tie but for rounding.)
  static bool Decided(Ranked ranked, int32_t count) {
    if (count >= static_cast<int32_t>(ranked.size())) return true;
    std::sort(ranked.rbegin(), ranked.rend());
    const auto& last = ranked[static_cast<size_t>(count) - 1];
    const auto& next = ranked[static_cast<size_t>(count)];
    return last.second == next.second || last.first - next.first > 1e-5;
  }
  bool Decided(const float* row) const {
    Ranked of_groups;
    std::vector<Ranked> groups;
    const int32_t of_group = case_.experts / case_.groups;
    for (int32_t g = 0; g < case_.groups; ++g) {
      Ranked& group = groups.emplace_back();
      for (int32_t e = g * of_group; e < (g + 1) * of_group; ++e) {
        const double choice =
            1 / (1 + std::exp(-double{row[e]})) + (case_.bias ? double{bias_.data()[e]} : 0.0);
        group.push_back({choice, {choice}});
      }
      std::sort(group.rbegin(), group.rend());
      const double second = of_group > 1 ? group[1].first : 0;
      of_groups.push_back({group[0].first + second, {group[0].first, second}});
    }
    if (!Decided(of_groups, case_.top_groups)) return false;
    std::vector<size_t> order(groups.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return of_groups[a].first > of_groups[b].first; });
    Ranked values;
    for (int32_t g = 0; g < case_.top_groups; ++g) {
      const Ranked& group = groups[order[static_cast<size_t>(g)]];
      values.insert(values.end(), group.begin(), group.end());
    }
    return Decided(values, case_.k);
  }

  const RouteCase& case_;
  Guarded<float> logits_, bias_;
  Guarded<int32_t> slots_;
};

void TestRoute(const KernelTable& table, Random& random) {
  for (const RouteCase& c : kRouteCases) {
    INFO(c.name);
    RouteFixture f(c, random);
    const RouteOutput got = f.Run(table, 0, c.rows, 3), want = f.Run(Reference(), 0, c.rows, 1);
    int32_t pairs = 0;
    for (int64_t r = 0; r < c.rows; ++r) {
      INFO("row " << r);
      for (int64_t j = 0; j < c.k; ++j) {
        REQUIRE(got.chosen[r * c.k + j] == want.chosen[r * c.k + j]);
        REQUIRE((got.chosen[r * c.k + j] == -1) == f.empty(r));
        if (f.empty(r)) REQUIRE(got.weights[r * c.k + j] == 0);
        pairs += got.chosen[r * c.k + j] >= 0 ? 1 : 0;
      }
      if (r % 4 != 1) continue;
      const RouteOutput alone = f.Run(table, r, 1, 2);
      for (int64_t j = 0; j < c.k; ++j) {
        REQUIRE(alone.chosen[j] == got.chosen[r * c.k + j]);
        REQUIRE(alone.weights[j] == got.weights[r * c.k + j]);
      }
    }
    CHECK(Difference(got.weights.span(), want.weights.span(), 2e-6, c.k) == "");
    for (int32_t e = 0; e <= c.experts; ++e) REQUIRE(got.begins[e] == want.begins[e]);
    REQUIRE(got.begins[c.experts] == pairs);
    for (int32_t i = 0; i < pairs; ++i) REQUIRE(got.pairs[i] == want.pairs[i]);
  }
}
SLUICE_TEST_ON_EVERY_PATH("route agrees with the reference", TestRoute)

struct ExpertCase {
  int32_t rows;
  int32_t k;        // choices of a row
  int32_t experts;  // experts of the matrix; no row chooses some of them
  int32_t n;
  int32_t columns;
  bool by_row;  // x has one row per row, else one per pair
};

const ExpertCase kExpertCases[] = {
    {0, 2, 4, 32, 64, true},      {1, 2, 8, 48, 96, true},     {3, 2, 8, 128, 256, false},
    {40, 4, 8, 256, 128, true},   {40, 4, 8, 128, 256, false}, {9, 8, 8, 64, 72, true},
    {200, 2, 3, 112, 160, false}, {17, 6, 64, 64, 512, true},  {130, 1, 2, 32, 1024, true},
};

// Rows choose experts at random, some rows none; a few experts get most.
class ExpertFixture {
 public:
  ExpertFixture(const ExpertCase& c, DType x_type, Random& random)
      : shape(c),
        type(x_type),
        weights(c.experts * c.n, c.columns, random),
        x(RandomElements(int64_t{c.rows} * (c.by_row ? 1 : c.k) * c.columns, type, random)),
        pairs(int64_t{c.rows} * c.k),
        begins(c.experts + 1) {
    std::vector<std::vector<int32_t>> of_experts(static_cast<size_t>(c.experts));
    std::vector<int32_t> order(static_cast<size_t>(c.experts));
    std::iota(order.begin(), order.end(), 0);
    for (int32_t r = 0; r < c.rows; ++r) {
      if (r % 9 == 7) continue;
      std::shuffle(order.begin(), order.end(), random);
      std::vector<int32_t> choices(order.begin(), order.begin() + c.k);
      if (c.k < c.experts / 2 && r % 3 != 0) {
        for (int32_t j = 0; j < c.k; ++j) choices[static_cast<size_t>(j)] = j;
      }
      for (int32_t j = 0; j < c.k; ++j) {
        of_experts[static_cast<size_t>(choices[static_cast<size_t>(j)])].push_back(r * c.k + j);
      }
    }
    int32_t count = 0;
    for (int32_t e = 0; e < c.experts; ++e) {
      begins[e] = count;
      for (int32_t pair : of_experts[static_cast<size_t>(e)]) pairs[count++] = pair;
    }
    begins[c.experts] = count;
  }

  Guarded<float> Run(const KernelTable& table, const WeightMatrix& w, const Guarded<int32_t>& of,
                     const Guarded<int32_t>& from, int workers, bool threads = false) const {
    Guarded<float> y(int64_t{shape.rows} * shape.k * shape.n);
    const ExpertLinearParams p = {.x = x.data(),
                                  .pairs_per_row = shape.by_row ? shape.k : 1,
                                  .w = w,
                                  .y = y.data(),
                                  .pairs = of.data(),
                                  .begins = from.data(),
                                  .max_pairs = shape.rows * shape.k,
                                  .experts = shape.experts,
                                  .n = shape.n,
                                  .x_type = type};
    threads ? RunThreads(table.expert_linear, p, workers)
            : RunWorkers(table.expert_linear, p, workers);
    CHECK(y.Damage() == "");
    return y;
  }

  const ExpertCase shape;
  const DType type;
  TestWeights weights;
  Guarded<uint8_t> x;
  Guarded<int32_t> pairs, begins;
};

std::string NameOf(const ExpertCase& c) {
  return std::to_string(c.rows) + " rows, " + std::to_string(c.k) + " of " +
         std::to_string(c.experts) + " experts of " + std::to_string(c.n) + " x " +
         std::to_string(c.columns);
}

// Paths without e4m3 products round each weight to bf16 once.
double Tolerance(WeightLayout layout) { return layout == WeightLayout::kFp8Blocks ? 4e-3 : 3e-6; }

void TestExpertLinear(const KernelTable& table, Random& random) {
  for (const ExpertCase& c : kExpertCases) {
    INFO(NameOf(c));
    const ExpertFixture f(c, table.activation_type, random);
    for (WeightLayout layout : LayoutsOf(table)) {
      INFO("layout " << static_cast<int>(layout));
      const auto got = f.Run(table, f.weights.As(layout), f.pairs, f.begins, 3);
      const auto want = f.Run(Reference(), f.weights.Plain(layout), f.pairs, f.begins, 1);
      // Elements that no pair writes stay as they were, NaN, on either side.
      const double typical = 0.1 * std::sqrt(static_cast<double>(c.columns));
      CHECK(Difference(got.span(), want.span(), Tolerance(layout), c.n, typical) == "");
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("expert_linear agrees with the reference", TestExpertLinear)

void TestExpertLinearBits(const KernelTable& table, Random& random) {
  for (const ExpertCase& c : kExpertCases) {
    INFO(NameOf(c));
    const ExpertFixture f(c, table.activation_type, random);
    for (WeightLayout layout : LayoutsOf(table)) {
      INFO("layout " << static_cast<int>(layout));
      const auto all = f.Run(table, f.weights.As(layout), f.pairs, f.begins, 1);
      for (int workers : {2, 7, 16}) {
        const auto shared = f.Run(table, f.weights.As(layout), f.pairs, f.begins, workers, true);
        CHECK(BitDifference(shared.span(), all.span(), c.n) == "");
      }
      // Each pair is computed alone.
      for (int32_t i = 0; i < f.begins[c.experts]; i += 1 + i / 4) {
        INFO("pair " << f.pairs[i]);
        Guarded<int32_t> pair(c.rows * c.k), begins(c.experts + 1);
        pair[0] = f.pairs[i];
        for (int32_t e = 0; e <= c.experts; ++e) begins[e] = f.begins[e] > i ? 1 : 0;
        const auto alone = f.Run(table, f.weights.As(layout), pair, begins, 2);
        const auto at = static_cast<size_t>(int64_t{pair[0]} * c.n), n = static_cast<size_t>(c.n);
        CHECK(BitDifference(alone.span().subspan(at, n), all.span().subspan(at, n), c.n) == "");
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a pair of expert_linear has the same bits in any company",
                          TestExpertLinearBits)

void TestCombine(const KernelTable& table, Random& random) {
  for (const auto& [rows, k, dim] : {std::tuple{0, 2, 64}, std::tuple{1, 8, 7168},
                                     std::tuple{13, 2, 256}, std::tuple{5, 3, 72}}) {
    INFO(rows << " rows of " << k << " choices, " << dim);
    auto y = NormalBuffer<float>(int64_t{rows} * k * dim, random);
    auto weights = NormalBuffer<float>(int64_t{rows} * k, random);
    const auto start = NormalBuffer<float>(int64_t{rows} * dim, random);
    Guarded<int32_t> chosen(int64_t{rows} * k);
    for (int64_t i = 0; i < chosen.size(); ++i) {
      chosen[i] = random() % 4 == 0 ? -1 : static_cast<int32_t>(random() % 8);
      if (chosen[i] < 0) std::fill_n(y.data() + i * dim, dim, std::nanf(""));
    }
    const auto run = [&, of_row = k, width = dim](const KernelTable& path, int64_t first,
                                                  int32_t count, int workers) {
      Guarded<float> out(int64_t{count} * width);
      std::copy_n(start.data() + first * width, out.size(), out.data());
      const CombineParams p = {.y = y.data() + first * of_row * width,
                               .chosen = chosen.data() + first * of_row,
                               .weights = weights.data() + first * of_row,
                               .out = out.data(),
                               .rows = count,
                               .k = of_row,
                               .dim = width};
      RunWorkers(path.combine, p, workers);
      CHECK(out.Damage() == "");
      return out;
    };
    const auto got = run(table, 0, rows, 3), want = run(Reference(), 0, rows, 1);
    CHECK(Difference(got.span(), want.span(), 1e-6, dim) == "");
    if (rows == 0) continue;
    const auto alone = run(table, rows - 1, 1, 2);
    CHECK(BitDifference(alone.span(), got.span().last(static_cast<size_t>(dim)), dim) == "");
  }
}
SLUICE_TEST_ON_EVERY_PATH("combine agrees with the reference", TestCombine)

}  // namespace
}  // namespace sluice::kernels
