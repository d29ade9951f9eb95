// sluice-server decodes sequences whose KV caches prefill nodes hand over.
#include "src/base/status_macros.h"
#include "src/server/decode_node.h"
#include "src/server/plan.h"
#include "src/server/program.h"
#include "src/server/ranks.h"

int main(int argc, char** argv) {
  const auto run = [](const sluice::Config& given, sluice::Signals& signals) -> absl::Status {
    sluice::Config config = given;
    SLUICE_RETURN_IF_ERROR(sluice::ApplyWorkerSet(&config));
    SLUICE_RETURN_IF_ERROR(sluice::CheckRanks(&config));
    sluice::DivideCpus(&config);
    if (config.rank() > 0) return sluice::RunFollower(config, signals);
    SLUICE_ASSIGN_OR_RETURN(const auto node, sluice::DecodeNode::Start(config));
    return node->ServeUntil(signals);
  };
  return sluice::Main({"sluice-server", run, sluice::PrintPlan, sluice::CheckedPolicy}, argc, argv);
}
