// `sluice-profile fluxion`: samples of heads, the training of policy fluxion's predictor by them,
// and its check on other documents.
#pragma once

#include <string>
#include <vector>

namespace sluice {

// Runs `sluice-profile fluxion` with the arguments behind that word, and returns the exit status.
int RunFluxionCommand(const std::vector<std::string>& args);

}  // namespace sluice
