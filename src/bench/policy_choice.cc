#include "src/bench/policy_choice.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/base/nearest_name.h"

namespace sluice {

const std::vector<std::string>& PolicyNames() {
  static const auto* names = new std::vector<std::string>{
      "full", "scout", "recall", "recall-fetch-all", "hgca", "oracle", "ends", "random"};
  return *names;
}

absl::StatusOr<std::vector<std::string>> ParsePolicies(const std::string& text) {
  std::vector<std::string> out;
  for (const auto part : absl::StrSplit(text, ',')) {
    const std::string name(part);
    const std::vector<std::string>& known = PolicyNames();
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no policy '", name, "'", DidYouMean(name, known)));
    }
    if (std::find(out.begin(), out.end(), name) != out.end()) {
      return absl::InvalidArgumentError(absl::StrCat("'", name, "' is there twice"));
    }
    out.push_back(name);
  }
  return out;
}

PolicyOptions WithPolicy(PolicyOptions options, const std::string& name) {
  using Selector = PolicyOptions::Oracle::Selector;
  options.name = name;
  if (name == "recall-fetch-all") {
    options.name = "recall";
    options.recall.fetch_all = true;
  } else if (name == "ends" || name == "random") {
    options.name = "oracle";
    options.oracle.selector = name == "ends" ? Selector::kEnds : Selector::kRandom;
  }
  return options;
}

}  // namespace sluice
