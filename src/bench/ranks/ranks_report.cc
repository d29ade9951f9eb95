#include "src/bench/ranks/ranks_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace sluice::bench {
namespace {

using nlohmann::json;

json ToJson(const Timing& t) {
  return {{"median", t.median}, {"low", t.low}, {"high", t.high}, {"samples", t.samples}};
}
Timing TimingFrom(const json& j) {
  Timing t;
  t.median = j.at("median");
  t.low = j.at("low");
  t.high = j.at("high");
  t.samples = j.at("samples");
  return t;
}

json ToJson(const RankStep& step) {
  return {{"policy", step.policy},
          {"overlap", step.overlap},
          {"sequences", step.sequences},
          {"step", ToJson(step.step)},
          {"quiet", ToJson(step.quiet)}};
}

std::string NameOf(int ranks, const json& step) {
  std::string name = absl::StrCat(ranks, ranks == 1 ? " rank" : " ranks", ", policy ",
                                  step.at("policy").get<std::string>(), ", ",
                                  step.at("sequences").get<int>(), " sequences");
  if (const int overlap = step.at("overlap"); overlap > 0) {
    absl::StrAppend(&name, ", halves from ", overlap);
  }
  return name;
}

}  // namespace

RankSays SayLines(const std::function<void(const std::string&)>& line) {
  RankSays say;
  say.shape = [line](const auto& shape) { line(json{{"shape", shape}}.dump()); };
  say.step = [line](const RankStep& step) { line(json{{"step", ToJson(step)}}.dump()); };
  say.trace = [line](const RankStep& step, const RankTrace& trace) {
    line(json{{"of", ToJson(step)},
              {"trace",
               {{"step_seconds", trace.step},
                {"collective_seconds", trace.collective},
                {"exposed_seconds", trace.exposed},
                {"exchange_seconds", trace.exchange},
                {"exchange_bytes", trace.exchange_bytes}}}}
             .dump());
  };
  return say;
}

absl::Status RanksReport::Add(int ranks, const std::string& line) {
  const json said = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (said.is_discarded()) return absl::InternalError(absl::StrCat("a rank said ", line));
  if (said.contains("shape")) AddShape(said.at("shape"));
  if (said.contains("step")) AddStep(ranks, said.at("step"));
  if (said.contains("trace")) AddTrace(ranks, said);
  return absl::OkStatus();
}

void RanksReport::AddShape(const json& shape) {
  if (begun_) return;
  begun_ = true;
  std::vector<std::pair<std::string, std::string>> first;
  for (const json& entry : shape) first.emplace_back(entry.at(0), entry.at(1));
  report_->shape.insert(report_->shape.begin(), first.begin(), first.end());
  print_(Preamble(*report_));
  print_(absl::StrFormat("\n%5s %-18s %7s %9s %10s %15s %10s %6s  %10s %6s\n", "ranks", "policy",
                         "overlap", "sequences", "ms a step", "10th-90th", "tokens/s", "x one",
                         "without ms", "share"));
}

void RanksReport::AddStep(int ranks, const json& said) {
  const Timing step = TimingFrom(said.at("step")), quiet = TimingFrom(said.at("quiet"));
  const std::string policy = said.at("policy");
  const int sequences = said.at("sequences");
  const double rate = sequences / step.median;
  const int64_t each = options_.experts() ? sequences / ranks : sequences;
  if (ranks == 1) alone_[{policy, each}] = rate;
  Figure figure = SecondsFigure(NameOf(ranks, said), step);
  figure.more = {{"tokens_per_second", rate}};
  std::string line = absl::StrFormat("%5d %-18s %7d %9d %10.3f %7.3f-%7.3f %10.1f", ranks, policy,
                                     said.at("overlap").get<int>(), sequences, step.median * 1e3,
                                     step.low * 1e3, step.high * 1e3, rate);
  const auto one = alone_.find({policy, each});
  if (one == alone_.end()) {
    absl::StrAppendFormat(&line, " %6s", "-");
  } else {
    figure.more.emplace_back("times_one_rank", rate / one->second);
    absl::StrAppendFormat(&line, " %6.2f", rate / one->second);
  }
  if (quiet.samples > 0) {
    const double share = 1 - quiet.median / step.median;
    figure.more.insert(figure.more.end(),
                       {{"without_operations_seconds", quiet.median}, {"operations_share", share}});
    absl::StrAppendFormat(&line, "  %10.3f %5.1f%%", quiet.median * 1e3, 100 * share);
  }
  print_(line + "\n");
  report_->figures.push_back(std::move(figure));
}

void RanksReport::AddTrace(int ranks, const json& said) {
  const std::string name = NameOf(ranks, said.at("of"));
  const json& trace = said.at("trace");
  json detail = trace;
  detail["name"] = name;
  report_->details["traces"].push_back(detail);
  const double step = trace.at("step_seconds"), all = trace.at("collective_seconds"),
               exposed = trace.at("exposed_seconds"), exchange = trace.at("exchange_seconds"),
               bytes = trace.at("exchange_bytes");
  std::string line = absl::StrFormat(
      "  traced, %s: %.3f ms a step; operations of the group %.3f ms (%.1f%%), with no other "
      "kernel "
      "beside them %.3f ms (%.1f%%)",
      name, step * 1e3, all * 1e3, 100 * all / step, exposed * 1e3, 100 * exposed / step);
  std::vector<std::pair<std::string, double>> more = {{"traced_step_seconds", step},
                                                      {"traced_share", all / step},
                                                      {"traced_exposed_share", exposed / step}};
  if (bytes > 0 && exchange > 0) {
    absl::StrAppendFormat(&line, "; exchanges send %.2f MB at %.1f GB/s", bytes * 1e-6,
                          bytes / exchange * 1e-9);
    more.emplace_back("exchange_bytes_per_second", bytes / exchange);
  }
  print_(line + "\n");
  const auto figure = std::find_if(report_->figures.begin(), report_->figures.end(),
                                   [&](const Figure& f) { return f.name == name; });
  if (figure != report_->figures.end()) {
    figure->more.insert(figure->more.end(), more.begin(), more.end());
  }
}

}  // namespace sluice::bench
