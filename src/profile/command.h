// The command sluice-profile.
#pragma once

#include <string>
#include <vector>

namespace sluice {

// Runs the command. `args` is the command line after the program's name. Returns the exit status:
// 0, 1 if something could not be measured or written, or 2 for a bad command line. One sentence on
// standard error says what is wrong.
int RunProfileCommand(const std::vector<std::string>& args);

}  // namespace sluice
