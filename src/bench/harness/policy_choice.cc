#include "src/bench/harness/policy_choice.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "src/base/nearest_name.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/policy_settings.h"
#include "src/bench/harness/synthetic_predictor.h"

namespace sluice::bench {
namespace {

using Overlap = PolicyOptions::Ess::Overlap;
using Selector = PolicyOptions::Oracle::Selector;
using Refill = PolicyOptions::Clo::Refill;

constexpr char kMeanSelection[] = "hgca-mean";
constexpr char kAuto[] = "auto";

struct Preset {
  const char* name;
  const char* policy;
  void (*apply)(PolicyOptions&);
};
// Takes the codes and the scores that HATA has.
void SelectAsPublished(PolicyOptions& o) {
  o.clo.hash_levels = 1;
  if (o.clo.hash.empty()) o.clo.hash_bits = 256;
  o.clo.centred = false;
  o.reduction = kernels::GroupReduction::kMean;
}

// Lets every head select in every step, of a cache that lies wholly in HBM.
void SelectEachStepInHbm(PolicyOptions& o) {
  o.clo.reuse = o.clo.persistent_ahead = false;
  o.clo.persistent_share = 1;
}

void PredictSynthetically(PolicyOptions& o) {
  SyntheticPredictorOptions of;
  of.layers = o.hbm->layout().layers;
  of.heads = o.heads;
  of.kv_heads = o.hbm->layout().kinds[0].heads;
  of.tokens = o.max_context;
  o.fluxion.predictor = SyntheticPredictor(of);
}

// Has digests in DRAM, and no block in HBM for being selected often.
void PlaceAsPublished(PolicyOptions& o) {
  o.fluxion.resident = false;
  o.fluxion.digests_in_dram = true;
  o.fluxion.all_levels = true;
}

constexpr Preset kPresets[] = {
    {"full", "full", [](PolicyOptions&) {}},
    {"scout", "scout", [](PolicyOptions&) {}},
    {"scout-paper", "scout",
     [](PolicyOptions& o) {
       o.scout.attend_whole = o.scout.key_codes = o.scout.drift = false;
       o.rehearsals = 0;
     }},
    {"scout-no-ahead", "scout", [](PolicyOptions& o) { o.scout.layer_ahead = false; }},
    {"scout-no-recall", "scout", [](PolicyOptions& o) { o.scout.recall = false; }},
    {"scout-no-ahead-no-recall", "scout",
     [](PolicyOptions& o) { o.scout.layer_ahead = o.scout.recall = false; }},
    {"recall", "recall", [](PolicyOptions&) {}},
    {"recall-paper", "recall",
     [](PolicyOptions& o) {
       o.recall.fetch_all = true;
       o.recall.drift = false;
       o.rehearsals = 0;
       o.recall.margin = 4.5f;  // the alpha that the paper gives for most models
     }},
    {"recall-fetch-all", "recall", [](PolicyOptions& o) { o.recall.fetch_all = true; }},
    {"clo", "clo", [](PolicyOptions&) {}},
    {"clo-paper", "clo",
     [](PolicyOptions& o) {
       o.clo.refill = Refill::kReplace;
       o.clo.refresh = o.clo.drift = o.clo.early = o.clo.persistent_ahead = false;
       o.rehearsals = 0;
       SelectAsPublished(o);
     }},
    {"clo-fetch-all", "clo",
     [](PolicyOptions& o) {
       o.clo.reuse = false;
       o.clo.refill = Refill::kReplace;
     }},
    {"lru", "clo",
     [](PolicyOptions& o) {
       o.clo.reuse = false;
       o.clo.resident_share = 0.3;
     }},
    {"hata", "clo", SelectEachStepInHbm},
    {"hata-paper", "clo",
     [](PolicyOptions& o) {
       SelectEachStepInHbm(o);
       SelectAsPublished(o);
     }},
    {"fluxion", "fluxion", [](PolicyOptions&) {}},
    {"fluxion-hbm-digests", "fluxion", [](PolicyOptions& o) { o.fluxion.resident = false; }},
    {"fluxion-synthetic", "fluxion", PredictSynthetically},
    {"fluxion-paper", "fluxion", PlaceAsPublished},
    {"fluxion-paper-fixed", "fluxion",
     [](PolicyOptions& o) {
       PlaceAsPublished(o);
       o.fluxion.fixed_block = 16;
     }},
    {"fluxion-fixed", "fluxion",
     [](PolicyOptions& o) {
       o.fluxion.resident = false;
       o.fluxion.fixed_block = 16;
     }},
    {"hgca", "hgca", [](PolicyOptions&) {}},
    {kMeanSelection, "hgca", [](PolicyOptions&) {}},
    {"oracle", "oracle", [](PolicyOptions&) {}},
    {"oracle-digest", "oracle", [](PolicyOptions& o) { o.oracle.selector = Selector::kDigest; }},
    {"ends", "oracle", [](PolicyOptions& o) { o.oracle.selector = Selector::kEnds; }},
    {"random", "oracle", [](PolicyOptions& o) { o.oracle.selector = Selector::kRandom; }},
    {"ess", "ess", [](PolicyOptions&) {}},
    {"ess-no-overlap", "ess", [](PolicyOptions& o) { o.ess.overlap = Overlap::kNone; }},
    {"ess-da", "ess", [](PolicyOptions& o) { o.ess.overlap = Overlap::kDa; }},
    {"ess-dba", "ess", [](PolicyOptions& o) { o.ess.overlap = Overlap::kDba; }},
    {"ess-no-warm-up", "ess", [](PolicyOptions& o) { o.ess.warm_up = false; }},
    {"ess-no-lru", "ess", [](PolicyOptions& o) { o.ess.lru = false; }},
    {"offload-naive", "offload-naive", [](PolicyOptions&) {}},
    {kAuto, kAuto, [](PolicyOptions&) {}},
};

const Preset* PresetOf(absl::string_view name) {
  for (const Preset& preset : kPresets) {
    if (name == preset.name) return &preset;
  }
  return nullptr;
}

// One setting of a name, such as "budget=20%".
struct Given {
  const PolicySetting* setting = nullptr;
  double value = 0;
  bool percent = false;
};
absl::StatusOr<Given> ParseSetting(const Preset& preset, absl::string_view part) {
  const std::pair<std::string, std::string> sides = absl::StrSplit(part, absl::MaxSplits('=', 1));
  const std::string of = preset.policy == std::string("offload-naive") ? "ess" : preset.policy;
  Given given;
  for (const PolicySetting& setting : AllPolicySettings()) {
    if (sides.first != setting.key) continue;
    // Two policies may have a setting of the same name.
    if (given.setting == nullptr || setting.policy == of) given.setting = &setting;
  }
  if (given.setting == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("'", std::string(part), "' sets '", sides.first,
                                                   "', which no policy has",
                                                   DidYouMean(sides.first, PolicySettings())));
  }
  const std::string policy = given.setting->policy;
  // The model determines the tokens that full and ess attend to.
  const bool has = policy.empty() ? of != "full" && of != "ess" && of != kAuto
                                  : policy == of || policy == preset.name;
  if (!has) {
    return absl::InvalidArgumentError(
        absl::StrCat("policy ", preset.name, " has no '", sides.first, "'"));
  }
  const absl::string_view words = given.setting->words;
  if (!words.empty()) {
    const std::vector<std::string> all = absl::StrSplit(words, ',');
    const auto word = std::find(all.begin(), all.end(), sides.second);
    if (word == all.end()) {
      return absl::InvalidArgumentError(absl::StrCat("'", std::string(part), "': ", sides.first,
                                                     " takes ", absl::StrJoin(all, ", ")));
    }
    given.value = static_cast<double>(word - all.begin());
    return given;
  }
  absl::string_view value = sides.second;
  given.percent = sides.first == "budget" && absl::ConsumeSuffix(&value, "%");
  const bool number = absl::SimpleAtod(value, &given.value) && given.value >= 0;
  const bool whole =
      given.value >= 1 && given.value < 1 << 30 && given.value == static_cast<int>(given.value);
  if (!number || (given.setting->whole && !whole) || (given.percent && given.value > 100)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", std::string(part), "': ", sides.first, " takes ",
                     given.setting->whole ? "a whole number" : "a number"));
  }
  return given;
}

}  // namespace

const std::vector<std::string>& PolicyNames() {
  static const auto* names = [] {
    auto* out = new std::vector<std::string>;
    for (const Preset& preset : kPresets) out->push_back(preset.name);
    return out;
  }();
  return *names;
}

const std::vector<std::string>& PolicySettings() {
  static const auto* names = [] {
    auto* out = new std::vector<std::string>;
    for (const PolicySetting& setting : AllPolicySettings()) out->push_back(setting.key);
    return out;
  }();
  return *names;
}

absl::StatusOr<std::vector<std::string>> ParsePolicies(const std::string& text) {
  std::vector<std::string> out;
  for (const auto part : absl::StrSplit(text, ',')) {
    const std::string name(part);
    const std::vector<std::string> pieces = absl::StrSplit(name, ':');
    const Preset* const preset = PresetOf(pieces[0]);
    if (preset == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("there is no policy '", pieces[0], "'",
                                                     DidYouMean(pieces[0], PolicyNames())));
    }
    for (size_t i = 1; i < pieces.size(); ++i) {
      SLUICE_RETURN_IF_ERROR(ParseSetting(*preset, pieces[i]).status());
    }
    if (std::find(out.begin(), out.end(), name) != out.end()) {
      return absl::InvalidArgumentError(absl::StrCat("'", name, "' is given twice"));
    }
    out.push_back(name);
  }
  return out;
}

PolicyOptions WithPolicy(PolicyOptions options, const std::string& name) {
  const std::vector<std::string> pieces = absl::StrSplit(name, ':');
  const Preset* const preset = PresetOf(pieces[0]);
  SLUICE_CHECK(preset != nullptr);
  options.name = preset->policy;
  preset->apply(options);
  for (size_t i = 1; i < pieces.size(); ++i) {
    const absl::StatusOr<Given> given = ParseSetting(*preset, pieces[i]);
    SLUICE_CHECK(given.ok());
    given->setting->apply(options,
                          given->percent ? given->value / 100 * options.max_context : given->value);
  }
  return options;
}

bool IsAuto(const std::string& name) { return name == kAuto; }

bool WantsMeanSelection(const std::string& name) {
  return name == kMeanSelection || absl::StartsWith(name, absl::StrCat(kMeanSelection, ":"));
}

}  // namespace sluice::bench
