#include "src/bench/serve/serve_stats.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace sluice::bench {
namespace {

using Outcome = RequestRecord::Outcome;

constexpr double kBucket = LoadResult::kBucketSeconds;

// Returns tokens/s of slices of [begin, end): of seconds if there are enough, otherwise of tenths.
Percentiles TokenRates(const LoadResult& result, double begin, double end) {
  const size_t slice = end - begin >= 5 ? static_cast<size_t>(std::lround(1 / kBucket)) : 1;
  std::vector<double> rates;
  const auto first = static_cast<size_t>(std::ceil(begin / kBucket - 1e-9));
  const size_t last = std::min(static_cast<size_t>(end / kBucket), result.tokens.size());
  for (size_t i = first; i + slice <= last; i += slice) {
    double sum = 0;
    for (size_t k = 0; k < slice; ++k) sum += result.tokens[i + k];
    rates.push_back(sum / (static_cast<double>(slice) * kBucket));
  }
  return PercentilesOf(std::move(rates));
}

bool Good(const RequestRecord& r, const ServiceLevel& bounds) {
  if (r.outcome != Outcome::kDone) return false;
  if (bounds.ttft_seconds > 0 && r.first_token - r.due > bounds.ttft_seconds) return false;
  const std::vector<double> gaps(r.gaps.begin(), r.gaps.end());
  return bounds.itl_seconds == 0 || PercentilesOf(gaps).p99 <= bounds.itl_seconds;
}

Figure TimeFigure(const std::string& name, const Percentiles& p) {
  Figure f;
  f.name = name;
  f.unit = "s";
  f.lower_is_better = true;
  f.median = p.p50;
  f.low = p.p10;
  f.high = p.p90;
  f.samples = p.samples;
  f.more = {{"mean", p.mean}, {"p99", p.p99}, {"max", p.max}};
  return f;
}

Figure RateFigure(const std::string& name, const std::string& unit, double value,
                  const Percentiles& spread) {
  Figure f;
  f.name = name;
  f.unit = unit;
  f.median = value;
  f.low = spread.samples > 0 ? spread.p10 : value;
  f.high = spread.samples > 0 ? spread.p90 : value;
  f.samples = std::max<int64_t>(spread.samples, 1);
  return f;
}

nlohmann::json Json(const Percentiles& p) {
  return {{"mean", p.mean}, {"p10", p.p10}, {"p50", p.p50},        {"p90", p.p90},
          {"p99", p.p99},   {"max", p.max}, {"samples", p.samples}};
}

std::string Row(const char* name, const Percentiles& p) {
  return absl::StrFormat("  %-28s %9.1f %9.1f %9.1f %9.1f %9.1f %10d\n", name, p.mean * 1e3,
                         p.p50 * 1e3, p.p90 * 1e3, p.p99 * 1e3, p.max * 1e3, p.samples);
}

}  // namespace

Percentiles PercentilesOf(std::vector<double> values) {
  Percentiles out;
  if (values.empty()) return out;
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    const double rank = std::ceil(share * static_cast<double>(values.size()));
    return values[static_cast<size_t>(std::max(rank, 1.0)) - 1];
  };
  for (const double v : values) out.mean += v;
  out.mean /= static_cast<double>(values.size());
  out.p10 = at(0.1);
  out.p50 = at(0.5);
  out.p90 = at(0.9);
  out.p99 = at(0.99);
  out.max = values.back();
  out.samples = static_cast<int64_t>(values.size());
  return out;
}

PhaseStats StatsOf(const LoadResult& result, const Phase& phase, size_t number,
                   const ServiceLevel& bounds) {
  PhaseStats out;
  out.name = phase.name;
  const double begin = result.phases[number].begin;
  double end = result.phases[number].end;
  std::vector<double> ingest, ttft, tpot, itl, latency;
  int64_t good = 0;
  for (const RequestRecord& r : result.requests) {
    if (r.phase != number) continue;
    ++out.came;
    out.refusals += r.refusals;
    out.refusals_without_retry_info += r.refusals_without_retry_info;
    out.longest_retry_delay = std::max(out.longest_retry_delay, r.longest_retry_delay);
    itl.insert(itl.end(), r.gaps.begin(), r.gaps.end());
    out.tokens += r.output_tokens;
    if (r.committed > 0) ingest.push_back(r.committed - r.due);
    if (r.first_token > 0) ttft.push_back(r.first_token - r.due);
    good += Good(r, bounds) ? 1 : 0;
    if (r.outcome == Outcome::kDone) {
      ++out.done;
      latency.push_back(r.end - r.due);
      if (r.output_tokens > 1) {
        tpot.push_back((r.last_token - r.first_token) / static_cast<double>(r.output_tokens - 1));
      }
      // A phase with a number of requests lasts until they have ended: no load follows them.
      if (phase.requests > 0) end = std::max(end, r.end);
      continue;
    }
    ++(r.outcome == Outcome::kRefused ? out.refused : out.failed);
    ++out.errors[r.error];
    out.messages.emplace(r.error, r.message);
  }
  out.seconds = end - begin;
  out.slices = TokenRates(result, begin, end);
  const double seconds = std::max(out.seconds, 1e-9);
  out.tokens_per_second = phase.requests > 0 || out.slices.samples == 0
                              ? static_cast<double>(out.tokens) / seconds
                              : out.slices.mean;
  out.requests_per_second = static_cast<double>(out.done) / seconds;
  out.good_per_second = static_cast<double>(good) / seconds;
  out.good_share = static_cast<double>(good) / static_cast<double>(std::max<int64_t>(out.came, 1));
  out.ingest = PercentilesOf(std::move(ingest));
  out.ttft = PercentilesOf(std::move(ttft));
  out.tpot = PercentilesOf(std::move(tpot));
  out.itl = PercentilesOf(std::move(itl));
  out.latency = PercentilesOf(std::move(latency));
  return out;
}

std::vector<Figure> FiguresOf(const PhaseStats& s) {
  const std::string name = s.name + ": ";
  const Percentiles none;
  std::vector<Figure> figures = {
      RateFigure(name + "output tokens", "tokens/s", s.tokens_per_second, s.slices),
      RateFigure(name + "requests done", "requests/s", s.requests_per_second, none),
      RateFigure(name + "goodput", "requests/s", s.good_per_second, none)};
  figures.back().more = {{"share", s.good_share}};
  figures.push_back(TimeFigure(name + "time to committed caches", s.ingest));
  figures.push_back(TimeFigure(name + "time to first token", s.ttft));
  figures.push_back(TimeFigure(name + "time per output token", s.tpot));
  figures.push_back(TimeFigure(name + "gap between tokens", s.itl));
  figures.push_back(TimeFigure(name + "whole request", s.latency));
  return figures;
}

std::vector<uint32_t> DecodingOverTime(const LoadResult& result) {
  std::vector<uint32_t> out(result.tokens.size());
  for (const RequestRecord& r : result.requests) {
    if (r.first_token == 0) continue;
    const auto first = static_cast<size_t>(std::ceil(r.first_token / kBucket - 0.5));
    for (size_t i = first; i < out.size(); ++i) {
      if ((static_cast<double>(i) + 0.5) * kBucket > r.last_token) break;
      ++out[i];
    }
  }
  return out;
}

nlohmann::json DetailsOf(const PhaseStats& s, const LoadResult& result, size_t number) {
  const LoadResult::PhaseTimes& times = result.phases[number];
  return {{"name", s.name},
          {"begin_seconds", times.begin},
          {"end_seconds", times.end},
          {"requests_per_second_offered", times.rate},
          {"seconds", s.seconds},
          {"came", s.came},
          {"done", s.done},
          {"refused", s.refused},
          {"failed", s.failed},
          {"refusals", s.refusals},
          {"refusals_without_retry_info", s.refusals_without_retry_info},
          {"longest_retry_delay_seconds", s.longest_retry_delay},
          {"errors", s.errors},
          {"messages", s.messages},
          {"tokens", s.tokens},
          {"requests_per_second", s.requests_per_second},
          {"good_per_second", s.good_per_second},
          {"good_share", s.good_share},
          {"tokens_per_second", s.tokens_per_second},
          {"tokens_per_second_slices", Json(s.slices)},
          {"ingest_seconds", Json(s.ingest)},
          {"ttft_seconds", Json(s.ttft)},
          {"tpot_seconds", Json(s.tpot)},
          {"itl_seconds", Json(s.itl)},
          {"latency_seconds", Json(s.latency)}};
}

std::string TableOf(const PhaseStats& s, const ServiceLevel& bounds) {
  std::string out =
      absl::StrFormat("\n%s: %.1f s, %d requests came, %d done, %d refused, %d failed\n", s.name,
                      s.seconds, s.came, s.done, s.refused, s.failed);
  absl::StrAppendFormat(
      &out, "  %.1f tokens/s (10th-90th percentile of its slices %.1f-%.1f), %.2f requests/s\n",
      s.tokens_per_second, s.slices.p10, s.slices.p90, s.requests_per_second);
  if (bounds.ttft_seconds > 0 || bounds.itl_seconds > 0) {
    absl::StrAppendFormat(&out, "  goodput %.2f requests/s, %.1f %% of the requests that came\n",
                          s.good_per_second, 100 * s.good_share);
  }
  if (s.refusals > 0) {
    absl::StrAppendFormat(&out,
                          "  %d refusals, %d of them without RetryInfo, delays up to %.2f s\n",
                          s.refusals, s.refusals_without_retry_info, s.longest_retry_delay);
  }
  for (const auto& [error, count] : s.errors) {
    absl::StrAppendFormat(&out, "  %d x %s: %s\n", count, error, s.messages.at(error));
  }
  absl::StrAppendFormat(&out, "  %-28s %9s %9s %9s %9s %9s %10s\n", "ms", "mean", "p50", "p90",
                        "p99", "max", "samples");
  absl::StrAppend(&out, Row("time to committed caches", s.ingest),
                  Row("time to first token", s.ttft), Row("time per output token", s.tpot),
                  Row("gap between tokens", s.itl), Row("whole request", s.latency));
  return out;
}

}  // namespace sluice::bench
