#include "src/bench/workload/latent_drift.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

#include "kernels/fp8.h"
#include "src/base/rng.h"
#include "src/bench/workload/latent_context.h"
#include "src/bench/workload/topic_drift.h"
#include "src/device/cpu/cpu_device.h"
#include "src/model/tensor_list.h"

namespace sluice::bench {
namespace {

constexpr char kModel[] = SLUICE_SOURCE_DIR "/configs/models/topic-drift-indexer-small";
constexpr int kTokens = 192;

LatentDrift Drift() {
  LatentDrift drift;
  drift.paths = 4;
  drift.topics = 32;
  return drift;
}

// Returns the packed index keys of a layer from a payload of whole blocks and a short last one.
std::vector<float> KeysOf(const Context& context, const CacheLayout& layout, int layer) {
  const Context::Payload& payload = context.payload(layer, 1);
  const auto block = static_cast<size_t>(layout.kinds[1].block_tokens);
  const auto dim = static_cast<size_t>(kernels::kIndexDim);
  const uint8_t* at = context.memory.as<uint8_t>() + payload.offset;
  std::vector<float> keys;
  for (size_t first = 0; first < context.tokens.size(); first += block) {
    const size_t tokens = std::min(block, context.tokens.size() - first);
    const uint8_t* const scales = at + tokens * dim;
    for (size_t i = 0; i < tokens * dim; ++i) {
      float scale;
      std::memcpy(&scale, scales + i / dim * 4, 4);
      keys.push_back(kernels::E4M3ToFloat(at[i]) * scale);
    }
    at += tokens * (dim + 4);
  }
  return keys;
}

double Cosine(const float* a, const float* b, size_t count) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < count; ++i) {
    ab += double{a[i]} * double{b[i]};
    aa += double{a[i]} * double{a[i]};
    bb += double{b[i]} * double{b[i]};
  }
  return ab / std::sqrt(aa * bb);
}

TEST_CASE(
    "a twin's index keys are the model's, whose likeness follows the drift of the layer's path") {
  const std::unique_ptr<Device> device = *NewCpuDevice({"auto", 2});
  Model::Options options;
  options.directory = kModel;
  options.kv_dtype = DType::kFloat8E4M3;
  options.max_context = 512;
  options.weights = [](const ModelConfig& config) { return LatentDriftWeights(config, Drift()); };
  const auto model = Model::Load(options, device.get());
  REQUIRE(model.ok());
  const auto twin = LoadTwin(options, Drift(), device.get());
  INFO(std::string(twin.status().ToString()));
  REQUIRE(twin.ok());
  SplitMix64 random(1);
  TopicDrift path;
  path.segment = kTokens;  // All tokens are neighbours on the path.
  const std::vector<int32_t> ids = TopicDriftContext((*model)->config(), path, kTokens, 0, random);
  const CacheLayout& layout = (*model)->cache_layout();
  const auto by_model = (*ContextMaker::Create(kTokens, device.get(), model->get()))->Compute(ids);
  const auto by_twin = (*NewTwinContextMaker(kTokens, device.get(), twin->get()))->Compute(ids);
  INFO(std::string(by_model.status().ToString()));
  REQUIRE(by_model.ok());
  REQUIRE(by_twin.ok());
  const auto dim = static_cast<size_t>(kernels::kIndexDim);
  std::vector<double> likeness(4);  // Similarity of tokens that are eight apart, by path.
  for (int layer = 0; layer < layout.layers; ++layer) {
    const std::vector<float> want = KeysOf(*by_model, layout, layer);
    const std::vector<float> got = KeysOf(*by_twin, layout, layer);
    REQUIRE(got.size() == ids.size() * dim);
    for (size_t t = 0; t < ids.size(); ++t) {
      INFO("layer " << layer << ", token " << t);
      REQUIRE(Cosine(&got[t * dim], &want[t * dim], dim) > 0.995);
    }
    double sum = 0;
    for (size_t t = 8; t < ids.size(); ++t) {
      sum += Cosine(&want[t * dim], &want[(t - 8) * dim], dim);
    }
    likeness[static_cast<size_t>(PathOfLayer(Drift(), layer))] =
        sum / static_cast<double>(ids.size() - 8);
  }
  for (size_t p = 1; p < likeness.size(); ++p) CHECK(likeness[p] < likeness[p - 1]);
  CHECK(likeness.front() > 0.95);
  CHECK(likeness.back() < 0.3);
}

TEST_CASE("paths lie a factor apart, and each is some layer's") {
  const LatentDrift drift = Drift();
  CHECK(DriftOfPath(drift, 0) == Approx(drift.slowest));
  CHECK(DriftOfPath(drift, 3) == Approx(drift.fastest));
  CHECK(DriftOfPath(drift, 1) / DriftOfPath(drift, 0) ==
        Approx(DriftOfPath(drift, 3) / DriftOfPath(drift, 2)));
  for (const int paths : {1, 2, 3, 4, 6, 8, 9, 15, 60}) {
    LatentDrift of = drift;
    of.paths = paths;
    std::vector<bool> seen(static_cast<size_t>(paths));
    for (int layer = 0; layer < paths; ++layer) {
      seen[static_cast<size_t>(PathOfLayer(of, layer))] = true;
    }
    INFO(paths << " paths");
    CHECK(std::count(seen.begin(), seen.end(), true) == paths);
  }
}

TEST_CASE("a geometry that topic drift of an indexer does not suit is refused") {
  ModelConfig config = *LoadModelConfig(kModel);
  LatentDrift drift = Drift();
  CHECK(LatentDriftWeights(config, drift).ok());
  drift.paths = 8;
  CHECK(LatentDriftWeights(config, drift).status().message() ==
        "topic drift: 8 paths need a hidden_size of at least 2048, found 1024");
  drift.paths = 4;
  ModelConfig other = config;
  other.hidden_size = 512;
  CHECK(!LatentDriftWeights(other, drift).ok());
  for (const double slowest : {0.0, -1.0, 0.5}) {
    LatentDrift bad = drift;
    bad.slowest = slowest;
    CHECK(!LatentDriftWeights(config, bad).ok());
  }
  other = config;
  other.tie_word_embeddings = true;
  CHECK(!LatentDriftWeights(other, drift).ok());
  other = config;
  other.latent->q_rank = 32;
  CHECK(!LatentDriftWeights(other, drift).ok());
  other = config;
  other.latent->indexer.reset();
  CHECK(!LatentDriftWeights(other, drift).ok());
}

}  // namespace
}  // namespace sluice::bench
