#include "src/bench/trace/trace_summary.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace sluice::bench {
namespace {

constexpr absl::Duration kLongGap = absl::Microseconds(5);
constexpr size_t kShownKernels = 12;

bool SameStep(const TraceSlice& a, const TraceSlice& b) {
  if (a.launch != 0 || b.launch != 0) return a.launch == b.launch;
  return a.kind == TraceSlice::Kind::kKernel && b.kind == TraceSlice::Kind::kKernel;
}

// Returns the time covered by at least one of the intervals.
absl::Duration Covered(std::vector<std::pair<absl::Time, absl::Time>> intervals) {
  std::sort(intervals.begin(), intervals.end());
  absl::Duration sum;
  absl::Time until = absl::InfinitePast();
  for (const auto& [begin, end] : intervals) {
    sum += std::max(end, until) - std::max(begin, std::min(until, end));
    until = std::max(until, end);
  }
  return sum;
}

}  // namespace

std::vector<TraceGap> FindGaps(const std::vector<TraceSlice>& device) {
  std::set<uint32_t> compute;
  for (const TraceSlice& slice : device) {
    if (slice.kind == TraceSlice::Kind::kKernel) compute.insert(slice.stream);
  }
  std::vector<TraceGap> gaps;
  const TraceSlice* last = nullptr;  // The slice of this stream that ended last.
  for (const TraceSlice& slice : device) {
    if (compute.count(slice.stream) == 0) continue;
    if (last != nullptr && last->stream == slice.stream && slice.begin > last->end) {
      gaps.push_back(
          {slice.stream, last->end, slice.begin, last->name, slice.name, SameStep(*last, slice)});
    }
    if (last == nullptr || last->stream != slice.stream || slice.end > last->end) last = &slice;
  }
  return gaps;
}

TraceSummary Summarize(const StepTrace& trace) {
  TraceSummary out;
  const double steps = trace.steps;
  const auto a_step = [&](absl::Duration d) { return absl::ToDoubleSeconds(d) / steps; };
  out.step = a_step(trace.end - trace.begin);
  std::map<std::string, TraceSummary::Kernel> kernels;
  std::vector<std::pair<absl::Time, absl::Time>> intervals;
  uint32_t stream = 0;
  absl::Time busy_until = absl::InfinitePast();  // Of `stream`.
  for (const TraceSlice& slice : trace.device) {
    if (slice.stream != stream) busy_until = absl::InfinitePast();
    stream = slice.stream;
    const absl::Time alone = std::min(std::max(slice.begin, busy_until), slice.end);
    busy_until = std::max(busy_until, slice.end);
    if (slice.kind != TraceSlice::Kind::kKernel) {
      out.copies += a_step(slice.end - slice.begin);
      continue;
    }
    intervals.emplace_back(slice.begin, slice.end);
    TraceSummary::Kernel& kernel = kernels[slice.name];
    kernel.name = slice.name;
    kernel.calls += 1 / steps;
    kernel.seconds += a_step(slice.end - alone);
    kernel.begin_to_end += a_step(slice.end - slice.begin);
  }
  out.kernels = a_step(Covered(std::move(intervals)));
  for (auto& [name, kernel] : kernels) out.kernel_times.push_back(std::move(kernel));
  std::stable_sort(out.kernel_times.begin(), out.kernel_times.end(),
                   [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  for (const TraceGap& gap : FindGaps(trace.device)) {
    const absl::Duration length = gap.end - gap.begin;
    (gap.inside_step ? out.gaps_inside : out.gaps_between) += a_step(length);
    if (!gap.inside_step) continue;
    out.gaps_over_5_us += length > kLongGap ? 1 : 0;
    if (absl::ToDoubleSeconds(length) <= out.largest_gap_inside) continue;
    out.largest_gap_inside = absl::ToDoubleSeconds(length);
    out.largest_gap_after = gap.after;
    out.largest_gap_before = gap.before;
  }
  for (const HostPhase& phase : trace.host) {
    for (auto [name, sum] : {std::pair{"plan", &out.plan}, std::pair{"launch", &out.launch},
                             std::pair{"emit", &out.emit}, std::pair{"wait", &out.wait}}) {
      if (phase.name == name) *sum += a_step(phase.end - phase.begin);
    }
  }
  return out;
}

std::string ToText(const StepTrace& trace, const TraceSummary& s) {
  const auto share = [&](double seconds) { return 100 * seconds / s.step; };
  std::string out = absl::StrFormat(
      "\ntrace of %d steps, %s: %.1f us a step (slower than untraced)\n"
      "  kernels %.1f us (%.1f%%), copies %.1f us, gaps inside a step %.1f us, between steps %.1f "
      "us\n"
      "  host: plan %.1f us, launch %.1f us, emit %.1f us, wait %.1f us\n",
      trace.steps, trace.name, s.step * 1e6, s.kernels * 1e6, share(s.kernels), s.copies * 1e6,
      s.gaps_inside * 1e6, s.gaps_between * 1e6, s.plan * 1e6, s.launch * 1e6, s.emit * 1e6,
      s.wait * 1e6);
  if (s.largest_gap_inside > 0) {
    absl::StrAppendFormat(
        &out, "  largest gap inside a step %.2f us, after %s, before %s; %d over 5 us\n",
        s.largest_gap_inside * 1e6, s.largest_gap_after, s.largest_gap_before, s.gaps_over_5_us);
  }
  absl::StrAppendFormat(&out, "  %-52s %9s %11s %9s %13s\n", "kernel", "calls", "us a step",
                        "of step", "begin to end");
  for (size_t i = 0; i < std::min(kShownKernels, s.kernel_times.size()); ++i) {
    const TraceSummary::Kernel& k = s.kernel_times[i];
    absl::StrAppendFormat(&out, "  %-52s %9.1f %11.1f %8.1f%% %13.1f\n", k.name, k.calls,
                          k.seconds * 1e6, share(k.seconds), k.begin_to_end * 1e6);
  }
  return out;
}

nlohmann::json ToJson(const StepTrace& trace, const TraceSummary& s) {
  nlohmann::json kernels = nlohmann::json::array();
  for (const TraceSummary::Kernel& k : s.kernel_times) {
    kernels.push_back({{"name", k.name},
                       {"calls", k.calls},
                       {"seconds", k.seconds},
                       {"begin_to_end_seconds", k.begin_to_end}});
  }
  return {{"name", trace.name},
          {"steps", trace.steps},
          {"step_seconds", s.step},
          {"kernels_seconds", s.kernels},
          {"copies_seconds", s.copies},
          {"gaps_inside_seconds", s.gaps_inside},
          {"gaps_between_seconds", s.gaps_between},
          {"largest_gap_inside_seconds", s.largest_gap_inside},
          {"gaps_over_5_us", s.gaps_over_5_us},
          {"host",
           {{"plan_seconds", s.plan},
            {"launch_seconds", s.launch},
            {"emit_seconds", s.emit},
            {"wait_seconds", s.wait}}},
          {"kernels", std::move(kernels)}};
}

}  // namespace sluice::bench
