// Unit tests of the simulator of decode steps: times between measured points, errors that name what
// is missing, sums that were worked out by hand, and what must rise with what.
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <numeric>

#include "src/bench/simulate/capacity.h"
#include "src/bench/simulate/misses.h"
#include "src/bench/simulate/operator_times.h"
#include "src/bench/simulate/simulate_options.h"
#include "src/bench/simulate/step_model.h"
#include "src/model/model_config.h"

namespace sluice::bench {
namespace {

using nlohmann::json;

constexpr char kModels[] = SLUICE_SOURCE_DIR "/configs/models/deepseek-v3.2-";

ModelConfig Ep32() { return *LoadModelConfig(std::string(kModels) + "ep32"); }

OperatorTimes Recorded() {
  return *OperatorTimes::Read(SLUICE_SOURCE_DIR "/tests/bench/simulate/h200_operators.json");
}

json OneCurve() {
  return json::parse(R"({"operator_times": {"geometry": {}, "constants": {"gap": {"value": 3}},
      "operators": {"a": {"axis": "rows", "points": [[1, 10], [5, 18], [9, 38]]}}}})");
}

// Returns the times of a machine on which every operator takes `us`, whatever it does.
OperatorTimes Flat(double us) {
  json root = json::parse(R"({"operator_times": {"constants": {}, "operators": {}}})");
  json& times = root["operator_times"];
  times["geometry"] = json::object();
  const OperatorTimes recorded = Recorded();
  for (const auto& [name, curve] : recorded.curves()) {
    times["operators"][name]["points"] = {{0, us}, {1e9, us}};
  }
  for (const char* name : {"fork_join_us", "step_gap_us", "translation_us", "layer_overhead_us"}) {
    times["constants"][name]["value"] = 0;
  }
  for (const char* name : {"beside_attention", "processors"}) {
    times["constants"][name]["value"] = 1;
  }
  times["constants"]["transfer_processors"]["value"] = 0;
  return *OperatorTimes::Parse(root, "flat");
}

StepShape Ess(int sequences, double misses) {
  StepShape shape;
  shape.sequences = sequences;
  shape.context = 32768;
  shape.ess = true;
  shape.misses = {misses};
  shape.places = 6656;
  return shape;
}

StepForecast Step(const ModelConfig& config, const OperatorTimes& times, const StepShape& shape) {
  const auto forecast = SimulateStep(config, times, /*extrapolate=*/true, shape);
  INFO(forecast.status().ToString());
  REQUIRE(forecast.ok());
  return *forecast;
}

TEST_CASE("a time between two points is on the line through them") {
  const OperatorTimes times = *OperatorTimes::Parse(OneCurve(), "f");
  TimeLookup look(&times, /*extrapolate=*/false);
  CHECK(look.Us("a", 1) == 10);
  CHECK(look.Us("a", 0.5) == 10);  // Below the first point it is the first point's.
  CHECK(look.Us("a", 2) == Approx(12));
  CHECK(look.Us("a", 5) == Approx(18));
  CHECK(look.Us("a", 8) == Approx(33));
  CHECK(look.Us("a", 9) == Approx(38));
  CHECK(look.Constant("gap") == 3);
  CHECK(look.status().ok());
  CHECK(look.extrapolated().empty());
}

TEST_CASE("a lookup names the operator and the range that it lacks, and keeps the first error") {
  const OperatorTimes times = *OperatorTimes::Parse(OneCurve(), "f");
  TimeLookup strict(&times, /*extrapolate=*/false);
  CHECK(strict.Us("a", 10) == 0);
  strict.Us("b", 1);
  CHECK(strict.status().code() == absl::StatusCode::kOutOfRange);
  CHECK(strict.status().message() ==
        "f: a is wanted at 10 (rows), but was measured from 1 to 9; measure it there, or give "
        "--extrapolate");
  TimeLookup lacks(&times, /*extrapolate=*/true);
  lacks.Us("b", 1);
  CHECK(lacks.status().message() == "f: there is no operator b");
  TimeLookup constant(&times, /*extrapolate=*/true);
  constant.Constant("c");
  CHECK(constant.status().message() == "f: there is no constant c");
  TimeLookup further(&times, /*extrapolate=*/true);
  CHECK(further.Us("a", 13) == Approx(58));  // The last line goes on: 5 us a row.
  CHECK(further.status().ok());
  CHECK(further.extrapolated() == std::set<std::string>{"a"});
}

TEST_CASE("a file of times that is not one is refused by the key") {
  const auto message = [](const char* pointer, const json& value) {
    json root = OneCurve();
    root[json::json_pointer(pointer)] = value;
    const auto times = OperatorTimes::Parse(root, "f");
    CHECK_FALSE(times.ok());
    return std::string(times.status().message());
  };
  CHECK(message("/operator_times", 1).find("f: expected operator_times") == 0);
  CHECK(message("/operator_times/geometry", 1).find("geometry") != std::string::npos);
  CHECK(message("/operator_times/constants/gap/value", "x").find("constants.gap: value") !=
        std::string::npos);
  const std::string points = "/operator_times/operators/a/points";
  for (const json& wrong : {json(1), json::array(), json{{1, 2}, {1, 3}}, json{{2, 2}, {1, 3}},
                            json{{1, -2}}, json{{1, 2, 3}}, json{{"x", 2}}}) {
    CHECK(message(points.c_str(), wrong).find("operators.a: points") != std::string::npos);
  }
  CHECK(OperatorTimes::Read("/nowhere.json").status().code() == absl::StatusCode::kNotFound);
}

TEST_CASE("times that were made point by point are read back as they are") {
  const ModelConfig config = Ep32();
  OperatorTimes made = OperatorTimes::Of("a machine", config);
  made.AddPoint("a", "rows", "this run", 8, 30);
  made.AddPoint("a", "rows", "this run", 1, 2);
  made.AddConstant("gap", 4, "a page");
  const json root = {{"details", {{"operator_times", made.Json()}}}};  // As a report has it.
  const auto read = OperatorTimes::Parse(root, "f");
  REQUIRE(read.ok());
  CHECK(read->machine() == "a machine");
  CHECK(read->CheckGeometry(config).ok());
  CHECK(read->Json() == [&] {
    json want = made.Json();
    want["constants"]["gap"]["source"] = "";  // Sources are for people.
    return want;
  }());
  TimeLookup look(&*read, /*extrapolate=*/false);
  CHECK(look.Us("a", 4.5) == Approx(16));
  CHECK(look.Constant("gap") == 4);
}

TEST_CASE("times are refused for a model of another geometry, by the dimension that differs") {
  const OperatorTimes times = Recorded();
  CHECK(times.CheckGeometry(Ep32()).ok());
  CHECK(times.CheckGeometry(*LoadModelConfig(std::string(kModels) + "ep16")).ok());
  ModelConfig other = Ep32();
  other.latent->q_rank = 1024;
  CHECK(times.CheckGeometry(other).message().find("q_rank is 1536, but the model has 1024") !=
        std::string::npos);
  CHECK(times.CheckGeometry(*LoadModelConfig(SLUICE_SOURCE_DIR "/configs/models/qwen3-8b"))
            .message()
            .find("latent caches and an indexer") != std::string::npos);
}

TEST_CASE("a step of full is the sum of its operators") {
  // Every operator takes 1 us. A layer has 7 products that nothing hides (input, index_q, absorb_v,
  // o, and either 2 dense ones, or 2 of the shared expert and 2 of experts), 3 norms, a RoPE and an
  // activation; queries (3 us) lie beside top-k (1 us); then logits and attention.
  const ModelConfig config = Ep32();
  StepShape shape;
  shape.sequences = 2;
  shape.context = 32768;
  const double before = 4 + 3 + 1 + 1 + 3 + 1;  // products, norms, RoPE, logits, queries, attention
  const double dense = before + 2 + 1;
  const double experts = before + 2 + 1 + 2 + 1 + 1;  // shared, silu, experts, silu, combine
  CHECK(Step(config, Flat(1), shape).us == Approx(3 * dense + 58 * experts + 2));
}

TEST_CASE("a step of ess is that of its schedules") {
  const ModelConfig config = Ep32();
  const OperatorTimes flat = Flat(1);
  StepShape full;
  full.sequences = 2;
  full.context = 32768;
  const double base = Step(config, flat, full).us;
  // Without a schedule a layer adds an append, UpdateResidency and a transfer to full's, and the
  // queries (3 us) lie beside nothing instead of beside top-k (1 us).
  StepShape shape = Ess(2, 10);
  shape.schedule = Overlap::kNone;
  CHECK(Step(config, flat, shape).us == Approx(base + 61 * (1 + 1 + 1 + 1)));
  // DA: the queries lie beside top-k and UpdateResidency, the transfer beneath attention.
  shape.schedule = Overlap::kDa;
  CHECK(Step(config, flat, shape).us == Approx(base + 61 * 1));
  CHECK(Step(config, flat, shape).schedules == std::array<int, 3>{0, 61, 0});
  // Two bytes a microsecond: a transfer of 2 x 10 entries takes 6,560 us, all but one of them seen.
  shape.link_bytes_per_s = 2e6;
  const StepForecast slow = Step(config, flat, shape);
  CHECK(slow.us == Approx(base + 61 * (1 + 6559)));
  CHECK(slow.transfer_us == Approx(61 * 6560));
  CHECK(slow.link_bytes == Approx(61 * 2 * 10 * 656));
  CHECK(slow.longest() == "transfer");
  shape.skip_transfers = true;
  CHECK(Step(config, flat, shape).transfer_us == 0);
}

TEST_CASE("the parts of a step are its time") {
  const StepForecast forecast = Step(Ep32(), Recorded(), Ess(76, 190));
  double sum = 0;
  for (const auto& [name, us] : forecast.parts) {
    CHECK(us >= 0);
    sum += us;
  }
  CHECK(sum == Approx(forecast.us));
  CHECK(std::accumulate(forecast.schedules.begin(), forecast.schedules.end(), 0) == 61);
}

TEST_CASE("more misses, rows, context or exchange never make a step shorter") {
  const ModelConfig config = Ep32();
  const OperatorTimes times = Recorded();
  for (const int sequences : {1, 2, 19, 76}) {
    double last = 0;
    for (double misses = 0; misses <= 2000; misses += 25) {
      const double us = Step(config, times, Ess(sequences, misses)).us;
      INFO(sequences << " sequences, " << misses << " misses");
      CHECK(us >= last - 1e-6);
      last = us;
    }
  }
  double last = 0;
  for (int sequences = 1; sequences < 200; ++sequences) {
    const double us = Step(config, times, Ess(sequences, 190)).us;
    INFO(sequences << " sequences");
    CHECK(us > last);
    last = us;
  }
  StepShape shape = Ess(8, 100);
  const double near = Step(config, times, shape).us;
  shape.context *= 4;
  CHECK(Step(config, times, shape).us > near);
  shape.context /= 4;
  shape.parallel.all_to_all_us = 10;
  CHECK(Step(config, times, shape).us == Approx(near + 58 * 10));
}

TEST_CASE("two batches hide an exchange that is shorter than half a layer") {
  const ModelConfig config = Ep32();
  const OperatorTimes flat = Flat(1);
  StepShape shape;
  shape.sequences = 4;
  shape.context = 32768;
  const double plain = Step(config, flat, shape).us;
  shape.parallel = {.all_to_all_us = 5, .all_to_all_row_us = 1, .two_batch = true};
  // Operators take as long with half of the rows, so two halves take twice as long and hide 5 + 2.
  const double both = Step(config, flat, shape).us;
  CHECK(both == Approx(2 * (plain - 2) + 2));
  // A layer with experts takes 20 us, so an exchange of 102 is seen for 82 of them.
  shape.parallel.all_to_all_us = 100;
  CHECK(Step(config, flat, shape).us == Approx(both + 58 * (102 - 20)));
}

TEST_CASE("drafts: tokens of a step, rows, and the draft layer") {
  CHECK(TokensOfStep(0, 0.7) == 1);
  CHECK(TokensOfStep(1, 0.7) == Approx(1.7));
  CHECK(TokensOfStep(3, 0.5) == Approx(1 + 0.5 + 0.25 + 0.125));
  CHECK(TokensOfStep(3, 1) == 4);
  StepShape shape;
  shape.sequences = 4;
  shape.drafts = 2;
  shape.context = 32768;
  const StepForecast forecast = Step(Ep32(), Flat(1), shape);
  // Two drafts, each a layer with experts and a head with its sampling.
  CHECK(forecast.parts.at("drafts") == Approx(2 * (20 + 2)));
  CHECK(shape.rows() == 12);
}

TEST_CASE("experts that are read") {
  CHECK(ExpertsRead(8, 8, 1) == Approx(8));
  CHECK(ExpertsRead(16, 8, 1) == Approx(8));
  CHECK(ExpertsRead(16, 8, 2) == Approx(12));
  CHECK(ExpertsRead(16, 8, 100) == Approx(16));
}

TEST_CASE("a shape that was not measured is refused") {
  StepShape shape = Ess(1, 0);
  shape.context = 1000;
  CHECK(SimulateStep(Ep32(), Recorded(), true, shape).status().code() ==
        absl::StatusCode::kInvalidArgument);
  shape = Ess(0, 0);
  CHECK(SimulateStep(Ep32(), Recorded(), true, shape).status().code() ==
        absl::StatusCode::kInvalidArgument);
  const auto far = SimulateStep(Ep32(), Recorded(), false, Ess(129, 0));
  CHECK(far.status().code() == absl::StatusCode::kOutOfRange);
  CHECK(far.status().message().find("is wanted at 129") != std::string::npos);
}

TEST_CASE("misses are spread from least to most with the given mean") {
  for (const double mean : {120.0, 189.0, 300.0}) {
    const std::vector<double> misses = SpreadMisses(mean, 21, 572, 8);
    CHECK(misses.front() == 21);
    CHECK(misses.back() == Approx(572));
    CHECK(std::accumulate(misses.begin(), misses.end(), 0.0) / 8 == Approx(mean).epsilon(1e-3));
    CHECK(std::is_sorted(misses.begin(), misses.end()));
  }
  for (const double each : SpreadMisses(80, 80, 80, 8)) CHECK(each == 80);
}

TEST_CASE("drawn selections miss less with more places, and more where topics move faster") {
  DrawnSelections options;
  options.context = 4096;
  options.top_k = 256;
  options.places = 320;
  options.steps = 24;
  options.paths = 4;
  const auto few = DrawnMisses(options);
  REQUIRE(few.ok());
  options.places = 1600;
  const auto many = DrawnMisses(options);
  REQUIRE(many.ok());
  REQUIRE(few->size() == 4);
  for (size_t path = 0; path < few->size(); ++path) CHECK((*many)[path] <= (*few)[path]);
  CHECK(few->front() < few->back());
  CHECK(few->back() < 256);
  CHECK(*DrawnMisses(options) == *many);  // Draws repeat.
  options.rows = 2;
  const auto both = DrawnMisses(options);
  REQUIRE(both.ok());
  for (size_t path = 0; path < both->size(); ++path) {
    CHECK((*both)[path] >= (*many)[path]);            // A step's two rows are one union,
    CHECK((*both)[path] <= 2.3 * (*many)[path] + 5);  // which misses about what two steps would.
  }
  const std::vector<double> layers = MissesByLayer(*many, 9);
  CHECK(layers[0] == (*many)[0]);
  CHECK(layers[8] == layers[4]);
  CHECK(layers[4] == layers[0]);
}

TEST_CASE("selections that no pool could hold are refused") {
  DrawnSelections options;
  options.context = 4096;
  options.top_k = 256;
  options.places = 200;
  CHECK(DrawnMisses(options).status().code() == absl::StatusCode::kInvalidArgument);
  options.places = 1024;
  options.rows = 5;
  CHECK(DrawnMisses(options).status().code() == absl::StatusCode::kInvalidArgument);
  options.rows = 4;
  options.places = 257;
  CHECK(DrawnMisses(options).status().message().find("select more than 257") != std::string::npos);
  options.rows = 1;
  options.context = 260;
  CHECK(DrawnMisses(options).status().code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("capacity is that of the measured runs' pools") {
  // measured.md: 26 of full and 78 of ess at 32K under 40,200 MiB, 5 and 19 at 128K under 30,300.
  const ModelConfig config = Ep32();
  CapacityAsk ask;
  ask.context = 32768;
  ask.hbm_bytes = int64_t{40200} << 20;
  ask.dram_bytes = int64_t{108} << 30;
  CHECK(CapacityOf(config, ask)->sequences == 26);
  ask.ess = true;
  CHECK(CapacityOf(config, ask)->sequences == 78);
  CHECK(CapacityOf(config, ask)->bound == "HBM");
  CHECK(CapacityOf(config, ask)->places == 6560);
  ask.hbm_bytes = int64_t{90} << 30;
  CHECK(CapacityOf(config, ask)->sequences == 88);
  CHECK(CapacityOf(config, ask)->bound == "DRAM");
  ask.ratio = 1;
  CHECK(CapacityOf(config, ask)->whole);
  ask.ratio = 0.1;
  ask.context = 131072;
  ask.hbm_bytes = int64_t{30300} << 20;
  CHECK(CapacityOf(config, ask)->sequences == 19);
  ask.draft_layers = 1;  // A draft layer's caches are 0.1 GB of such a sequence's 1.6.
  CHECK(CapacityOf(config, ask)->sequences == 18);
  ask.ess = false;
  ask.draft_layers = 0;
  CHECK(CapacityOf(config, ask)->sequences == 5);
}

TEST_CASE("misses on the command line") {
  CHECK(ParseMisses("80")->size() == 8);
  CHECK(ParseMisses("80")->front() == 80);
  CHECK(ParseMisses("189:21:572")->back() == Approx(572));
  CHECK(ParseMisses("drawn")->empty());
  CHECK(ParseMisses("profile.json")->empty());
  for (const char* wrong : {"1:2", "1:2:3", "-1", "5:1:2", "1:2:3:4"}) {
    INFO(wrong);
    CHECK_FALSE(ParseMisses(wrong).ok());
  }
}

}  // namespace
}  // namespace sluice::bench
