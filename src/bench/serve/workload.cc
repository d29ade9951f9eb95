#include "src/bench/serve/workload.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/base/nearest_name.h"
#include "src/base/status_macros.h"
#include "src/config/units.h"

namespace sluice::bench {
namespace {

constexpr int64_t kMostTokens = 1 << 24;

// Draws by Box and Muller; one of the two values is enough here.
double Normal(SplitMix64& random) {
  const double u = 1 - random.Uniform();  // (0, 1]
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * random.Uniform());
}

absl::Status Refuse(const std::string& key, const std::string& takes, const std::string& found) {
  return absl::InvalidArgumentError(
      absl::StrCat("'", key, "' takes ", takes, ", but is '", found, "'"));
}

}  // namespace

absl::StatusOr<Lengths> Lengths::Parse(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  const bool drawn = parts[0] == "lognormal";
  Lengths out;
  const auto bad = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("takes a number of tokens, or lognormal:MEDIAN:SIGMA with a sigma above 0 up "
                     "to 3, but is '",
                     text, "'"));
  };
  if (parts.size() != (drawn ? 3u : 1u)) return bad();
  if (!absl::SimpleAtoi(parts[drawn ? 1 : 0], &out.median) || out.median < 1 ||
      out.median > kMostTokens) {
    return bad();
  }
  if (drawn && !(absl::SimpleAtod(parts[2], &out.sigma) && out.sigma > 0 && out.sigma <= 3)) {
    return bad();
  }
  return out;
}

std::string Lengths::ToString() const {
  return sigma > 0 ? absl::StrCat("lognormal:", median, ":", sigma) : absl::StrCat(median);
}

int64_t Lengths::Draw(SplitMix64& random, int64_t most) const {
  double value = static_cast<double>(median);
  if (sigma > 0) value *= std::exp(sigma * Normal(random));
  return static_cast<int64_t>(std::clamp(std::round(value), 1.0, static_cast<double>(most)));
}

absl::StatusOr<Phase> Phase::Parse(const std::string& text) {
  Phase phase;
  const std::vector<std::string> keys = {"name",     "rate",    "concurrency",
                                         "requests", "seconds", "on-refusal"};
  for (const auto part : absl::StrSplit(text, ',')) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(part, absl::MaxSplits('=', 1));
    std::string value = pair.second;
    if (pair.first == "name") {
      phase.name = value;
    } else if (pair.first == "rate") {
      phase.rate_is_factor = !value.empty() && value.back() == 'x';
      if (phase.rate_is_factor) value.pop_back();
      if (!absl::SimpleAtod(value, &phase.rate) || !(phase.rate > 0 && phase.rate <= 1e6)) {
        return Refuse("rate", "requests/s, or 4x for 4 times those of the phase before",
                      pair.second);
      }
    } else if (pair.first == "concurrency" || pair.first == "requests") {
      int64_t& number = pair.first == "requests" ? phase.requests : phase.concurrency;
      if (!absl::SimpleAtoi(value, &number) || number < 1 || number > 100'000'000) {
        return Refuse(pair.first, "a whole number above 0", value);
      }
    } else if (pair.first == "seconds") {
      const std::optional<double> seconds = ParseSeconds(value);
      if (!seconds.has_value() || !(*seconds > 0)) {
        return Refuse("seconds", "a time, such as 30s or 3m", value);
      }
      phase.seconds = *seconds;
    } else if (pair.first == "on-refusal") {
      if (value != "retry" && value != "count") return Refuse(pair.first, "retry or count", value);
      phase.retry = value == "retry";
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("has no key '", pair.first, "'", DidYouMean(pair.first, keys)));
    }
  }
  if (phase.name.empty()) return absl::InvalidArgumentError("needs name=NAME");
  if (const absl::Status status = phase.Check(); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("'", phase.name, "' ", status.message()));
  }
  return phase;
}

absl::Status Phase::Check() const {
  if ((rate > 0) == (concurrency > 0)) {
    return absl::InvalidArgumentError("takes one of rate and concurrency");
  }
  if ((requests > 0) == (seconds > 0)) {
    return absl::InvalidArgumentError("takes one of requests and seconds");
  }
  return absl::OkStatus();
}

std::string Phase::ToString() const {
  return absl::StrCat(name, ":",
                      rate > 0 ? absl::StrCat("rate=", rate, rate_is_factor ? "x" : "")
                               : absl::StrCat("concurrency=", concurrency),
                      requests > 0 ? absl::StrCat(",requests=", requests)
                                   : absl::StrCat(",seconds=", FormatSeconds(seconds)),
                      ",on-refusal=", retry ? "retry" : "count");
}

Arrivals::Arrivals(const Phase& phase, const Lengths& prompt, const Lengths& output, int64_t most,
                   uint64_t seed)
    : phase_(phase), prompt_(prompt), output_(output), most_(most), times_(seed), lengths_(~seed) {}

PlannedRequest Arrivals::Next() {
  PlannedRequest request;
  if (phase_.rate > 0) at_ += -std::log(1 - times_.Uniform()) / phase_.rate;
  request.at = at_;
  request.prompt = prompt_.Draw(lengths_, most_ - 1);
  request.output = output_.Draw(lengths_, most_ - request.prompt);
  request.seed = lengths_();
  return request;
}

}  // namespace sluice::bench
