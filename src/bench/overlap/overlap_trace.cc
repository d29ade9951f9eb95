#include "src/bench/overlap/overlap_trace.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "src/bench/trace/trace_summary.h"

namespace sluice::bench {
namespace {

bool IsWriteThrough(const std::string& name) {
  return absl::StartsWithIgnoreCase(name, "WriteThrough") ||
         absl::StartsWithIgnoreCase(name, "write_through") ||
         absl::StartsWithIgnoreCase(name, "write through") || absl::StrContains(name, "<ToDram>");
}
bool IsTransfer(const std::string& name) {
  return absl::StartsWithIgnoreCase(name, "Transfer") && !IsWriteThrough(name);
}
bool UpdatesResidency(const std::string& name) {
  return absl::StartsWithIgnoreCase(name, "UpdateResidency") ||
         absl::StartsWithIgnoreCase(name, "update_residency");
}
bool IsOfAttention(const std::string& name) {
  return absl::StrContains(absl::AsciiStrToLower(name), "mla");
}
// Recognises the kernels that combine attention's parts (CombineMlaKernel, sparse_mla_merge).
bool IsSumOfAttention(const std::string& name) {
  return IsOfAttention(name) &&
         (absl::StartsWithIgnoreCase(name, "Combine") || absl::EndsWithIgnoreCase(name, "merge"));
}
bool MakesQueries(const std::string& name) {
  return IsOfAttention(name) && absl::StrContains(absl::AsciiStrToLower(name), "query");
}
// Recognises attention over a row's lists: one call on a GPU, one per list on a CPU.
bool IsAttention(const std::string& name) {
  return IsOfAttention(name) && !IsSumOfAttention(name) && !MakesQueries(name);
}

}  // namespace

double StepsIn(const StepTrace& part, int layers) {
  const auto queries =
      std::count_if(part.device.begin(), part.device.end(), [](const TraceSlice& slice) {
        return slice.kind == TraceSlice::Kind::kKernel && MakesQueries(slice.name);
      });
  return static_cast<double>(queries) / layers;  // Once per layer.
}

TransfersInside TransfersIn(const StepTrace& part, int layers) {
  TransfersInside found;
  const double steps = StepsIn(part, layers);
  if (steps == 0) return found;
  for (const TraceSummary::Kernel& kernel : Summarize(part).kernel_times) {
    if (IsTransfer(kernel.name)) {
      found.seconds += kernel.seconds * part.steps / steps;
      found.calls += kernel.calls * part.steps / steps;
    } else if (!IsWriteThrough(kernel.name)) {
      found.compute_seconds += kernel.seconds * part.steps / steps;
    }
  }
  return found;
}

std::optional<TransfersInside> FetchesOf(const TransfersInside& with,
                                         const TransfersInside& without) {
  if (with.calls <= without.calls) return std::nullopt;
  TransfersInside found = with;
  found.calls -= without.calls;
  found.seconds = std::max(0.0, with.seconds - without.seconds);
  return found;
}

std::vector<ComparedKernel> ComparedKernels(const StepTrace& with, const StepTrace& without,
                                            int layers) {
  std::map<std::string, ComparedKernel> found;
  const auto add = [&](const StepTrace& part, double ComparedKernel::*seconds) {
    const double steps = StepsIn(part, layers);
    if (steps == 0) return;
    for (const TraceSummary::Kernel& kernel : Summarize(part).kernel_times) {
      found[kernel.name].*seconds = kernel.seconds * part.steps / steps;
    }
  };
  add(with, &ComparedKernel::with);
  add(without, &ComparedKernel::without);
  std::vector<ComparedKernel> kernels;
  for (auto& [name, kernel] : found) {
    kernel.name = name;
    if (!IsTransfer(name)) kernels.push_back(kernel);
  }
  std::sort(kernels.begin(), kernels.end(), [](const ComparedKernel& a, const ComparedKernel& b) {
    return a.with - a.without > b.with - b.without;
  });
  return kernels;
}

double Shelter::Coverable(double t) const {
  // One piece begins with `beneath` of work left; the second of two halves begins then, or at the
  // end of the first.
  const double second = ahead > 0 ? std::max(t / 2 - ahead, 0.0) + t / 2 : t;
  return t - std::max(0.0, second - beneath);
}

Shelter ShelterIn(const StepTrace& trace) {
  std::vector<const TraceSlice*> slices;
  for (const TraceSlice& slice : trace.device) {
    if (slice.kind == TraceSlice::Kind::kKernel) slices.push_back(&slice);
  }
  std::stable_sort(slices.begin(), slices.end(),
                   [](const TraceSlice* a, const TraceSlice* b) { return a->begin < b->begin; });
  // A layer has one UpdateResidency or two, and attention with the combination of its parts.
  struct Layer {
    std::vector<absl::Time> updated;
    int attentions = 0;
    absl::Time attended;
  };
  Shelter found;
  absl::Duration beneath, ahead;
  Layer layer;
  const auto end_layer = [&] {
    if (layer.attentions > 0 && !layer.updated.empty() && layer.updated.size() <= 2) {
      beneath += layer.attended - layer.updated.back();
      ahead += layer.updated.back() - layer.updated.front();
      ++found.layers;
    }
    layer = {};
  };
  int sums = 0;
  for (const TraceSlice* slice : slices) {
    if (UpdatesResidency(slice->name)) {
      if (layer.attentions > 0) end_layer();
      if (layer.updated.empty()) sums = 0;
      layer.updated.push_back(slice->end);
    } else if (IsAttention(slice->name)) {
      if (++layer.attentions == 1) layer.attended = slice->end;
    } else if (IsSumOfAttention(slice->name) && sums++ == 0) {
      layer.attended = std::max(layer.attended, slice->end);
    }
  }
  end_layer();
  if (found.layers == 0) return found;
  found.beneath = absl::ToDoubleSeconds(beneath) / found.layers;
  found.ahead = absl::ToDoubleSeconds(ahead) / found.layers;
  return found;
}

StepTrace PartOf(const StepTrace& trace, absl::Time begin, absl::Time end) {
  StepTrace part;
  part.name = trace.name;
  part.steps = 1;
  part.begin = begin;
  part.end = end;
  std::copy_if(trace.device.begin(), trace.device.end(), std::back_inserter(part.device),
               [&](const TraceSlice& s) { return s.begin >= begin && s.begin < end; });
  return part;
}

}  // namespace sluice::bench
