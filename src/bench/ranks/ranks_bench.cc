// sluice-bench ranks: times decode steps of a model that ranks divide. This process forks them,
// reads what rank 0 measures and writes the report; it uses no device itself.
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "src/base/status_macros.h"
#include "src/bench/ranks/rank_processes.h"
#include "src/bench/ranks/rank_run.h"
#include "src/bench/ranks/ranks_options.h"
#include "src/bench/ranks/ranks_report.h"
#include "src/bench/report/subcommand.h"
#include "src/model/model_config.h"

namespace sluice::bench {
namespace {

class RanksBench {
 public:
  RanksBench(RanksOptions options, Report report)
      : options_(std::move(options)),
        out_(options_.json),
        report_(std::move(report)),
        table_(options_, &report_, [this](const std::string& text) { out_.Print(text); }) {}

  absl::StatusOr<int> Run() {
    SLUICE_RETURN_IF_ERROR(LoadModelConfig(options_.model).status());
    SLUICE_ASSIGN_OR_RETURN(switch_, RankSwitch::Create());
    gpus_ = options_.device == "cuda" ? CountGpus() : 0;
    if (options_.device == "cuda") report_.shape.emplace_back("gpus", absl::StrCat(gpus_));
    // Groups behind one that failed may still be measured.
    absl::Status failed;
    for (const int64_t ranks : options_.ranks) failed.Update(RunGroup(static_cast<int>(ranks)));
    const int status = out_.Finish(report_);
    SLUICE_RETURN_IF_ERROR(failed);
    return status;
  }

 private:
  absl::Status RunGroup(int ranks) {
    RankGpus gpus = RankGpus::kNone;
    if (options_.device == "cuda" && ranks > 1) {
      gpus = gpus_ >= ranks ? RankGpus::kOwn : RankGpus::kShared;
    }
    if (gpus == RankGpus::kShared) {
      report_.shape.emplace_back(
          "shared", absl::StrCat(ranks, " ranks share one of ", gpus_,
                                 " GPUs and exchange by sockets: their times say nothing of GPUs "
                                 "of their own"));
    }
    RankGroupOptions group;
    group.name = absl::StrCat("sluice-bench-", getpid(), "-", ranks);
    group.size = ranks;
    switch_->Set(false);
    absl::Status said;
    const absl::Status ran = RunRanks(
        ranks, gpus,
        [&](int rank, const auto& say) {
          RankGroupOptions own = group;
          own.rank = rank;
          return RunRank(options_, own, switch_.get(), SayLines(say));
        },
        [&](const std::string& line) {
          if (said.ok()) said = table_.Add(ranks, line);
          // The figures so far stay if the rest does not come.
          if (said.ok() && out_.table() && !options_.json.empty()) {
            said = WriteReport(report_, options_.json);
          }
        });
    SLUICE_RETURN_IF_ERROR(ran);
    return said;
  }

  const RanksOptions options_;
  const Output out_;
  Report report_;
  RanksReport table_;
  std::unique_ptr<RankSwitch> switch_;
  int gpus_ = 0;
};

}  // namespace

int RunRanksBench(const Invocation& invocation) {
  RanksOptions o;
  if (const auto status = ReadRanksOptions(invocation, &o)) return *status;
  Report report = NewReport("ranks", invocation);
  report.shape = {
      {"divided", o.divide},
      {"ranks", absl::StrJoin(o.ranks, ",")},
      {"batches", absl::StrCat(absl::StrJoin(o.batches, ","), o.experts() ? " of each rank" : "")},
      {"context", absl::StrCat(o.context)},
      {"context_fill", "random keys and values, or zeros in latent caches"},
      {"policies", o.policies_text},
      {"steps", absl::StrCat(o.steps)}};
  if (o.misses > 0) report.shape.emplace_back("misses", absl::StrCat(o.misses, " by set lists"));
  if (o.experts()) report.shape.emplace_back("dispatch", o.dispatch);
  const absl::StatusOr<int> status = RanksBench(std::move(o), std::move(report)).Run();
  return status.ok() ? *status : Fail(status.status());
}

}  // namespace sluice::bench
