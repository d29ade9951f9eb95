#include "src/bench/workload/topic_drift.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "src/base/dtype.h"
#include "src/bench/policies/workload_statistics.h"
#include "src/model/tensor_list.h"

namespace sluice::bench {
namespace {

ModelConfig Geometry() {
  ModelConfig c;
  c.name = "small";
  c.architecture = "qwen3";
  c.hidden_size = 256;
  c.intermediate_size = 256;
  c.layers = 3;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 64;
  c.vocab_size = 1000;
  c.max_position_embeddings = 4096;
  c.qk_norm = true;
  c.rope.theta = 1e6;
  return c;
}

std::vector<float> MatrixOf(WeightSource& source, const std::string& name, int64_t rows,
                            int64_t cols) {
  const auto view = source.Matrix(name, rows, cols);
  REQUIRE(view.ok());
  std::vector<float> out;
  for (int64_t i = 0; i < rows * cols; ++i) out.push_back(BFloat16ToFloat(view->data()[i]));
  return out;
}

double Cosine(const float* a, const float* b, int n) {
  double ab = 0, aa = 0, bb = 0;
  for (int i = 0; i < n; ++i) {
    ab += double{a[i]} * double{b[i]};
    aa += double{a[i]} * double{a[i]};
    bb += double{b[i]} * double{b[i]};
  }
  return ab / std::sqrt(aa * bb);
}

TEST_CASE("the same seed makes the same weights, another makes others") {
  const ModelConfig c = Geometry();
  TopicDrift options;
  const auto one = *TopicDriftWeights(c, options), again = *TopicDriftWeights(c, options);
  options.seed = 2;
  const auto other = *TopicDriftWeights(c, options);
  for (const std::string& name :
       {std::string(kEmbeddingTensor), LayerTensor(1, "self_attn.q_proj.weight")}) {
    const int64_t rows = name == kEmbeddingTensor ? c.vocab_size : c.q_size();
    const auto bytes = MatrixOf(*one, name, rows, c.hidden_size);
    CHECK(bytes == MatrixOf(*again, name, rows, c.hidden_size));
    CHECK(bytes != MatrixOf(*other, name, rows, c.hidden_size));
    // The fingerprint samples the weights that the model reads.
    std::vector<uint16_t> some(600);
    REQUIRE(one->ReadBFloat16(name, {rows, c.hidden_size}, 300, absl::MakeSpan(some)).ok());
    for (size_t i = 0; i < some.size(); ++i) {
      REQUIRE(BFloat16ToFloat(some[i]) == bytes[300 + i]);
    }
  }
  const std::string down = LayerTensor(0, "mlp.down_proj.weight");
  CHECK(one->Formula(down)->state == again->Formula(down)->state);
  CHECK(one->Formula(down)->state != other->Formula(down)->state);
}

TEST_CASE("a query head is its KV head and a change of its own") {
  const ModelConfig c = Geometry();
  TopicDrift options;
  options.head_change = 0.5;
  const auto source = *TopicDriftWeights(c, options);
  const auto q = MatrixOf(*source, LayerTensor(0, "self_attn.q_proj.weight"), c.q_size(), 256);
  const auto k = MatrixOf(*source, LayerTensor(0, "self_attn.k_proj.weight"), c.kv_size(), 256);
  for (int head = 0; head < c.heads; ++head) {
    // RoPE turns the last pair of dimensions least.
    const float* const q_row = q.data() + (head * 64 + 63) * 256;
    const int own = head / 2, foreign = 1 - own;
    CHECK(Cosine(q_row, k.data() + (own * 64 + 63) * 256, 256) ==
          Approx(1 / std::sqrt(1.25)).margin(0.1));
    CHECK(std::abs(Cosine(q_row, k.data() + (foreign * 64 + 63) * 256, 256)) < 0.3);
  }
}

TEST_CASE("embeddings near each other on the path are alike, and the head leads to the next") {
  const ModelConfig c = Geometry();
  TopicDrift options;
  options.drift = 0.02;
  options.noise = 0.5;
  const auto source = *TopicDriftWeights(c, options);
  const auto e = MatrixOf(*source, kEmbeddingTensor, c.vocab_size, 256);
  const auto head = MatrixOf(*source, kHeadTensor, c.vocab_size, 256);
  // An eighth of the dimensions are the token's identity.
  const auto alike = [&](int a, int b) {
    return Cosine(&e[static_cast<size_t>(a) * 256], &e[static_cast<size_t>(b) * 256], 224);
  };
  double near = 0, far = 0;
  for (int v = 100; v < 120; ++v) near += alike(v, v + 2) / 20, far += alike(v, v + 400) / 20;
  CHECK(near == Approx(1 / (1 + options.noise * options.noise)).margin(0.1));
  CHECK(std::abs(far) < 0.3);
  int leads = 0;
  for (int v = 200; v < 220; ++v) {
    int best = 0;
    double most = -1e9;
    for (int u = 0; u < c.vocab_size; ++u) {
      double logit = 0;
      for (size_t i = 0; i < 256; ++i) {
        logit += double{head[static_cast<size_t>(u) * 256 + i]} *
                 double{e[static_cast<size_t>(v) * 256 + i]};
      }
      if (logit > most) most = logit, best = u;
    }
    leads += best == v + 1 ? 1 : 0;
  }
  CHECK(leads == 20);
}

TEST_CASE("a token's identity affects the head alone") {
  const ModelConfig c = Geometry();
  const auto source = *TopicDriftWeights(c, {});
  constexpr int kTopic = 224;
  const auto q = MatrixOf(*source, LayerTensor(1, "self_attn.q_proj.weight"), c.q_size(), 256);
  const auto k = MatrixOf(*source, LayerTensor(1, "self_attn.k_proj.weight"), c.kv_size(), 256);
  const auto head = MatrixOf(*source, kHeadTensor, c.vocab_size, 256);
  for (size_t i = 0; i < 256; ++i) {
    const bool identity = i >= kTopic;
    CHECK((q[i] == 0) == identity);
    CHECK((k[i] == 0) == identity);
    CHECK((head[i] == 0) == !identity);
  }
  for (const char* const name : {"self_attn.o_proj.weight", "mlp.down_proj.weight"}) {
    const auto rows = MatrixOf(*source, LayerTensor(1, name), 256, 256);
    const auto live = rows.begin() + kTopic * 256;
    CHECK(std::count(rows.begin(), live, 0.0f) < 10);
    CHECK(std::count(live, rows.end(), 0.0f) == 32 * 256);
    // The fingerprint samples the weights that the model reads.
    std::vector<uint16_t> some(600);
    REQUIRE(source
                ->ReadBFloat16(LayerTensor(1, name), {256, 256}, kTopic * 256 - 300,
                               absl::MakeSpan(some))
                .ok());
    for (size_t i = 0; i < some.size(); ++i) {
      REQUIRE(BFloat16ToFloat(some[i]) == rows[kTopic * 256 - 300 + i]);
    }
  }
}

TEST_CASE("a context is stretches of the path, and the path goes on after it") {
  const ModelConfig c = Geometry();
  TopicDrift options;
  options.segment = 50;
  SplitMix64 a(5), b(5), other(6);
  const auto tokens = TopicDriftContext(c, options, 220, 100, a);
  CHECK(tokens == TopicDriftContext(c, options, 220, 100, b));
  CHECK(tokens != TopicDriftContext(c, options, 220, 100, other));
  REQUIRE(tokens.size() == 220);
  for (size_t i = 1; i < tokens.size(); ++i) {
    if (i % 50 != 0) REQUIRE(tokens[i] == tokens[i - 1] + 1);
  }
  for (int draw = 0; draw < 50; ++draw) {
    CHECK(TopicDriftContext(c, options, 220, 100, a).back() + 100 < c.vocab_size);
  }
}

TEST_CASE("a geometry that topic drift does not suit is refused") {
  ModelConfig tied = Geometry();
  tied.tie_word_embeddings = true;
  CHECK(TopicDriftWeights(tied, {}).status().message().find("tie_word_embeddings") !=
        absl::string_view::npos);
  ModelConfig fast = Geometry();
  fast.rope.theta = 10;
  CHECK(TopicDriftWeights(fast, {}).status().message().find("rope_theta") !=
        absl::string_view::npos);
}

TEST_CASE("important blocks are those of the highest scores, and what changed is counted") {
  CHECK(HighestBlocks({1, 5, 3, 5, 0}, 3) == std::vector<int32_t>{1, 2, 3});
  CHECK(HighestBlocks({2, 2, 2}, 2) == std::vector<int32_t>{0, 1});
  CHECK(HighestBlocks({1}, 4) == std::vector<int32_t>{0});
  CHECK(ShareAway({1, 2, 3, 4}, {2, 3, 4, 9}) == 0.25);
  CHECK(ShareAway({1, 2}, {1, 2}) == 0);
  CHECK(ShareAway({1}, {}) == 0);
}

}  // namespace
}  // namespace sluice::bench
