#include "src/bench/ranks/rank_trace.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/match.h"

namespace sluice::bench {
namespace {

bool HasOneOf(const std::string& name, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const char* part) { return absl::StrContains(name, part); });
}
// The names are NCCL's, those of kernels between GPUs, and those of the CPU device.
bool IsCollective(const std::string& kernel) {
  return HasOneOf(kernel, {"nccl", "AllReduce", "AllGather", "AllToAll", "all-", "reduce-scatter"});
}
bool IsExchange(const std::string& kernel) {
  return HasOneOf(kernel, {"SendRecv", "AllToAll", "all-to-all"});
}

using Stretch = std::pair<absl::Time, absl::Time>;

// Returns the stretches that any of `all` covers, in order and apart from one another.
std::vector<Stretch> Union(std::vector<Stretch> all) {
  std::sort(all.begin(), all.end());
  std::vector<Stretch> apart;
  for (const Stretch& s : all) {
    if (!apart.empty() && s.first <= apart.back().second) {
      apart.back().second = std::max(apart.back().second, s.second);
    } else {
      apart.push_back(s);
    }
  }
  return apart;
}

absl::Duration TimeOf(const std::vector<Stretch>& apart) {
  absl::Duration sum;
  for (const auto& [begin, end] : apart) sum += end - begin;
  return sum;
}

}  // namespace

RankTrace SumOf(const std::vector<TraceSlice>& slices, absl::Time begin, absl::Time end,
                int64_t steps) {
  std::vector<Stretch> group, exchange, others;
  for (const TraceSlice& slice : slices) {
    if (slice.begin < begin || slice.begin >= end) continue;
    if (slice.kind != TraceSlice::Kind::kKernel) continue;
    (IsCollective(slice.name) ? group : others).emplace_back(slice.begin, slice.end);
    if (IsExchange(slice.name)) exchange.emplace_back(slice.begin, slice.end);
  }
  others = Union(std::move(others));
  const absl::Duration beside = TimeOf(others);
  std::vector<Stretch> all = group;
  all.insert(all.end(), others.begin(), others.end());
  const auto each = 1.0 / static_cast<double>(steps);
  RankTrace sum;
  sum.step = absl::ToDoubleSeconds(end - begin) * each;
  sum.collective = absl::ToDoubleSeconds(TimeOf(Union(std::move(group)))) * each;
  sum.exchange = absl::ToDoubleSeconds(TimeOf(Union(std::move(exchange)))) * each;
  // Durations are subtracted, because doubles would round and could exceed `collective`.
  sum.exposed = absl::ToDoubleSeconds(TimeOf(Union(std::move(all))) - beside) * each;
  return sum;
}

}  // namespace sluice::bench
