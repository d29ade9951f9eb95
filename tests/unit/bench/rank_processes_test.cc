// These tests are of the processes that sluice-bench ranks forks.
#include "src/bench/ranks/rank_processes.h"

#include <signal.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"

namespace sluice::bench {
namespace {

TEST_CASE("ranks run in processes of their own, and their lines come whole") {
  std::set<std::string> lines;
  const std::string rest(10'000, 'x');  // longer than one read
  const absl::Status status = RunRanks(
      3, RankGpus::kNone,
      [&](int rank, const auto& say) {
        for (int i = 0; i < 2; ++i) say(absl::StrCat(rank, " ", i, rest));
        say(getpid() == getppid() ? "same" : "");
        return absl::OkStatus();
      },
      [&](const std::string& line) { lines.insert(line); });
  CHECK(status.ok());
  CHECK(lines.size() == 7);
  CHECK(lines.count(absl::StrCat("2 1", rest)) == 1);
  CHECK(lines.count("") == 1);
}

TEST_CASE("the errors of ranks are named by their numbers, and so is a rank that was killed") {
  const absl::Status status = RunRanks(
      3, RankGpus::kNone,
      [](int rank, const auto&) {
        if (rank == 1) return absl::InternalError("lost\nits way");
        if (rank == 2) kill(getpid(), SIGKILL);
        return absl::OkStatus();
      },
      [](const std::string&) {});
  CHECK(status.message() == "rank 1: lost its way; rank 2: was killed by signal 9");
}

TEST_CASE("a rank sees one GPU, or seems to have a host of its own") {
  std::set<std::string> seen;
  const auto see = [&](RankGpus gpus) {
    seen.clear();
    const absl::Status status = RunRanks(
        2, gpus,
        [](int, const auto& say) {
          for (const char* name : {"CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"}) {
            if (const char* value = std::getenv(name)) say(absl::StrCat(name, "=", value));
          }
          return absl::OkStatus();
        },
        [&](const std::string& line) { seen.insert(line); });
    CHECK(status.ok());
    return seen;
  };
  unsetenv("CUDA_VISIBLE_DEVICES");
  CHECK(see(RankGpus::kOwn) ==
        std::set<std::string>{"CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"});
  CHECK(see(RankGpus::kShared) ==
        std::set<std::string>{"NCCL_HOSTID=rank-0", "NCCL_HOSTID=rank-1"});
  CHECK(see(RankGpus::kNone).empty());
  setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5", 1);
  CHECK(see(RankGpus::kOwn) ==
        std::set<std::string>{"CUDA_VISIBLE_DEVICES=3", "CUDA_VISIBLE_DEVICES=GPU-5"});
  unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST_CASE("all ranks see what one of them sets") {
  const auto shared = RankSwitch::Create();
  REQUIRE(shared.ok());
  CHECK(!(*shared)->on());
  const absl::Status status = RunRanks(
      1, RankGpus::kNone,
      [&](int, const auto&) {
        (*shared)->Set(true);
        return absl::OkStatus();
      },
      [](const std::string&) {});
  CHECK(status.ok());
  CHECK((*shared)->on());
}

}  // namespace
}  // namespace sluice::bench
