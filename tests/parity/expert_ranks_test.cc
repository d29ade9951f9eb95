// Ranks that divide the experts of a model, and attend each for sequences of their own, are held to
// one device that runs each of those sequences: logits, greedy tokens, and what is exchanged.
#include <sys/mman.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/exchange_params.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
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
using Divided = Teacher::Divided;
using Experts = Teacher::Experts;

constexpr int kTokens = 8;  // that are generated behind the prompt

// A rank does this in the steps of a test: a prompt of its own in chunks of its own, then tokens.
struct RankWork {
  std::vector<int32_t> prompt;  // empty: the rank has no sequence
  int chunk = 0;

  int prompt_steps() const {
    return prompt.empty() ? 0 : (static_cast<int>(prompt.size()) + chunk - 1) / chunk;
  }
  int steps() const { return prompt.empty() ? 0 : prompt_steps() + kTokens - 1; }
  int RowsOf(int step) const {
    if (step >= steps()) return 0;
    if (step >= prompt_steps()) return 1;
    return std::min(chunk, static_cast<int>(prompt.size()) - step * chunk);
  }
};

// The ranks' prompts differ in length, so that some generate while others compute prompts, and all
// but the first end early. The last rank has none.
std::vector<RankWork> WorkOf(const std::string& name, int size) {
  const std::vector<int32_t> longest = LongestCase(name).prompt;
  std::vector<RankWork> work(static_cast<size_t>(size));
  for (int rank = 0; rank + 1 < size; ++rank) {
    RankWork& of = work[static_cast<size_t>(rank)];
    of.prompt = longest;
    std::rotate(of.prompt.begin(), of.prompt.begin() + 5 * rank, of.prompt.end());
    of.prompt.resize(longest.size() - static_cast<size_t>(37 * rank));
    of.chunk = 60 - 11 * rank;
  }
  return work;
}

int MostRows(const std::vector<RankWork>& work, int step) {
  int most = 1;
  for (const RankWork& of : work) most = std::max(most, of.RowsOf(step));
  return most;
}

int StepsOf(const std::vector<RankWork>& work) {
  int steps = 0;
  for (const RankWork& of : work) steps = std::max(steps, of.steps());
  return steps;
}

// A row of logits for each generated token, which is their best.
using Answer = std::vector<std::vector<float>>;

// Runs a rank's work beside the others'; `all` has one element for a device that is alone.
Answer AnswerOf(Teacher& teacher, const std::vector<RankWork>& all, size_t rank) {
  const RankWork& own = all[rank];
  Answer answer;
  const int n = static_cast<int>(own.prompt.size()), prompt_steps = own.prompt_steps();
  if (n > 0) {
    std::vector<int32_t> tokens = own.prompt;
    tokens.resize(own.prompt.size() + kTokens);
    teacher.Begin(tokens);
  }
  for (int step = 0; step < StepsOf(all); ++step) {
    const int rows = own.RowsOf(step), most = MostRows(all, step);
    if (rows == 0) {
      teacher.IdleStep(most);
    } else if (step < prompt_steps) {
      std::vector<float> logits = teacher.Step(step * own.chunk, rows, /*generates=*/false, most);
      if (step + 1 == prompt_steps) answer.push_back(std::move(logits));
    } else {
      const int at = n + step - prompt_steps;
      teacher.SetToken(at, Best(answer.back()));
      answer.push_back(teacher.Step(at, 1, /*generates=*/true, most));
    }
  }
  return answer;
}

// This is memory that processes leave their logits in.
class SharedAnswers {
 public:
  SharedAnswers(int places, size_t row) : row_(row), bytes_(size_t(places) * kTokens * row * 4) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    SLUICE_CHECK(memory_ != MAP_FAILED);
  }
  ~SharedAnswers() { munmap(memory_, bytes_); }
  void Leave(const Answer& answer, int place) {
    for (size_t i = 0; i < answer.size(); ++i) {
      std::copy(answer[i].begin(), answer[i].end(), At(place, i));
    }
  }
  std::vector<float> Row(int place, size_t i) const { return {At(place, i), At(place, i) + row_}; }

 private:
  float* At(int place, size_t i) const {
    return static_cast<float*>(memory_) + (size_t(place) * kTokens + i) * row_;
  }
  const size_t row_, bytes_;
  void* memory_;
};

// Returns what is wrong with the all-to-alls that a rank enqueued.
std::string CountsWrong(const Teacher& teacher, const std::vector<RankWork>& work, DType type) {
  const ModelConfig& config = teacher.config();
  const RankGroup& group = teacher.ranks();
  const ExpertShard shard = *ExpertShardOf(config, group.rank(), group.size());
  const int64_t unit =
      kernels::RowUnitOf(config.hidden_size, config.latent->experts.per_token, type).bytes;
  int64_t calls = 0, bytes = 0;
  for (int step = 0; step < StepsOf(work); ++step) {
    const ExpertExchange want = ExpertExchangeOf(config, shard, MostRows(work, step), unit);
    calls += 2 * want.layers;
    bytes += want.layers * (want.dispatch_bytes + want.combine_bytes);
  }
  const CollectiveCount got = group.count(Collective::kAllToAll);
  for (const Collective other : {Collective::kAllReduce, Collective::kAllGather}) {
    if (group.count(other).calls != 0) return absl::StrCat("there was an ", CollectiveName(other));
  }
  if (got.calls == calls && got.bytes == bytes) return "";
  return absl::StrCat(got.calls, " all-to-alls of ", got.bytes, " bytes, not ", calls, " of ",
                      bytes);
}

// Checks that `size` ranks give for each of their sequences the tokens of one device, and its
// logits within `tolerance`.
void CheckRanks(const std::string& name, int size, const Teacher::Choose& choose, double tolerance,
                const std::string& kernels = "portable", Divided divided = Divided::kExperts,
                const Experts& experts = {0, {}, false}) {
  INFO(name << " on " << size << " ranks");
  const bool cuda = kernels == "cuda";
  const DType kv = cuda ? DType::kBFloat16 : DType::kFloat32;
  const std::string dir = fixtures::ModelDir(name);
  const std::vector<RankWork> work = WorkOf(name, size);
  SharedAnswers answers(2 * size, static_cast<size_t>(LoadModelConfig(dir)->vocab_size));
  // One device too has a process of its own, since a process that has used a GPU cannot fork.
  const auto alone = testing::RunRankProcesses(
      testing::RankOptions(1), [&](const RankGroupOptions&) -> std::string {
        Teacher teacher(dir, kernels, kv, choose);
        for (int rank = 0; rank < size; ++rank) {
          answers.Leave(AnswerOf(teacher, {work[static_cast<size_t>(rank)]}, 0), size + rank);
        }
        return "";
      });
  REQUIRE(testing::Joined(alone) == "");
  const auto wrong = testing::RunRankProcesses(
      testing::RankOptions(size),
      [&](const RankGroupOptions& options) {
        Teacher teacher(dir, kernels, kv, choose, &options, divided, experts);
        answers.Leave(AnswerOf(teacher, work, static_cast<size_t>(options.rank)), options.rank);
        return CountsWrong(teacher, work,
                           divided == Divided::kExpertsByFp8
                               ? DType::kFloat8E4M3
                               : teacher.device().kernels().activation_type());
      },
      /*on_gpus=*/cuda);
  REQUIRE(testing::Joined(wrong) == "");
  double worst = 0;
  for (int rank = 0; rank + 1 < size; ++rank) {
    for (size_t i = 0; i < kTokens; ++i) {
      const std::vector<float> got = answers.Row(rank, i), want = answers.Row(size + rank, i);
      worst = std::max(worst, RelativeError(got, want));
      // The rounding to e4m3 may change the choice between tokens that are near.
      if (divided != Divided::kExpertsByFp8) CHECK(Best(got) == Best(want));
    }
  }
  CHECK(worst <= tolerance);
  if (divided == Divided::kExpertsByFp8) CHECK(worst > 1e-4);
  std::printf("%s on %d ranks: logits differ by %.1e at most\n", name.c_str(), size, worst);
}

void CheckEveryModel(const Teacher::Choose& choose) {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    for (const int size : {2, 4}) CheckRanks(name, size, choose, 1e-3);
  }
}

// Returns a load that puts experts in another order in every layer.
ExpertLoad SomeLoad(const std::string& name) {
  const ModelConfig config = *LoadModelConfig(fixtures::ModelDir(name));
  ExpertLoad load(static_cast<size_t>(config.layers));
  for (int layer = config.latent->dense_layers; layer < config.layers; ++layer) {
    for (int e = 0; e < config.latent->experts.routed; ++e) {
      load[static_cast<size_t>(layer)].push_back((e * 5 + layer) % 7 * 100 + e);
    }
  }
  return load;
}

TEST_CASE("two and four ranks of experts give the logits and tokens of one device", "[ranks]") {
  CheckEveryModel(nullptr);
}

TEST_CASE("ranks of experts under ess give the logits and tokens of one device", "[ranks]") {
  CheckEveryModel([](PolicyOptions& options) {
    options.name = "ess";
    options.ess.sparse_memory_ratio = 0.2;
    options.ess.least_places = 0;  // A pool has what a step selects and the next one.
  });
}

TEST_CASE("ranks with copies of experts give the logits and tokens of one device", "[ranks]") {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    const int routed = LoadModelConfig(fixtures::ModelDir(name))->latent->experts.routed;
    const auto check = [&](int size, int redundancy, const ExpertLoad& load) {
      INFO(redundancy << " copies, load " << !load.empty());
      CheckRanks(name, size, nullptr, 1e-3, "portable", Divided::kExperts,
                 {redundancy, load, false});
    };
    check(2, 1, SomeLoad(name));
    check(4, 1, {});
    check(4, 0, SomeLoad(name));
    check(4, routed - routed / 4, SomeLoad(name));  // Every rank has every expert.
  }
}

TEST_CASE("with copies of experts a rank's logits have the same bits beside any other rank's rows",
          "[ranks]") {
  const std::string name = "tiny-deepseek-v32", dir = fixtures::ModelDir(name);
  const std::vector<RankWork> work = WorkOf(name, 3);
  const auto wrong = testing::RunRankProcesses(
      testing::RankOptions(2), [&](const RankGroupOptions& options) -> std::string {
        std::vector<Answer> answers;
        for (const bool beside : {true, false}) {
          RankGroupOptions own = options;
          own.name += beside ? "" : "-alone";
          Teacher teacher(dir, "portable", DType::kFloat32, nullptr, &own, Divided::kExperts,
                          {1, SomeLoad(name), false});
          const std::vector<RankWork> all = {work[0], beside ? work[1] : RankWork{}};
          answers.push_back(AnswerOf(teacher, all, static_cast<size_t>(options.rank)));
        }
        if (options.rank > 0) return "";
        return answers[0].size() == kTokens && answers[0] == answers[1] ? "" : "the bits differ";
      });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("a step of a rank of experts launches what one device does, and its exchanges",
          "[ranks]") {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    const std::string dir = fixtures::ModelDir(name);
    const std::vector<int32_t> prompt(40, 7);
    const ModelConfig config = *LoadModelConfig(dir);
    const int layers = config.layers - config.latent->dense_layers;
    REQUIRE(layers > 0);
    const auto wrong = testing::RunRankProcesses(
        testing::RankOptions(2), [&](const RankGroupOptions& options) -> std::string {
          Teacher whole(dir, "portable", DType::kFloat32);
          std::map<std::string, int> want = whole.LaunchesOfStep(prompt);
          want["all-to-all"] = 2 * layers;
          for (const char* own :
               {"pack_places", "pack_rows", "unpack_rows", "unpack_pairs", "add_parts"}) {
            want[own] = layers;
          }
          std::string text;
          for (const Experts& experts : {Experts{}, Experts{1, SomeLoad(name), true}}) {
            RankGroupOptions own = options;
            own.name += experts.redundancy > 0 ? "-copies" : "";
            Teacher rank(dir, "portable", DType::kFloat32, nullptr, &own, Divided::kExperts,
                         experts);
            const std::map<std::string, int> got = rank.LaunchesOfStep(prompt);
            if (got == want) continue;
            absl::StrAppend(&text, "launches ");
            for (const auto& [what, n] : got) absl::StrAppend(&text, what, " ", n, " ");
          }
          return text;
        });
    CHECK(testing::Joined(wrong) == "");
  }
}

TEST_CASE("a rank of experts counts the choices of its rows, wherever the experts are", "[ranks]") {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    INFO(name);
    const std::string dir = fixtures::ModelDir(name);
    const ModelConfig config = *LoadModelConfig(dir);
    const LatentConfig& latent = *config.latent;
    const std::vector<RankWork> work = WorkOf(name, 3);
    const auto wrong = testing::RunRankProcesses(
        testing::RankOptions(2), [&](const RankGroupOptions& options) -> std::string {
          const std::vector<RankWork> all = {work[0], work[1]};
          std::vector<ExpertLoad> counted;
          for (const Experts& experts : {Experts{0, {}, true}, Experts{2, SomeLoad(name), true}}) {
            RankGroupOptions own = options;
            own.name += experts.redundancy > 0 ? "-copies" : "";
            Teacher teacher(dir, "portable", DType::kFloat32, nullptr, &own, Divided::kExperts,
                            experts);
            AnswerOf(teacher, all, static_cast<size_t>(options.rank));
            counted.push_back(*teacher.model().CountedExpertLoad());
          }
          if (counted[0] != counted[1]) return "the counts differ";
          const RankWork& own = all[static_cast<size_t>(options.rank)];
          // The last token is not computed. Padded rows choose nothing.
          const int64_t rows = std::ssize(own.prompt) + kTokens - 1;
          for (int layer = 0; layer < config.layers; ++layer) {
            int64_t sum = 0;
            for (const int64_t n : counted[0][static_cast<size_t>(layer)]) sum += n;
            const int64_t want = layer < latent.dense_layers ? 0 : rows * latent.experts.per_token;
            if (sum != want) return absl::StrCat(sum, " choices, not ", want);
          }
          return "";
        });
    CHECK(testing::Joined(wrong) == "");
  }
}

TEST_CASE("ranks of experts that exchange e4m3 give nearly the logits of one device", "[ranks]") {
  CheckRanks("tiny-deepseek-v32", 2, nullptr, 0.1, "portable", Divided::kExpertsByFp8);
}

TEST_CASE("two ranks of experts on one GPU give the tokens of one rank", "[ranks][cuda]") {
  if (const std::string why = testing::WhyNoSharedGpu(); !why.empty()) return SkipTest(why);
  // Activations are rounded to bf16, and a sum in another order rounds otherwise.
  for (const std::string& name : fixtures::TinyLatentModels()) {
    CheckRanks(name, 2, nullptr, 2e-2, "cuda");
    CheckRanks(name, 2, nullptr, 2e-2, "cuda", Divided::kExperts, {1, SomeLoad(name), false});
  }
}

}  // namespace
}  // namespace sluice
