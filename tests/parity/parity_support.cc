#include "tests/parity/parity_support.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/support/device.h"
#include "tests/test_main.h"

namespace sluice::testing {

Tolerance ToleranceOf(const std::string& path) {
  if (path == "cuda") return kCuda;
  return path == "amx" || path == "avx512bf16" ? kBFloat16 : kFloat32;
}

void CheckLogits(const std::vector<float>& got, const float* want, const Tolerance& tolerance) {
  double error = 0, got2 = 0, want2 = 0, dot = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    got2 += got[i] * got[i];
    want2 += want[i] * want[i];
    dot += got[i] * want[i];
  }
  CHECK(std::sqrt(error / want2) <= tolerance.relative_l2);
  CHECK(dot / std::sqrt(got2 * want2) >= tolerance.cosine);
}

namespace {

std::vector<int32_t> Joined(const fixtures::GoldenCase& golden) {
  std::vector<int32_t> tokens = golden.prompt;
  tokens.insert(tokens.end(), golden.tokens.begin(), golden.tokens.end());
  return tokens;
}

}  // namespace

void CheckTeacherForced(Teacher& teacher, const fixtures::GoldenCase& golden,
                        const Tolerance& tolerance, bool from_cache) {
  const int prompt = static_cast<int>(golden.prompt.size());
  const size_t vocab = golden.logits.size() / golden.tokens.size();
  std::vector<float> logits;
  if (from_cache) {
    teacher.BeginWithCache(Joined(golden), prompt, golden.k, golden.v);
    logits = teacher.Step(prompt - 1, 1, /*generates=*/false);
  } else {
    teacher.Begin(Joined(golden));
    constexpr int kChunk = 100;  // no multiple of a block
    for (int at = 0; at < prompt; at += kChunk) {
      logits = teacher.Step(at, std::min(kChunk, prompt - at), /*generates=*/false);
    }
  }
  for (size_t step = 0; step < golden.tokens.size(); ++step) {
    INFO("step " << step);
    CheckLogits(logits, &golden.logits[step * vocab], tolerance);
    logits = teacher.Step(prompt + static_cast<int>(step), 1, /*generates=*/true);
  }
}

void CheckGreedy(const std::vector<int32_t>& ids, const fixtures::GoldenCase& golden,
                 double margin) {
  REQUIRE(ids.size() == golden.tokens.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    INFO("token " << i << ", margin " << golden.margin[i]);
    // After a legitimate flip the two texts are different ones.
    if (ids[i] != golden.tokens[i] && golden.margin[i] <= margin) return;
    REQUIRE(ids[i] == golden.tokens[i]);
  }
}

bool HasPath(const std::string& path) {
  const absl::Status status = TestDevice(path).status();
  if (status.ok()) return true;
  SkipTest(std::string(status.message()));
  return false;
}

void CheckSame(const Generated& got, const Generated& want) {
  CHECK(got.ids == want.ids);
  REQUIRE(got.tokens.size() == want.tokens.size());
  for (size_t t = 0; t < got.tokens.size(); ++t) {
    CHECK(got.tokens[t].logprob == want.tokens[t].logprob);
    CHECK(got.tokens[t].top_logprobs == want.tokens[t].top_logprobs);
  }
}

NodeOptions TogetherOptions(const std::string& path) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-qwen3");
  options.kernels = path;
  options.max_context = 1024;
  options.chunk_tokens = 48;
  return options;
}

double CheckTogether(NodeOptions options) {
  std::vector<Request> requests;
  for (int i = 0; i < 16; ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 1 + i * 37; ++t) prompt.push_back(3 + (t * 7919 + i * 104729) % 500);
    Request request = GreedyRequest(prompt, static_cast<uint32_t>(8 + i * 3));
    if (i % 2 == 1) {
      request.sampling.temperature = 1.3f;
      request.sampling.top_p = 0.9f;
      request.sampling.seed = static_cast<uint64_t>(i);
      request.sampling.repetition_penalty = 1.2f;
    }
    request.sampling.logprobs = 2;
    requests.push_back(std::move(request));
  }
  // One thread computes each sequence alone, two compute them together: the bits depend on neither.
  std::vector<Generated> alone;
  {
    options.threads = 1;
    Node node(options);
    for (const Request& request : requests) alone.push_back(node.Generate(request));
  }
  double preemptions = 0;
  // Enqueued operator by operator; and as recorded programs of 5, 10, 15 and 20 rows.
  options.threads = 2;
  for (const int row_bucket : {0, 5}) {
    options.row_bucket = row_bucket;
    Node node(options);
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (const Request& request : requests) streams.push_back(node.Start(request));
    for (size_t i = 0; i < streams.size(); ++i) {
      INFO(options.kernels << ", row bucket " << row_bucket << ", sequence " << i);
      CheckSame(Node::Collect(*streams[i]), alone[i]);
    }
    preemptions += node.metrics().preemptions.Value();
  }
  return preemptions;
}

}  // namespace sluice::testing
