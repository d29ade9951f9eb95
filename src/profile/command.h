// sluice-profile: the command.
#pragma once

#include <string>
#include <vector>

namespace sluice {

// `args`: the command line after the program's name. Exit status: 0; 1: it could not be measured or
// written; 2: a bad command line. What is wrong is said in one sentence on standard error.
int RunProfileCommand(const std::vector<std::string>& args);

}  // namespace sluice
