// A model that ranks divide among them (src/model/shard.h), each rank a process with a device of
// its own, is held to the same model on one device: logits, greedy tokens, and what is exchanged.
#include <sys/mman.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/model/model_config.h"
#include "src/model/shard.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/against_full.h"
#include "tests/parity/teacher.h"
#include "tests/support/device.h"
#include "tests/support/ranks.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::Best;
using testing::LongestCase;
using testing::RelativeError;
using testing::Teacher;

constexpr int kTokens = 12;  // that are generated behind the prompt
constexpr int kChunk = 100;  // rows of the prompt in a step
constexpr int kBudget = 64;  // tokens, of sparse policies
constexpr int kMostContext = 1024;

// A model gives this for a prompt: a row of logits for each token, which is their best.
using Answer = std::vector<std::vector<float>>;

Answer GreedyAnswer(Teacher& teacher, const std::vector<int32_t>& prompt) {
  std::vector<int32_t> tokens = prompt;
  const int n = static_cast<int>(prompt.size());
  tokens.resize(prompt.size() + kTokens);
  teacher.Begin(tokens);
  Answer answer;
  for (int at = 0; at < n; at += kChunk) {
    const int count = std::min(kChunk, n - at);
    std::vector<float> logits = teacher.Step(at, count, /*generates=*/false);
    if (at + count == n) answer.push_back(std::move(logits));
  }
  for (int i = 0; i + 1 < kTokens; ++i) {
    teacher.SetToken(n + i, Best(answer.back()));
    answer.push_back(teacher.Step(n + i, 1, /*generates=*/true));
  }
  return answer;
}

// This is memory that a rank's process leaves its logits in.
class SharedAnswers {
 public:
  SharedAnswers(int ranks, size_t floats) : floats_(floats), bytes_(size_t(ranks) * floats * 4) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    SLUICE_CHECK(memory_ != MAP_FAILED);
  }
  ~SharedAnswers() { munmap(memory_, bytes_); }
  float* Of(int rank) const { return static_cast<float*>(memory_) + size_t(rank) * floats_; }

 private:
  const size_t floats_, bytes_;
  void* memory_;
};

// Returns what is wrong with the operations that a rank enqueued for a prompt and its answer.
std::string CountsWrong(const Teacher& teacher, const ModelConfig& whole, int prompt) {
  const RankGroup& ranks = teacher.ranks();
  const Shard shard = *ShardOf(whole, ranks.rank(), ranks.size());
  StepExchange want;
  const auto add = [&](int64_t rows) {
    const StepExchange step = ExchangeOf(whole, shard, rows, /*logits=*/1);
    want.all_reduces += step.all_reduces;
    want.all_reduce_bytes += step.all_reduce_bytes;
    want.all_gathers += step.all_gathers;
    want.all_gather_bytes += step.all_gather_bytes;
  };
  for (int at = 0; at < prompt; at += kChunk) add(std::min(kChunk, prompt - at));
  for (int i = 0; i + 1 < kTokens; ++i) add(1);
  const CollectiveCount reduces = ranks.count(Collective::kAllReduce);
  const CollectiveCount gathers = ranks.count(Collective::kAllGather);
  if (reduces.calls == want.all_reduces && reduces.bytes == want.all_reduce_bytes &&
      gathers.calls == want.all_gathers && gathers.bytes == want.all_gather_bytes) {
    return "";
  }
  return absl::StrCat(reduces.calls, " all-reduces of ", reduces.bytes, " bytes, not ",
                      want.all_reduces, " of ", want.all_reduce_bytes, "; ", gathers.calls,
                      " all-gathers of ", gathers.bytes, " bytes, not ", want.all_gathers, " of ",
                      want.all_gather_bytes);
}

// Checks that `size` ranks give the tokens of one device, and its logits within `tolerance`, and
// that all of them have the same bits.
void CheckRanks(const std::string& name, int size, const Teacher::Choose& choose, double tolerance,
                const std::string& kernels = "portable") {
  INFO(name << " on " << size << " ranks");
  const bool cuda = kernels == "cuda";
  const DType kv = cuda ? DType::kBFloat16 : DType::kFloat32;
  const std::string dir = fixtures::ModelDir(name);
  const std::vector<int32_t> prompt = LongestCase(name).prompt;
  const ModelConfig whole = *LoadModelConfig(dir);
  const size_t row = static_cast<size_t>(whole.vocab_size), floats = kTokens * row;
  const SharedAnswers answers(size + 1, floats);
  const auto leave = [&](const Answer& answer, int place) {
    for (size_t i = 0; i < answer.size(); ++i) {
      std::copy(answer[i].begin(), answer[i].end(), answers.Of(place) + i * row);
    }
  };
  // One device too has a process of its own, since a process that has used a GPU cannot fork.
  const auto alone = testing::RunRankProcesses(testing::RankOptions(1),
                                               [&](const RankGroupOptions&) -> std::string {
                                                 Teacher teacher(dir, kernels, kv, choose);
                                                 leave(GreedyAnswer(teacher, prompt), size);
                                                 return "";
                                               });
  REQUIRE(testing::Joined(alone) == "");
  const auto wrong = testing::RunRankProcesses(
      testing::RankOptions(size),
      [&](const RankGroupOptions& options) {
        Teacher teacher(dir, kernels, kv, choose, &options);
        leave(GreedyAnswer(teacher, prompt), options.rank);
        return CountsWrong(teacher, whole, static_cast<int>(prompt.size()));
      },
      /*on_gpus=*/cuda);
  REQUIRE(testing::Joined(wrong) == "");
  double worst = 0;
  for (size_t i = 0; i < kTokens; ++i) {
    const auto at = [&](int place) {
      const float* from = answers.Of(place) + i * row;
      return std::vector<float>(from, from + row);
    };
    for (int rank = 1; rank < size; ++rank) {
      CHECK(std::memcmp(answers.Of(rank) + i * row, answers.Of(0) + i * row, row * 4) == 0);
    }
    worst = std::max(worst, RelativeError(at(0), at(size)));
    CHECK(Best(at(0)) == Best(at(size)));
  }
  CHECK(worst <= tolerance);
  std::printf("%s on %d ranks: logits differ by %.1e at most\n", name.c_str(), size, worst);
}

void CheckEveryModel(const Teacher::Choose& choose) {
  for (const std::string& name : fixtures::TinyModels()) {
    for (const int size : {2, 4}) CheckRanks(name, size, choose, 1e-3);
  }
}

// Checks a sparse policy whose budget is below the prompts' lengths, where every KV head is on one
// rank with all heads of its group: then a rank selects what one device selects. Ranks that have
// the same KV head select for their own heads alone.
void CheckDividedHeads(const Teacher::Choose& choose) {
  for (const std::string& name : fixtures::TinyModels()) {
    const int prompt = static_cast<int>(LongestCase(name).prompt.size());
    const int kv_heads = LoadModelConfig(fixtures::ModelDir(name))->kv_heads;
    REQUIRE(prompt > 3 * kBudget);
    if (kv_heads % 2 == 0) CheckRanks(name, 2, choose, 1e-3);
  }
}

Teacher::Choose Scout(int budget) {
  return [budget](PolicyOptions& options) {
    options.name = "scout";
    options.dense_layers = 0;
    options.workers = 1;
    options.worker_deadline = absl::Seconds(60);  // A busy machine is no fault.
    options.budget_tokens = budget;
  };
}
Teacher::Choose Recall(int budget) {
  return [budget](PolicyOptions& options) {
    options.name = "recall";
    options.dense_layers = 0;
    options.budget_tokens = budget;
  };
}
Teacher::Choose Hgca(float beta) {
  return [beta](PolicyOptions& options) {
    options.name = "hgca";
    options.dense_layers = 0;
    options.workers = 1;
    options.worker_deadline = absl::Seconds(60);
    options.hgca.window_tokens = kBudget;
    options.hgca.beta = beta;
  };
}

Teacher::Choose Clo(int budget) {
  return [budget](PolicyOptions& options) {
    options.name = "clo";
    options.dense_layers = 0;
    options.budget_tokens = budget;
  };
}
Teacher::Choose Fluxion(int budget) {
  return [budget](PolicyOptions& options) {
    options.name = "fluxion";
    options.dense_layers = 0;
    options.workers = 1;
    options.worker_deadline = absl::Seconds(60);
    options.budget_tokens = budget;
  };
}

TEST_CASE("two and four ranks give the logits and tokens of one device", "[ranks]") {
  CheckEveryModel(nullptr);
}

TEST_CASE("ranks of scout give the logits and tokens of one device", "[ranks]") {
  CheckDividedHeads(Scout(kBudget));
  CheckEveryModel(Scout(kMostContext));
}

TEST_CASE("ranks of recall give the logits and tokens of one device", "[ranks]") {
  CheckDividedHeads(Recall(kBudget));
  CheckEveryModel(Recall(kMostContext));
}

TEST_CASE("ranks of hgca give the logits and tokens of one device", "[ranks]") {
  CheckDividedHeads(Hgca(1.0f));
  CheckEveryModel(Hgca(0.0f));
}

TEST_CASE("ranks of clo give the logits and tokens of one device", "[ranks]") {
  CheckDividedHeads(Clo(96));
  CheckEveryModel(Clo(kMostContext));
}

// Without a predictor every head reads all that is not in HBM, so its answers are exact.
TEST_CASE("ranks of fluxion give the logits and tokens of one device", "[ranks]") {
  CheckEveryModel(Fluxion(96));
}

TEST_CASE("a rank's step launches what a whole model's does, and its exchanges", "[ranks]") {
  for (const std::string& name : fixtures::TinyModels()) {
    const std::string dir = fixtures::ModelDir(name);
    const std::vector<int32_t> prompt(40, 7);
    const int layers = LoadModelConfig(dir)->layers;
    const auto wrong = testing::RunRankProcesses(
        testing::RankOptions(2), [&](const RankGroupOptions& options) -> std::string {
          Teacher whole(dir, "portable", DType::kFloat32);
          std::map<std::string, int> want = whole.LaunchesOfStep(prompt);
          want["all-reduce"] = 2 * layers;
          want["all-gather"] = 2;  // the embedding and the logits
          want["transfer"] += 2;
          Teacher rank(dir, "portable", DType::kFloat32, nullptr, &options);
          const std::map<std::string, int> got = rank.LaunchesOfStep(prompt);
          std::string text;
          for (const auto& [what, n] : got) absl::StrAppend(&text, what, " ", n, " ");
          return got == want ? "" : "launches " + text;
        });
    CHECK(testing::Joined(wrong) == "");
  }
}

TEST_CASE("two ranks on one GPU give the tokens of one rank", "[ranks][cuda]") {
  if (const std::string why = testing::WhyNoSharedGpu(); !why.empty()) return SkipTest(why);
  // Activations are rounded to bf16, and a sum in another order rounds otherwise.
  for (const std::string& name : fixtures::TinyModels()) {
    CheckRanks(name, 2, nullptr, 2e-2, "cuda");
  }
}

}  // namespace
}  // namespace sluice
