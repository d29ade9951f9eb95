// sluice-server decodes sequences whose KV caches prefill nodes hand over.
#include "src/base/status_macros.h"
#include "src/server/decode_node.h"
#include "src/server/plan.h"
#include "src/server/program.h"

int main(int argc, char** argv) {
  const auto run = [](const sluice::Config& config, sluice::Signals& signals) -> absl::Status {
    SLUICE_ASSIGN_OR_RETURN(const auto node, sluice::DecodeNode::Start(config));
    return node->ServeUntil(signals);
  };
  return sluice::Main({"sluice-server", run, sluice::PrintPlan, sluice::CheckedPolicy}, argc, argv);
}
