#include "src/bench/policies/quality.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice::bench {
namespace {

using nlohmann::json;

constexpr char kSchema[] = "sluice-texts/2";

std::vector<int32_t> ReadIds(const json& j, int vocab) {
  auto ids = j.get<std::vector<int32_t>>();
  for (const int32_t id : ids) {
    // Caught below like the library's own exceptions.
    if (id < 0 || id >= vocab)
      throw json::other_error::create(500, "an id past the vocabulary", &j);
  }
  return ids;
}

}  // namespace

StepLogits NormalizeLogits(absl::Span<const float> logits) {
  StepLogits out;
  const auto top = std::max_element(logits.begin(), logits.end());
  out.top = static_cast<int32_t>(top - logits.begin());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double{logit} - double{*top});
  const double log_sum = double{*top} + std::log(sum);
  out.log_probabilities.reserve(logits.size());
  for (const float logit : logits) {
    out.log_probabilities.push_back(static_cast<float>(double{logit} - log_sum));
  }
  return out;
}

void Distance::Add(const StepLogits& reference, const StepLogits& found, int32_t next) {
  ++steps_;
  agree_ += reference.top == found.top ? 1 : 0;
  for (size_t i = 0; i < reference.log_probabilities.size(); ++i) {
    const double p = reference.log_probabilities[i];
    kl_ += std::exp(p) * (p - double{found.log_probabilities[i]});
  }
  nll_ -= found.log_probabilities[static_cast<size_t>(next)];
  reference_nll_ -= reference.log_probabilities[static_cast<size_t>(next)];
}

void Distance::Add(const Distance& other) {
  steps_ += other.steps_;
  agree_ += other.agree_;
  kl_ += other.kl_;
  nll_ += other.nll_;
  reference_nll_ += other.reference_nll_;
}

double Distance::top1_agreement() const {
  return static_cast<double>(agree_) / static_cast<double>(steps_);
}
double Distance::mean_kl() const { return kl_ / static_cast<double>(steps_); }
double Distance::perplexity() const { return std::exp(nll_ / static_cast<double>(steps_)); }
double Distance::reference_perplexity() const {
  return std::exp(reference_nll_ / static_cast<double>(steps_));
}

absl::StatusOr<QualityTexts> ParseQualityTexts(const std::string& text, int vocab) {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object() || !root.contains("schema") || root["schema"] != kSchema) {
    return absl::InvalidArgumentError(absl::StrCat("is not a file of texts: \"schema\" must be \"",
                                                   kSchema, "\"; tools/sluice texts makes one"));
  }
  // The library reports missing fields and wrong types by exceptions, which do not leave this
  // function.
  try {
    QualityTexts out;
    for (const json& t : root.at("texts")) {
      out.texts.push_back({t.at("name").get<std::string>(), t.at("kind").get<std::string>(),
                           ReadIds(t.at("ids"), vocab)});
    }
    for (const json& p : root.at("passkeys")) {
      out.passkeys.push_back({p.at("name").get<std::string>(), p.at("kind").get<std::string>(),
                              p.at("variant").get<std::string>(), p.at("depth").get<double>(),
                              ReadIds(p.at("ids"), vocab), ReadIds(p.at("answer"), vocab)});
    }
    return out;
  } catch (const json::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat("does not match the schema: ", e.what()));
  }
}

absl::StatusOr<QualityTexts> ReadQualityTexts(const std::string& path, int vocab) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::strerror(errno)));
  std::ostringstream text;
  text << file.rdbuf();
  absl::StatusOr<QualityTexts> texts = ParseQualityTexts(text.str(), vocab);
  if (!texts.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " ", texts.status().message()));
  }
  return texts;
}

}  // namespace sluice::bench
