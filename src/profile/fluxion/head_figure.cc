#include "src/profile/fluxion/head_figure.h"

#include <cmath>
#include <utility>

#include "src/profile/fluxion/head_features.h"

namespace sluice {
namespace {

HeadFigure::Kept Keep(const GroupAttention& of, int64_t g, bool beside) {
  const double length = of.whole(g).Length();
  const kernels::FluxionSegments& segments = of.segments();
  const double tokens = beside ? kernels::CpuTokens(segments) : segments.end;
  HeadFigure::Kept out;
  const std::vector<double> shares(kKeptScores.begin(), kKeptScores.end());
  const std::vector<GroupAttention::Kept> kept = of.KeepScores(g, shares, beside);
  for (size_t i = 0; i < kept.size(); ++i) {
    out.errors[i] = length > 0 ? kept[i].error / length : 0;
    out.tokens[i] = static_cast<double>(kept[i].tokens) / tokens;
  }
  return out;
}

}  // namespace

HeadFigure MeasureHeadFigure(const LayerRow& row, size_t head) {
  const int64_t group = row.groups[0].group();
  const int64_t g = static_cast<int64_t>(head) % group;
  const GroupAttention& of = row.groups[head / static_cast<size_t>(group)];
  const AttentionPart& whole = of.whole(g);
  const double length = whole.Length();
  HeadFigure out;
  out.layer = row.layer;
  out.head = static_cast<int64_t>(head);
  out.position = row.position;
  out.document = row.heads[head].document;
  out.all = Keep(of, g, false);
  out.beside = Keep(of, g, true);
  out.sink_score = std::exp(of.sink(g).lse - whole.lse);
  out.relative_length = row.largest > 0 ? length / row.largest : 0;
  const double bound = kOwnDeviation * length;
  out.own_budget = of.ResidentError(g) <= bound ? 0 : of.Budget(g, 0, bound);
  out.budget = row.heads[head].streaming ? 0 : double{row.heads[head].budgets[1]};
  out.o.assign(whole.o.begin(), whole.o.end());
  out.z = MeasureNormality(of.Interactions(g));
  const std::vector<double> q = of.Query(g);
  double squares = 0;
  for (const double x : q) squares += x * x;
  out.lse_error = of.cpu(g).lse - std::log(kernels::CpuTokens(of.segments())) -
                  std::sqrt(squares) * out.z.moments.mean - squares * out.z.moments.variance / 2;
  return out;
}

void ValueLengths::Add(const GroupAttention& group) {
  const auto add = [&](int64_t begin, int64_t end, double* mean, int64_t* tokens) {
    for (const double length : RowLengths(group.cache().v, begin, end, group.cache().head_dim)) {
      *mean += (length - *mean) / static_cast<double>(++*tokens);
    }
  };
  add(0, 1, &first, &first_tokens);
  add(0, group.segments().sink, &sink, &sink_tokens);
  add(group.segments().sink, group.segments().end, &others, &other_tokens);
}

}  // namespace sluice
