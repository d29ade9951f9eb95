// sluice-bench --compare A B: the figures of two reports side by side.
#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/bench/report/subcommand.h"

namespace sluice::bench {
namespace {

constexpr char kAbout[] =
    R"(Compares two reports of the same subcommand: for each figure that both have, B over A, with the range
that the spreads allow (10th percentile over 90th, 90th over 10th). A figure is called "better" or "worse"
only if the whole range lies on one side of 1. The exit status is 0 whatever the figures are.
)";
constexpr char kExamples[] = R"(  sluice-bench step --model DIR --json before.json
  sluice-bench step --model DIR --json after.json
  sluice-bench --compare before.json after.json
)";

std::string Verdict(const Figure& a, double low, double high) {
  if (low <= 1 && high >= 1) return "within the spread";
  return (low > 1) == a.lower_is_better ? "worse" : "better";
}

void CompareFigures(const Report& a, const Report& b, const Output& out) {
  std::map<std::string, const Figure*> of_a;
  for (const Figure& f : a.figures) of_a[f.name] = &f;
  out.Print(absl::StrFormat("%-64s %10s %10s %7s %15s\n", "figure", "A", "B", "B/A", "range"));
  size_t both = 0;
  for (const Figure& g : b.figures) {
    const auto found = of_a.find(g.name);
    if (found == of_a.end()) continue;
    const Figure& f = *found->second;
    ++both;
    // A figure of 0 (for example no refusals) has no ratio.
    if (!(f.median > 0) || !(f.low > 0) || !(g.low > 0)) {
      out.Print(absl::StrFormat("%-64s %10.4g %10.4g %7s %15s  %s\n", f.name, f.median, g.median,
                                "-", "-", f.unit));
      continue;
    }
    const double low = g.low / f.high, high = g.high / f.low;
    out.Print(absl::StrFormat("%-64s %10.4g %10.4g %7.3f %7.3f-%-7.3f  %s, %s\n", f.name, f.median,
                              g.median, g.median / f.median, low, high, f.unit,
                              Verdict(f, low, high)));
  }
  out.Print(absl::StrCat(both, " figures in both, ", a.figures.size() - both, " only in A, ",
                         b.figures.size() - both, " only in B\n"));
}

}  // namespace

int RunCompare(const Invocation& invocation) {
  std::vector<std::string> files;
  Flags flags("sluice-bench --compare", kAbout, kExamples);
  flags.Rest("A.json B.json", "reports that --json wrote", &files);
  if (const auto status = ReadFlags(flags, invocation)) return *status;
  if (files.size() != 2) {
    return Usage(absl::StrCat("--compare takes two reports, but ", files.size(), " are given"));
  }
  absl::StatusOr<Report> a = ReadReport(files[0]), b = ReadReport(files[1]);
  for (const auto* report : {&a, &b}) {
    if (!report->ok()) return Fail(report->status());
  }
  if (a->subcommand != b->subcommand) {
    return Fail(absl::InvalidArgumentError(absl::StrCat(files[0], " is a report of ", a->subcommand,
                                                        ", ", files[1], " of ", b->subcommand,
                                                        ": nothing to compare")));
  }
  const Output out("");
  out.Print(absl::StrCat("A: ", files[0], "\n", Preamble(*a), "B: ", files[1], "\n", Preamble(*b)));
  if (a->machine.cpu != b->machine.cpu || a->machine.cores != b->machine.cores) {
    out.Print("The machines differ: times cannot be compared, shares of a floor may be.\n");
  }
  if (a->shape != b->shape) out.Print("The shapes differ.\n");
  CompareFigures(*a, *b, out);
  return 0;
}

}  // namespace sluice::bench
