#include "src/attention/policy_profile.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "src/attention/policies/clo/head_thresholds.h"
#include "tests/fixtures/fixtures.h"

namespace sluice {
namespace {

using nlohmann::json;

const std::string kFingerprint(64, 'a');
constexpr int kLayers = 3, kKvHeads = 2, kHeadDim = 16, kRank = 4;

PolicyProfile Profile() {
  PolicyProfile profile;
  profile.model_fingerprint = kFingerprint;
  profile.block_tokens = 16;
  profile.budget_tokens = 256;
  profile.share_limit = 0.12;
  profile.layers = {{0, {}}, {7, {0.04, 0.1, 0.13}}, {1, {0.3}}};
  profile.projection = {kLayers, kKvHeads, kHeadDim, kRank, {}};
  for (int i = 0; i < kLayers * kKvHeads * kHeadDim * kRank; ++i) {
    profile.projection.values.push_back(0.1f * static_cast<float>(i % 77) - 3);
  }
  profile.hash = {kLayers, kKvHeads, kHeadDim, 64, {}};
  for (int i = 0; i < kLayers * kKvHeads * kHeadDim * 64; ++i) {
    profile.hash.values.push_back(0.01f * static_cast<float>(i % 91) - 0.4f);
  }
  profile.hgca = {512, 0.99, kKvHeads, {0.5f, 0, 1, 2, 0.125f, 3}};
  profile.margins = {kRank, 0.99, {8, 0.0625f, 12.5f}};
  // Two query heads for each KV head.
  profile.clo = {kKvHeads,
                 {1, 1, 1, 0.5f, 0, 0, 0.25f, 1, 0, 1, 0.125f, 0},
                 {0.5f, 0.75f, 1, -0.25f, 0.5f, 0},
                 {0.25f, 0, 0.125f, 1, 0.5f, 0.75f},
                 2.5,
                 {1, 0.875f, -0.5f}};
  profile.misses.points = {{32768, 0.2, 4, {17, 100.5, 605}}, {131072, 0.1, 20, {0, 1, 2}}};
  profile.misses.rates.device = "cuda";
  profile.misses.rates.transfer = {8, 0.015};
  profile.misses.rates.index = {20, 0.00004};
  profile.misses.rates.branch_us = 2.5;
  return profile;
}

// A node of that model, for ApplyPolicyProfile.
struct Model {
  Model() {
    CacheKind kv;
    kv.name = "kv";
    kv.heads = kKvHeads;
    kv.block_tokens = 16;
    kv.SetEqualParts(2, 2 * kHeadDim * 2);
    layout = {kLayers, {kv}};
    options.budget_tokens = 256;
    options.dense_layers = 1;
  }
  absl::Status Apply(const PolicyProfile& profile, const std::string& fingerprint) {
    return ApplyPolicyProfile(profile, fingerprint, layout, &options);
  }
  CacheLayout layout;
  PolicyOptions options;
};

void CheckSays(const absl::Status& status, const std::string& words) {
  INFO(std::string(status.message()));
  CHECK_FALSE(status.ok());
  CHECK_THAT(std::string(status.message()), Catch::Matchers::Contains(words));
}

// Returns the error of a profile whose JSON was changed.
absl::Status Changed(const std::function<void(json&)>& change) {
  const fixtures::TempDir dir;
  const std::string path = dir.File("p.json");
  REQUIRE(WritePolicyProfile(Profile(), path).ok());
  json root = json::parse(*fixtures::ReadFile(path));
  change(root);
  REQUIRE(fixtures::WriteFile(path, root.dump()).ok());
  return ReadPolicyProfile(path).status();
}

// Returns the error of a profile whose projection's bytes were changed.
absl::Status ChangedProjection(const std::function<void(std::string&)>& change) {
  const fixtures::TempDir dir;
  const std::string path = dir.File("p.json");
  REQUIRE(WritePolicyProfile(Profile(), path).ok());
  std::string bytes = *fixtures::ReadFile(ProjectionPath(path));
  change(bytes);
  REQUIRE(fixtures::WriteFile(ProjectionPath(path), bytes).ok());
  return ReadPolicyProfile(path).status();
}

}  // namespace

TEST_CASE("a profile is read as it was written") {
  const fixtures::TempDir dir;
  const PolicyProfile written = Profile();
  REQUIRE(WritePolicyProfile(written, dir.File("p.json")).ok());
  const auto read = ReadPolicyProfile(dir.File("p.json"));
  INFO(std::string(read.status().message()));
  REQUIRE(read.ok());
  CHECK(read->model_fingerprint == written.model_fingerprint);
  CHECK(read->block_tokens == 16);
  CHECK(read->budget_tokens == 256);
  CHECK(read->share_limit == 0.12);
  REQUIRE(read->misses.points.size() == 2);
  CHECK(read->misses.points[0].context == 32768);
  CHECK(read->misses.points[0].ratio == 0.2);
  CHECK(read->misses.points[0].batch == 4);
  CHECK(read->misses.points[0].by_layer == std::vector<double>{17, 100.5, 605});
  CHECK(read->misses.points[1].by_layer == std::vector<double>{0, 1, 2});
  CHECK(read->misses.rates.device == "cuda");
  CHECK(read->misses.rates.transfer.fixed_us == 8);
  CHECK(read->misses.rates.transfer.each_us == 0.015);
  CHECK(read->misses.rates.index.each_us == 0.00004);
  CHECK(read->misses.rates.attend.fixed_us == 0);
  CHECK(read->misses.rates.branch_us == 2.5);
  REQUIRE(read->layers.size() == written.layers.size());
  for (size_t i = 0; i < read->layers.size(); ++i) {
    CHECK(read->layers[i].interval == written.layers[i].interval);
    CHECK(read->layers[i].shares == written.layers[i].shares);
  }
  CHECK(read->projection.columns == kRank);
  CHECK(read->projection.values == written.projection.values);
  CHECK(read->hash.columns == 64);
  CHECK(read->hash.values == written.hash.values);
  CHECK(read->hgca.window_tokens == 512);
  CHECK(read->hgca.share == 0.99);
  CHECK(read->hgca.kv_heads == kKvHeads);
  CHECK(read->hgca.betas == written.hgca.betas);
  CHECK(read->clo.kv_heads == kKvHeads);
  CHECK(read->clo.gates == written.clo.gates);
  CHECK(read->clo.similarities == written.clo.similarities);
  CHECK(read->clo.misses == written.clo.misses);
  CHECK(read->clo.prefetchable == written.clo.prefetchable);
  CHECK(read->clo.predicted == written.clo.predicted);
  CHECK(read->margins.rank == kRank);
  CHECK(read->margins.share == 0.99);
  CHECK(read->margins.by_layer == written.margins.by_layer);
}

TEST_CASE("gates and similarities go to policy clo as thresholds and difficulties") {
  Model model;
  model.options.heads = 2 * kKvHeads;
  REQUIRE(model.Apply(Profile(), kFingerprint).ok());
  const PolicyOptions::Clo& clo = model.options.clo;
  CHECK(clo.importance == Profile().clo.gates);
  CHECK(clo.misses == Profile().clo.misses);
  CHECK(clo.prefetchable == 2.5);
  CHECK(clo.predicted == Profile().clo.predicted);
  CHECK(clo.hash == Profile().hash.values);
  CHECK(clo.hash_bits == 64);
  // A KV head has the largest gate of its query heads.
  REQUIRE(clo.thresholds.size() == 6);
  const float gates[] = {1, 1, 0, 1, 1, 0.125f};
  for (size_t i = 0; i < 6; ++i) {
    CHECK(clo.thresholds[i] == ThresholdOf(double{gates[i]}, double{clo.similarity}));
    CHECK(clo.difficulty[i] ==
          DifficultyOf(double{clo.thresholds[i]}, double{Profile().clo.similarities[i]}));
  }
  const auto refused = [](const PolicyProfile& profile, int heads) {
    Model other;
    other.options.heads = heads;
    const absl::Status status = other.Apply(profile, kFingerprint);
    CHECK(absl::IsFailedPrecondition(status));
    CheckSays(status, "gates");
    CHECK(other.options.clo.thresholds.empty());
  };
  PolicyProfile profile = Profile();
  profile.clo.similarities.pop_back();
  refused(profile, 2 * kKvHeads);
  profile = Profile();
  profile.clo.misses.push_back(0);
  refused(profile, 2 * kKvHeads);
  profile = Profile();
  profile.clo.predicted.pop_back();
  refused(profile, 2 * kKvHeads);
  refused(Profile(), kKvHeads);
  for (const json& gates_of : {json({1, 2}), json({1, "x"}), json::array(), json(3)}) {
    const absl::Status wrong = Changed([&](json& root) { root["clo"]["gates"] = gates_of; });
    CHECK(absl::IsInvalidArgument(wrong));
    CheckSays(wrong, "gates");
  }
}

TEST_CASE("margins go to policy recall, and fit its projection and its reduction") {
  Model model;
  REQUIRE(model.Apply(Profile(), kFingerprint).ok());
  CHECK(model.options.recall.margins == Profile().margins.by_layer);
  const auto refused = [](const PolicyProfile& profile, const Model& of, const std::string& words) {
    Model other = of;
    const absl::Status status = other.Apply(profile, kFingerprint);
    CHECK(absl::IsFailedPrecondition(status));
    CheckSays(status, words);
    CHECK(other.options.recall.margins.empty());
  };
  PolicyProfile profile = Profile();
  profile.margins.by_layer.pop_back();
  refused(profile, Model(), "margins of 2 layers");
  profile = Profile();
  profile.margins.rank = 8;
  refused(profile, Model(), "measured with 8 columns of a projection, this node has 4");
  Model mean;
  mean.options.reduction = kernels::GroupReduction::kMean;
  refused(Profile(), mean, "score_reduction max");
  // Without a projection of the profile there are plain columns, half of head_dim.
  profile = Profile();
  profile.projection = {};
  refused(profile, Model(), "this node has 8");
  profile.margins.rank = 8;
  Model plain;
  REQUIRE(plain.Apply(profile, kFingerprint).ok());
  CHECK(plain.options.recall.margins == Profile().margins.by_layer);
  for (const json& margins : {json({1, 0}), json({1, "x"}), json::array(), json(3)}) {
    const absl::Status wrong = Changed([&](json& root) { root["recall"]["margins"] = margins; });
    CHECK(absl::IsInvalidArgument(wrong));
    CheckSays(wrong, "margins");
  }
}

TEST_CASE("thresholds go to policy hgca, except where it is exact, and fit the model") {
  Model model;
  REQUIRE(model.Apply(Profile(), kFingerprint).ok());
  CHECK(model.options.hgca.betas == Profile().hgca.betas);
  Model exact;
  exact.options.hgca.beta = 0;
  REQUIRE(exact.Apply(Profile(), kFingerprint).ok());
  CHECK(exact.options.hgca.betas.empty());
  PolicyProfile other = Profile();
  other.hgca.betas.resize(4);
  const absl::Status refused = model.Apply(other, kFingerprint);
  CHECK(absl::IsFailedPrecondition(refused));
  CHECK_THAT(std::string(refused.message()), Catch::Contains("betas of 2 layers"));
  const absl::Status wrong = Changed([](json& root) { root["hgca"]["betas"] = {0.5, -1}; });
  CHECK(absl::IsInvalidArgument(wrong));
  CHECK_THAT(std::string(wrong.message()), Catch::Contains("betas"));
}

TEST_CASE("a rank takes what a profile says of its heads") {
  PolicyProfile profile = Profile();
  profile.clo.label_similarities = {1, 2, 3, 4, 5, 6};
  profile.clo.persistence_order = {0, 1};
  // The second of two KV heads, and its two query heads of four.
  const PolicyProfile own = ProfileOfRank(profile, {2, 2, 4}, {1, 1, 2});
  CHECK(own.clo.gates == std::vector<float>{1, 0.5f, 0.25f, 1, 0.125f, 0});
  CHECK(own.clo.similarities == std::vector<float>{0.75f, -0.25f, 0});
  CHECK(own.clo.misses == std::vector<float>{0, 1, 0.75f});
  CHECK(own.clo.label_similarities == std::vector<float>{2, 4, 6});
  CHECK(own.clo.persistence_order.empty());
  CHECK(own.clo.prefetchable == 1.25);
  CHECK(own.clo.predicted == profile.clo.predicted);
  CHECK(own.hgca.betas == std::vector<float>{0, 2, 3});
  for (const auto& [of_model, of_rank] :
       {std::pair{&profile.projection, &own.projection}, std::pair{&profile.hash, &own.hash}}) {
    const int64_t head = int64_t{kHeadDim} * of_model->columns;
    REQUIRE(std::ssize(of_rank->values) == kLayers * head);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const auto from = of_model->values.begin() + (2 * layer + 1) * head;
      CHECK(std::equal(from, from + head, of_rank->values.begin() + layer * head));
    }
  }

  Model rank;
  rank.layout.kinds[0].heads = 1;
  rank.options.heads = 2;
  rank.options.rank_heads = {2, 2, 4};
  rank.options.rank_kv_heads = {1, 1, 2};
  CHECK(rank.Apply(profile, profile.model_fingerprint).ToString() == "OK");
  CHECK(rank.options.hgca.betas == own.hgca.betas);
  CHECK(rank.options.clo.importance == own.clo.gates);
  // A profile of a model with other heads is not cut, and so does not fit.
  rank.options.rank_kv_heads = {1, 1, 3};
  CheckSays(rank.Apply(profile, profile.model_fingerprint), "2 KV heads");
}

TEST_CASE("a profile may have intervals alone, or a projection alone") {
  const fixtures::TempDir dir;
  PolicyProfile intervals = Profile();
  intervals.projection = {};
  intervals.hash = {};
  REQUIRE(WritePolicyProfile(intervals, dir.File("i.json")).ok());
  CHECK_FALSE(std::filesystem::exists(ProjectionPath(dir.File("i.json"))));
  const auto no_projection = ReadPolicyProfile(dir.File("i.json"));
  REQUIRE(no_projection.ok());
  CHECK(no_projection->layers.size() == kLayers);
  CHECK(no_projection->projection.values.empty());

  PolicyProfile projection = Profile();
  projection.layers.clear();
  REQUIRE(WritePolicyProfile(projection, dir.File("p.json")).ok());
  const auto no_intervals = ReadPolicyProfile(dir.File("p.json"));
  REQUIRE(no_intervals.ok());
  CHECK(no_intervals->layers.empty());
  CHECK(no_intervals->projection.values == projection.projection.values);

  Model model;
  model.options.scout.intervals = {9, 9, 9};
  REQUIRE(model.Apply(*no_intervals, kFingerprint).ok());
  CHECK(model.options.scout.intervals == std::vector<int32_t>{9, 9, 9});
  REQUIRE(model.Apply(*no_projection, kFingerprint).ok());
  CHECK(model.options.scout.intervals == std::vector<int32_t>{0, 7, 1});
  CHECK(model.options.recall.projection == projection.projection.values);
}

TEST_CASE("what is no profile is refused by file and key") {
  CHECK(absl::IsNotFound(ReadPolicyProfile("/no/such/profile").status()));
  const fixtures::TempDir dir;
  REQUIRE(fixtures::WriteFile(dir.File("p"), "{\"format\": \"slu").ok());
  CheckSays(ReadPolicyProfile(dir.File("p")).status(), "not valid JSON");
  REQUIRE(fixtures::WriteFile(dir.File("p"), "{}").ok());
  CheckSays(ReadPolicyProfile(dir.File("p")).status(), "not a profile of sluice-profile");
  CheckSays(Changed([](json& j) { j["version"] = 2; }), "version 2 of the format");
  CheckSays(Changed([](json& j) { j.erase("version"); }), "version");
  CheckSays(Changed([](json& j) { j["model_fingerprint"] = "abc"; }), "model_fingerprint");
  CheckSays(Changed([](json& j) { j.erase("block_tokens"); }), "block_tokens");
  CheckSays(Changed([](json& j) { j["share_limit"] = 3; }), "share_limit");
  CheckSays(Changed([](json& j) { j["layers"] = 5; }), "layers");
  CheckSays(Changed([](json& j) { j["layers"] = json::array(); }), "layers");
  CheckSays(Changed([](json& j) { j["layers"][1] = 5; }), "layers[1]");
  CheckSays(Changed([](json& j) { j["layers"][1]["interval"] = -1; }), "interval");
  CheckSays(Changed([](json& j) { j["layers"][1]["interval"] = "3"; }), "interval");
  CheckSays(Changed([](json& j) { j["layers"][2]["shares"] = {0.1, -0.1}; }), "shares");
  CheckSays(Changed([](json& j) { j["projection"] = 5; }), "projection");
  CheckSays(Changed([](json& j) { j["projection"]["rank"] = kHeadDim + 1; }), "rank");
}

TEST_CASE("a projection that is not the profile's is refused") {
  {
    const fixtures::TempDir dir;
    REQUIRE(WritePolicyProfile(Profile(), dir.File("p.json")).ok());
    std::filesystem::remove(ProjectionPath(dir.File("p.json")));
    const absl::Status lost = ReadPolicyProfile(dir.File("p.json")).status();
    CHECK(absl::IsNotFound(lost));
    CheckSays(lost, "keep it beside the profile");
  }
  CheckSays(ChangedProjection([](std::string& b) { b.pop_back(); }), "bytes, found");
  CheckSays(ChangedProjection([](std::string& b) { b.clear(); }), "bytes, found 0");
  CheckSays(ChangedProjection([](std::string& b) { b += "more"; }), "bytes, found");
  CheckSays(ChangedProjection([](std::string& b) { b[0] ^= 1; }), "not the projection");
  CheckSays(ChangedProjection([](std::string& b) { b[20] = 'b'; }), "not the projection");
  CheckSays(ChangedProjection([](std::string& b) { b[200] ^= 1; }), "not the projection");
  // another shape with as many numbers
  CheckSays(Changed([](json& j) {
              j["projection"]["layers"] = kKvHeads;
              j["projection"]["kv_heads"] = kLayers;
            }),
            "not the projection");
  CheckSays(Changed([](json& j) { j["projection"]["layers"] = 4096; }), "bytes, found");
  const fixtures::TempDir dir;
  PolicyProfile broken = Profile();
  broken.projection.values[3] = std::numeric_limits<float>::quiet_NaN();
  REQUIRE(WritePolicyProfile(broken, dir.File("p.json")).ok());
  CheckSays(ReadPolicyProfile(dir.File("p.json")).status(), "not the projection");
  // The files of hash matrices are checked in the same way.
  broken = Profile();
  broken.hash.values[5] = std::numeric_limits<float>::infinity();
  REQUIRE(WritePolicyProfile(broken, dir.File("h.json")).ok());
  CheckSays(ReadPolicyProfile(dir.File("h.json")).status(), "not the hash");
  std::filesystem::copy_file(ProjectionPath(dir.File("p.json")), HashPath(dir.File("h.json")),
                             std::filesystem::copy_options::overwrite_existing);
  CheckSays(ReadPolicyProfile(dir.File("h.json")).status(), "h.json.hash: expected");
  std::filesystem::remove(HashPath(dir.File("h.json")));
  CHECK(absl::IsNotFound(ReadPolicyProfile(dir.File("h.json")).status()));
}

TEST_CASE("a profile that does not fit the node is refused, and says in what") {
  const auto refused = [](const std::string& words, auto change, const std::string& fingerprint) {
    Model model;
    PolicyProfile profile = Profile();
    change(profile, model.options);
    const absl::Status status = model.Apply(profile, fingerprint);
    CHECK(absl::IsFailedPrecondition(status));
    CheckSays(status, words);
    CheckSays(status, "sluice-profile");
  };
  refused(
      "fingerprint", [](PolicyProfile&, PolicyOptions&) {}, std::string(64, 'b'));
  refused(
      "of 2 layers, the model has 3", [](PolicyProfile& p, PolicyOptions&) { p.layers.pop_back(); },
      kFingerprint);
  refused(
      "block_tokens 32, this node has 16",
      [](PolicyProfile& p, PolicyOptions&) { p.block_tokens = 32; }, kFingerprint);
  refused(
      "budget_tokens 256, this node has 128",
      [](PolicyProfile&, PolicyOptions& o) { o.budget_tokens = 128; }, kFingerprint);
  refused(
      "layer 0 was dense", [](PolicyProfile&, PolicyOptions& o) { o.dense_layers = 0; },
      kFingerprint);
  refused(
      "3 layers of 2 KV heads of 8",
      [](PolicyProfile& p, PolicyOptions&) { p.projection.head_dim = 8; }, kFingerprint);
  refused(
      "hash matrices are for 4 layers", [](PolicyProfile& p, PolicyOptions&) { p.hash.layers = 4; },
      kFingerprint);
}

TEST_CASE("a profile that cannot be written is said by its path") {
  CheckSays(WritePolicyProfile(Profile(), "/no/such/dir/p.json"), "/no/such/dir/p.json");
}

TEST_CASE("misses and stages that make no sense are refused by their keys") {
  const auto refused = [](const char* words, const std::function<void(json&)>& change) {
    CheckSays(Changed(change), words);
  };
  refused("misses: expected a list", [](json& root) { root["misses"] = 3; });
  refused("misses: expected a list", [](json& root) { root["misses"] = json::array(); });
  refused("misses[1]: expected an object", [](json& root) { root["misses"][1] = "x"; });
  refused("misses[0]: context", [](json& root) { root["misses"][0]["context"] = 0; });
  refused("misses[0]: ratio", [](json& root) { root["misses"][0]["ratio"] = 0; });
  refused("misses[0]: ratio", [](json& root) { root["misses"][0]["ratio"] = 1.5; });
  refused("misses[1]: batch", [](json& root) { root["misses"][1].erase("batch"); });
  refused("misses[0]: by_layer", [](json& root) { root["misses"][0].erase("by_layer"); });
  refused("misses[0]: by_layer", [](json& root) { root["misses"][0]["by_layer"][2] = -1; });
  refused("misses[0]: by_layer", [](json& root) { root["misses"][0]["by_layer"] = json::array(); });
  refused("stages: expected an object", [](json& root) { root["stages"] = {1}; });
  refused("stages: device", [](json& root) { root["stages"].erase("device"); });
  refused("stages: transfer", [](json& root) { root["stages"].erase("transfer"); });
  refused("stages: attend: each_us",
          [](json& root) { root["stages"]["attend"]["each_us"] = "fast"; });
  refused("stages: index: fixed_us", [](json& root) { root["stages"]["index"]["fixed_us"] = -1; });
  refused("stages: branch_us", [](json& root) { root["stages"].erase("branch_us"); });
}

TEST_CASE("misses go to policy ess, and are of as many layers as the model") {
  Model model;
  PolicyProfile profile = Profile();
  REQUIRE(model.Apply(profile, kFingerprint).ok());
  REQUIRE(model.options.ess.profile.points.size() == 2);
  CHECK(model.options.ess.profile.rates.device == "cuda");
  profile.misses.points[1].by_layer.pop_back();
  CheckSays(model.Apply(profile, kFingerprint), "misses of 2 layers, the model has 3");
}

}  // namespace sluice
