// sluice-prefill computes prompts and hands their KV caches to sluice-server.
#include "src/base/status_macros.h"
#include "src/server/prefill_node.h"
#include "src/server/program.h"

int main(int argc, char** argv) {
  const auto run = [](const sluice::Config& config, sluice::Signals& signals) -> absl::Status {
    SLUICE_ASSIGN_OR_RETURN(const auto node, sluice::PrefillNode::Start(config));
    return node->ServeUntil(signals);
  };
  return sluice::Main({"sluice-prefill", run, nullptr}, argc, argv);
}
