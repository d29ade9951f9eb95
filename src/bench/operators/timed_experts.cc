// Times products of heads and of experts, at DeepSeek-V3.2's geometry.
#include "absl/strings/str_cat.h"
#include "src/bench/operators/timed_latent.h"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: a file about them

const KernelTable& Reference() { return *FindKernelTable("reference"); }

// Rows choose experts in turn, so that every expert has about as many pairs.
class ExpertLinear : public TimedOperator {
 public:
  ExpertLinear(const TimedExpertCase& c, const KernelTable& path, OperandArena* arena)
      : case_(c),
        path_(path),
        arena_(arena),
        x_(static_cast<size_t>(c.rows) * static_cast<size_t>(c.columns), path.activation_type),
        y_(static_cast<size_t>(c.rows) * static_cast<size_t>(c.k) * static_cast<size_t>(c.n)) {
    std::vector<std::vector<int32_t>> of(static_cast<size_t>(c.experts));
    for (int32_t pair = 0; pair < c.rows * c.k; ++pair) {
      of[static_cast<size_t>(pair % c.experts)].push_back(pair);
    }
    begins_.push_back(0);
    for (const std::vector<int32_t>& pairs : of) {
      pairs_.insert(pairs_.end(), pairs.begin(), pairs.end());
      begins_.push_back(static_cast<int32_t>(pairs_.size()));
      used_ += pairs.empty() ? 0 : 1;
    }
  }

  std::string name() const override {
    return absl::StrCat("experts' ", case_.n, " x ", case_.columns, ", ", case_.rows, " x ",
                        case_.k, " of ", case_.experts);
  }
  double bytes() const override { return double(used_) * case_.n * case_.columns * 2; }
  double flops() const override {
    return double(case_.rows) * case_.k * case_.n * case_.columns * 2;
  }
  void Run(Crew& crew) override {
    const ExpertLinearParams p = Params(y_.data());
    RunAll(crew, path_.expert_linear, p);
  }
  double Error(Crew& crew) override {
    // Checks the first expert's pairs only, because the reference is slow.
    std::vector<float> want(y_.size(), 0.0f), got(y_.size(), 0.0f);
    ExpertLinearParams p = Params(got.data());
    p.experts = 1;
    RunAll(crew, path_.expert_linear, p);
    p.y = want.data();
    Reference().expert_linear(p, {0, 1});
    return RelativeError(got, want);
  }
  double allowed_error() const override { return 1e-5; }

 private:
  ExpertLinearParams Params(float* y) {
    const int32_t n = case_.experts * case_.n;
    ExpertLinearParams p = {};
    p.x = x_.data();
    p.pairs_per_row = case_.k;
    p.w = {arena_->Next(static_cast<size_t>(PanelElements(n, case_.columns)) * 2), n, case_.columns,
           path_.weight_layout};
    p.y = y;
    p.pairs = pairs_.data();
    p.begins = begins_.data();
    p.max_pairs = case_.rows * case_.k;
    p.experts = case_.experts;
    p.n = case_.n;
    p.x_type = path_.activation_type;
    return p;
  }

  const TimedExpertCase case_;
  const KernelTable& path_;
  OperandArena* const arena_;
  const LatentActivations x_;
  std::vector<float> y_;
  std::vector<int32_t> pairs_, begins_;
  int32_t used_ = 0;
};

class HeadLinear : public TimedOperator {
 public:
  HeadLinear(const TimedHeadCase& c, const KernelTable& path, OperandArena* arena)
      : case_(c),
        path_(path),
        arena_(arena),
        x_(static_cast<size_t>(c.rows) * static_cast<size_t>(c.heads) *
               static_cast<size_t>(c.columns),
           path.activation_type),
        y_(static_cast<size_t>(c.rows) * static_cast<size_t>(c.heads) * static_cast<size_t>(c.n)) {}

  std::string name() const override {
    return absl::StrCat("heads' ", case_.n, " x ", case_.columns, ", ", case_.heads, " heads, ",
                        case_.rows, case_.rows == 1 ? " row" : " rows");
  }
  double bytes() const override { return double(case_.heads) * case_.n * case_.columns * 2; }
  double flops() const override {
    return double(case_.rows) * case_.heads * case_.n * case_.columns * 2;
  }
  void Run(Crew& crew) override {
    const HeadLinearParams p = Params();
    RunAll(crew, path_.head_linear, p);
  }
  double Error(Crew& crew) override {
    HeadLinearParams p = Params();
    RunAll(crew, path_.head_linear, p);
    std::vector<float> want(y_.size() / static_cast<size_t>(case_.rows));
    p.y = want.data();
    p.rows = 1;
    Reference().head_linear(p, {0, 1});
    return RelativeError({y_.data(), want.size()}, want);
  }
  double allowed_error() const override { return 1e-5; }

 private:
  HeadLinearParams Params() {
    const int32_t n = case_.heads * case_.n;
    HeadLinearParams p = {};
    p.x = x_.data();
    p.x_head_stride = case_.columns;
    p.x_stride = int64_t{case_.heads} * case_.columns;
    p.w = {arena_->Next(static_cast<size_t>(PanelElements(n, case_.columns)) * 2), n, case_.columns,
           path_.weight_layout};
    p.y = y_.data();
    p.y_head_stride = case_.n;
    p.y_stride = int64_t{case_.heads} * case_.n;
    p.x_type = path_.activation_type;
    p.y_type = DType::kFloat32;
    p.rows = p.decode_rows = case_.rows;
    p.heads = case_.heads;
    p.n = case_.n;
    return p;
  }

  const TimedHeadCase case_;
  const KernelTable& path_;
  OperandArena* const arena_;
  const LatentActivations x_;
  std::vector<float> y_;
};

}  // namespace

std::vector<std::function<std::unique_ptr<TimedOperator>()>> ProductOperators(
    const KernelTable& path, OperandArena* arena) {
  std::vector<std::function<std::unique_ptr<TimedOperator>()>> operators;
  for (const auto& c : TimedHeadCases()) {
    operators.push_back([=, &path] { return std::make_unique<HeadLinear>(c, path, arena); });
  }
  for (const auto& c : TimedExpertCases()) {
    operators.push_back([=, &path] { return std::make_unique<ExpertLinear>(c, path, arena); });
  }
  return operators;
}

}  // namespace sluice::bench
