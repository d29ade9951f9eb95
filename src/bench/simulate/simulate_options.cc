#include "src/bench/simulate/simulate_options.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/bench/simulate/misses.h"
#include "src/config/units.h"

namespace sluice::bench {
namespace {

constexpr char kAbout[] =
    R"(Forecasts decode steps of a DeepSeek-V3.2 rank under the policies full and ess from the measured times of
single operators, without a GPU. Everything that it prints is a forecast.

A step is the sum of its operators' times in the order in which the model enqueues them. Operators on parallel
branches count as the longest branch and a fork and a join. The layers of policy ess get the schedule that the
engine would choose (src/attention/policies/ess/schedule.h), and that arithmetic says how much of a transfer it
hides. Times between two measured points are on the line through them; above the last one the command fails
and names the operator and its range, or goes on along the last line with --extrapolate, and says so.

--operators names a report of sluice-bench kernels --only step, made on the machine to be simulated, or a file
of the same form. tests/bench/simulate/h200_operators.json is made from this project's pages about an H200.

Without --batches the largest batch that --hbm-bytes and --dram-bytes hold is simulated, else each that fits.
--misses says how many entries a sequence misses in each layer and step:
  drawn            draws the selections of the topic-drift workload and runs them through the LRU of policy ess;
                   the rows of a sequence's drafts are one union (takes seconds to a minute)
  FILE             takes the nearest point of a policy profile (sluice-profile)
  MEAN             the same in every layer, for each sequence and step, however many drafts there are
  MEAN:LEAST:MOST  eight kinds of layers between LEAST and MOST

The columns are
  batch        sequences; * marks the largest that fits
  ms           of a step
  tokens/s     of the whole rank; with drafts, each accepted with the stated probability on its own until the
               first is refused, their rows in the same step and their draft layer in HBM
  x full       over the tokens/s of full at its last batch in the table
  misses       mean of the layers, of a sequence and step
  GB           over the link in a step
  products ... share of the step: products with the dense experts' ones, routed experts, attention, the indexer
               (logits and top-k), the part of transfers that nothing hides, and the rest
  layers       how many get no overlap, DA and DBA
  longest      the part that takes most, and the memory that ends the batch
)";

constexpr char kExamples[] =
    R"(  sluice-bench simulate --operators tests/bench/simulate/h200_operators.json \
      --model configs/models/deepseek-v3.2-ep32 --batches 1,8,26,76 --misses 189:21:572
  sluice-bench simulate --operators O --model M --hbm-bytes 90GiB --dram-bytes 1TiB --extrapolate
  sluice-bench simulate --operators O --model M --batches 52,160 --drafts 1 --acceptance 0.7 --two-batch \
      --all-to-all-us 60 --all-to-all-row-us 1 --extrapolate
)";

absl::Status ParseAssignment(const std::string& text, double least,
                             std::vector<std::pair<std::string, double>>* out) {
  const std::vector<std::string> parts = absl::StrSplit(text, '=');
  double value = 0;
  if (parts.size() != 2 || parts[0].empty() || !absl::SimpleAtod(parts[1], &value) ||
      !(value >= least) || value > 1e9) {
    return absl::InvalidArgumentError(
        absl::StrCat("takes NAME=NUMBER with a number from ", least, " up, but is '", text, "'"));
  }
  out->emplace_back(parts[0], value);
  return absl::OkStatus();
}

std::function<absl::Status(const std::string&)> BytesInto(int64_t* out) {
  return [out](const std::string& text) -> absl::Status {
    const std::optional<uint64_t> bytes = ParseBytes(text);
    if (!bytes.has_value() || *bytes == 0 || *bytes > uint64_t{1} << 50) {
      return absl::InvalidArgumentError(
          absl::StrCat("takes an amount of memory such as 90GiB, but is '", text, "'"));
    }
    *out = static_cast<int64_t>(*bytes);
    return absl::OkStatus();
  };
}

absl::Status ParsePolicyList(const std::string& text, std::vector<std::string>* out) {
  *out = absl::StrSplit(text, ',');
  for (size_t i = 0; i < out->size(); ++i) {
    const std::string& name = (*out)[i];
    const bool known = name == "full" || name == "ess";
    if (known && std::count(out->begin(), out->begin() + static_cast<int64_t>(i), name) == 0) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("takes full, ess or both, each once, but is '", text, "'"));
  }
  return absl::OkStatus();
}

void Declare(SimulateOptions* o, std::string* schedule, Flags* flags) {
  flags->Text("operators", "FILE", "times of operators", &o->operators);
  flags->Text("model", "DIR", "directory with config.json of the rank", &o->model);
  flags->Repeated("policies", "LIST", "full, ess, or both (default full,ess)",
                  [o](const std::string& text) { return ParsePolicyList(text, &o->policies); });
  flags->Integers("contexts", "tokens of each sequence", 2048, 1 << 20, &o->contexts);
  flags->Integers("batches", "sequences that decode together; without it the most that fit", 1,
                  4096, &o->batches);
  flags->Number("ratio", "policy ess: KV slots in HBM for each token", 0.001, 1, &o->ratio);
  flags->Integer("least-places", "policy ess: KV slots of a sequence and layer, at least", 2049,
                 1 << 20, &o->least_places);
  flags->Integer("block-tokens", "tokens in a KV block", 16, 1024, &o->block_tokens);
  flags->Integer("answer-tokens", "tokens of an answer, for which a sequence has room besides", 0,
                 1 << 20, &o->answer_tokens);
  flags->Repeated("hbm-bytes", "BYTES", "HBM for caches, weights not included",
                  BytesInto(&o->hbm_bytes));
  flags->Repeated("dram-bytes", "BYTES", "DRAM for the caches of running sequences",
                  BytesInto(&o->dram_bytes));
  flags->Text("misses", "HOW", "drawn, FILE, MEAN or MEAN:LEAST:MOST", &o->misses);
  flags->Choice("schedule", {"layer-wise", "none", "da", "dba"},
                "policy ess: the schedule of all layers", schedule);
  flags->Number("link-gb-per-s", "most that the link brings; 0: as the transfers were measured", 0,
                1000, &o->link_gb_per_s);
  flags->Integer("drafts", "tokens that a step drafts and verifies for each sequence", 0, 3,
                 &o->drafts);
  flags->Number("acceptance", "probability with which a draft is accepted", 0, 1, &o->acceptance);
  flags->Number("all-to-all-us", "dispatch and combine of a layer with experts, fixed part", 0, 1e6,
                &o->parallel.all_to_all_us);
  flags->Number("all-to-all-row-us", "the same, for each row of the rank", 0, 1e6,
                &o->parallel.all_to_all_row_us);
  flags->Switch("two-batch", "two halves of the batch take turns in computing and exchanging",
                &o->parallel.two_batch);
  flags->Switch("skip-transfers", "policy ess: fetch nothing, at the same misses",
                &o->skip_transfers);
  flags->Switch("extrapolate", "go on along the last line where more work was not measured",
                &o->extrapolate);
  flags->Repeated("scale", "PREFIX=FACTOR",
                  "multiply the times of operators whose names begin so, for another machine",
                  [o](const std::string& text) { return ParseAssignment(text, 1e-6, &o->scales); });
  flags->Repeated("constant", "NAME=VALUE", "set a constant of the file",
                  [o](const std::string& t) { return ParseAssignment(t, 0, &o->constants); });
  flags->File("json", "write the report as JSON; without FILE, to standard output", &o->json);
}

}  // namespace

std::optional<int> ReadSimulateOptions(const Invocation& invocation, SimulateOptions* o) {
  Flags flags("sluice-bench simulate", kAbout, kExamples);
  std::string schedule = "layer-wise";
  Declare(o, &schedule, &flags);
  if (const auto status = ReadFlags(flags, invocation)) return status;
  if (schedule == "none") o->schedule = Overlap::kNone;
  if (schedule == "da") o->schedule = Overlap::kDa;
  if (schedule == "dba") o->schedule = Overlap::kDba;
  if (o->operators.empty()) return Usage("--operators is missing");
  if (o->model.empty()) return Usage("--model is missing");
  if (o->batches.empty() && o->hbm_bytes == 0) return Usage("--batches or --hbm-bytes is missing");
  const bool ess = std::count(o->policies.begin(), o->policies.end(), "ess") > 0;
  if (ess && o->hbm_bytes > 0 && o->dram_bytes == 0) {
    return Usage("--hbm-bytes needs --dram-bytes, where policy ess has its entries");
  }
  if (const auto misses = ParseMisses(o->misses); !misses.ok()) {
    return Usage(absl::StrCat("--misses ", misses.status().message()));
  }
  return std::nullopt;
}

absl::StatusOr<std::vector<double>> ParseMisses(const std::string& text) {
  constexpr int kKinds = 8;  // The paths of the topic-drift workload.
  std::vector<double> values;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, ':'))) {
    double value = 0;
    if (!absl::SimpleAtod(part, &value)) return std::vector<double>{};
    values.push_back(value);
  }
  if (values.size() == 1) values = {values[0], values[0], values[0]};
  if (values.size() != 3 || !(values[1] >= 0) || !(values[1] <= values[0]) ||
      !(values[0] <= values[2]) || values[2] > 1e6) {
    return absl::InvalidArgumentError(absl::StrCat(
        "takes MEAN or MEAN:LEAST:MOST, 0 <= LEAST <= MEAN <= MOST, but is '", text, "'"));
  }
  return SpreadMisses(values[0], values[1], values[2], kKinds);
}

}  // namespace sluice::bench
